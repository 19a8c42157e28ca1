"""Files of results: an earlier one stays where a disk is full, and one lost file costs no other."""

from __future__ import annotations

import argparse
import errno
import json
import os
import threading
from pathlib import Path

import pytest

from megatron_distill.cli import main
from megatron_distill.commands import command
from megatron_distill.commands.command import keep_result, no_file, write_result
from megatron_distill.commands.evaluate import _write_results
from megatron_distill.errors import ConfigError


def full(_: int) -> None:
    """In place of a flush, on a disk without room."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_full_disk_keeps_an_earlier_file_and_prints_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    write_result(path, "earlier")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError) as refused:
        keep_result(path, "result\n")
    assert str(refused.value) == (
        f"{path}: cannot be written (No space left on device); name another file. "
        "Standard output has its content instead"
    )
    assert capsys.readouterr().out == "result\n"
    assert (names(tmp_path), path.read_text()) == (["x.json"], "earlier")


def test_a_link_and_a_pipe_stay_what_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("elsewhere/x.json")
    assert no_file(link) is None
    write_result(link, "linked")
    assert link.is_symlink()
    assert (tmp_path / "elsewhere" / "x.json").read_text() == "linked"

    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert no_file(pipe) is None
    write_result(pipe, "piped")
    reader.join(timeout=60)
    assert (read, pipe.is_fifo()) == (["piped"], True)

    assert no_file(Path("/dev/stdout")) is None
    write_result(Path("/dev/stdout"), "printed")
    assert capfd.readouterr().out == "printed"


def test_a_place_that_takes_no_file_from_the_superuser_either_is_named(tmp_path: Path) -> None:
    for path in (Path("/proc/x.json"), Path("/proc/self/x.json")):
        assert str(no_file(path)).startswith(f"{path}: ")
    for descriptor in ("/proc/self/fd/1", f"/proc/self/task/{os.getpid()}/fd/1", "/dev/fd/1"):
        assert no_file(Path(descriptor)) is None
    assert no_file(tmp_path / "x.json") is None
    assert names(tmp_path) == []


@pytest.mark.parametrize("lost", ["results", "items", "both"])
def test_one_lost_file_costs_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    files = {"results": tmp_path / "results.json", "items": tmp_path / "items.json"}
    for name, path in files.items():
        if lost in (name, "both"):
            files[name] = Path("/proc") / path.name  # which no one writes
    arguments = argparse.Namespace(json=files["results"], items=files["items"], lm_eval=[])
    with pytest.raises(ConfigError) as refused:
        _write_results({"model": "a"}, {"results": {"acc": 0.5}}, arguments)
    kept = [path.name for path in files.values() if path.parent == tmp_path]
    assert names(tmp_path) == kept
    for name, path in files.items():
        assert (f"{path}: cannot be written" in str(refused.value)) == (lost in (name, "both"))
    results = {"model": "a", "results": {"acc": 0.5}}
    printed = capsys.readouterr().out
    found = printed if lost != "items" else files["results"].read_text()
    assert json.loads(found) == results
    assert (printed == "") == (lost == "items")


def test_results_are_printed_where_the_items_are_lost(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argparse.Namespace(json=None, items=Path("/proc/items.json"), lm_eval=["a"])
    with pytest.raises(ConfigError, match="/proc/items.json: cannot be written"):
        _write_results({"model": "a"}, {"samples": {"a": []}, "n": 1}, arguments)
    assert json.loads(capsys.readouterr().out) == {"model": "a", "n": 1}


_OUTPUTS = {
    "--json": ("evaluate", "runs/first"),
    "--items": ("evaluate", "runs/first", "--tasks", "quiz.yaml"),
    "--text": ("generate", "runs/first"),
}


@pytest.mark.parametrize("option", _OUTPUTS)
@pytest.mark.parametrize("is_there", [True, False], ids=["a file", "a folder"])
def test_a_place_that_takes_no_file_is_refused_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    is_there: bool,
) -> None:
    path = tmp_path / "x"
    if is_there:
        path.touch()
    # The superuser may write everywhere but on a disk that is mounted read-only.
    refused = path if is_there else tmp_path
    monkeypatch.setattr(command.os, "access", lambda place, _: place != refused)
    with pytest.raises(SystemExit) as ended:
        main([*_OUTPUTS[option], option, str(path)])
    assert ended.value.code == 2
    reason = "this file cannot be written" if is_there else f"no file can be made in {tmp_path}"
    assert f"{path}: {reason}; name " in capsys.readouterr().err
