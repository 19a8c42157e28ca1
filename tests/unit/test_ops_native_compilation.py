"""Compiling the row functions: kept once, made again if damaged, done without if impossible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_distill.ops.native import native_rows, rows
from megatron_distill.ops.native.compilation import cache_folder, compiled


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if compiled("rows.c") is None:
        pytest.skip("no C compiler for this CPU")
    return tmp_path / "cache" / "megatron-distill"


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_a_library_is_made_once(cache: Path) -> None:
    (made,) = libraries(cache)
    before = made.stat().st_mtime_ns
    assert compiled("rows.c") is not None
    assert libraries(cache) == [made]
    assert made.stat().st_mtime_ns == before


def test_a_damaged_library_is_made_again(cache: Path) -> None:
    (made,) = libraries(cache)
    whole = made.read_bytes()
    # Another file: this process has the old one in use.
    made.unlink()
    made.write_bytes(whole[:100])
    assert compiled("rows.c") is not None
    assert libraries(cache) == [made]
    assert len(made.read_bytes()) == len(whole)


def test_another_command_makes_another_library(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "gcc -DANOTHER")
    assert compiled("rows.c") is not None
    assert len(libraries(cache)) == 2


def test_a_folder_that_cannot_be_written_is_done_without(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiled("rows.c") is not None


def test_a_full_disk_leaves_no_part_of_a_library(
    cache: Path, small_disk: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(small_disk)
    full = small_disk("4k")
    monkeypatch.setenv("XDG_CACHE_HOME", str(full))
    assert compiled("rows.c") is not None
    assert not [path for path in full.rglob("*") if path.is_file()]


def test_without_a_home_nothing_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    assert cache_folder() is None
    assert compiled("rows.c") is not None


@pytest.mark.parametrize("compiler", ["false", "sh -c 'exit 1'"])
def test_a_compiler_that_fails_is_done_without(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    assert compiled("rows.c") is None
    assert not libraries(tmp_path)


def test_no_compiler_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert compiled("rows.c") is None
    rows._functions.cache_clear()
    try:
        assert native_rows(torch.zeros(2, 2)) is None
    finally:
        rows._functions.cache_clear()
