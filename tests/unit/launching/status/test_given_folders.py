"""Folders as a user gives them: from inside, with a slash at the end, and without a name."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron_distill.cli import main
from megatron_distill.launching.records import Launches, LaunchRecord
from tests.unit.launching.status.test_run_status import begin


def test_a_folder_may_be_given_from_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, store = begin(tmp_path / "run", steps_done=25), tmp_path / "store"
    launches = Launches(tmp_path / "store.launches", store, "")
    launches.begin(LaunchRecord("7", 1, "7", ["capture"], ["n1"], ["n1"], 0, time.time()))
    store.mkdir()
    for folder, found in ((run, "stopped: at step 25"), (store, "starting: launch 7-1 on n1")):
        monkeypatch.chdir(folder)
        for name in (".", "", f"../{folder.name}/"):
            assert main(["status", name]) == 0, (folder, name)
            assert f"state       {found}" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for name in (".", "/"):
        assert main(["status", name]) == 1
        assert f"error: {name}: no run has started here" in capsys.readouterr().err
