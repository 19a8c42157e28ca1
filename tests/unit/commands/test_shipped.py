"""Shipped configurations by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.commands.job import config_file, shipped_folder
from tests.guards.source_tree import ROOT


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["tiny.yaml", "configs/tiny.yaml", "./tiny.yaml"])
def test_a_shipped_file_is_found_by_its_name(name: str) -> None:
    assert config_file(name) == ROOT / "configs" / "tiny.yaml" == shipped_folder() / "tiny.yaml"


def test_a_file_that_is_there_comes_first(empty_folder: Path) -> None:
    (empty_folder / "configs").mkdir()
    for name in ("tiny.yaml", "configs/tiny.yaml"):
        (empty_folder / name).write_text("seed: 1\n")
        assert config_file(name) == Path(name)


@pytest.mark.parametrize(
    "name", ["none.yaml", "configs/none.yaml", "configs", "../configs/tiny.yaml", "/x/tiny.yaml"]
)
def test_any_other_name_stays_as_it_is(name: str) -> None:
    assert config_file(name) == Path(name)
