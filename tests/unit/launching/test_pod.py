"""A pod that does not start its ranks: told to stop, or without a folder to write in."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.launching.pod import _record, main
from megatron_distill.launching.records import Launches, LaunchRecord, Status


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A script with settings, whose folder is `run`."""
    script = tmp_path / "program.py"
    script.write_text(f"print({f'output: {tmp_path}/run'!r})\n")
    return str(script)


def start(program: str) -> int:
    pods = ["--pods", "localhost", "--ranks-per-node", "1"]
    return main(["--job", "distill", "--attempt", "0", *pods, "--", program])


def test_a_folder_that_cannot_be_written_ends_the_job_instead_of_a_thousand_starts(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").write_text("a file")
    assert start(program) == 78
    text = capsys.readouterr().err
    assert f"error: output={tmp_path}/run: cannot write in {tmp_path}/run/launches (Not a" in text
    assert "or name another folder" in text


def test_a_user_s_file_ends_the_launches_of_pods(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launches = Launches(tmp_path / "run" / "launches", tmp_path / "run", "")
    launches.folder.mkdir(parents=True)
    launches.stop_file.touch()
    assert start(program) == 0
    assert f"not started: remove {launches.stop_file} to go on" in capsys.readouterr().err
    assert launches.all() == []

    launch = LaunchRecord("distill", 0, "distill", ["train"], ["n1"], ["n1"], 0, 1.0)
    launches.begin(launch)
    for is_stopped, text in ((True, "no further launch: "), (False, "goes on from step 0")):
        _record(launches, launch, Status.UNFINISHED, None)
        outcome = launches.outcome(launch)
        assert outcome is not None
        assert outcome.next.startswith(text)
        if is_stopped:
            launches.stop_file.unlink()
