"""What `status` says about the newest checkpoint of a run, and about the next start."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from megatron_distill.launching.records import Outcome, Status, progress_of
from megatron_distill.launching.status.read import read_status
from megatron_distill.runtime.folder_lock import take_lock
from tests.unit.launching.status.test_run_status import begin, launch


def no_checkpoint(run: Path) -> Path:
    shutil.rmtree(run / "checkpoints" / "step_0000020")
    return run


def ends_at(run: Path, steps: int, checkpoint: str = "{}") -> Path:
    """The settings of a run of so many steps."""
    (run / "config.yaml").write_text(f"train: {{steps: {steps}}}\ncheckpoint: {checkpoint}\n")
    return run


def line_of(run: Path, name: str) -> str:
    lines = read_status(run).lines()
    return next(line.split(maxsplit=1)[1] for line in lines if line.startswith(f"{name} "))


@pytest.mark.parametrize("content", [None, '{"step": 2', "\0\xff"])
@pytest.mark.parametrize(
    ("steps", "state"),
    [
        (20, "done: its newest checkpoint is damaged"),
        (40, "stopped: at step 20; step_0000020 is damaged: remove it before the next start"),
    ],
)
def test_a_checkpoint_without_a_sound_description_has_no_age(
    tmp_path: Path, steps: int, state: str, content: str | None
) -> None:
    """A start takes the folder by its name, and refuses it."""
    run = ends_at(begin(tmp_path / "run", steps_done=20), steps)
    description = run / "checkpoints" / "step_0000020" / "description.json"
    description.unlink()
    if content is not None:
        description.write_bytes(content.encode("latin-1"))
    assert read_status(run).checkpoint_age is None
    assert line_of(run, "checkpoint") == (
        "step_0000020, without a sound description.json: no start can read it"
    )
    assert line_of(run, "state") == state


def test_a_checkpoint_by_a_clock_that_is_ahead_has_no_negative_age(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", steps_done=25)
    ahead = time.time() + 10_000
    os.utime(run / "checkpoints" / "step_0000020" / "description.json", (ahead, ahead))
    assert read_status(run).checkpoint_age == 0.0
    assert line_of(run, "checkpoint") == "step_0000020, 0:00 ago, saved in 1.5 s"


def test_a_checkpoint_after_the_end_of_the_log_is_the_step(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", steps_done=6)
    status = read_status(run)
    assert (status.step, status.seconds_left) == (20, 61.5)
    assert (status.state, status.detail) == ("stopped", "at step 20")
    assert read_status(ends_at(run, 20)).state == "done"


@pytest.mark.parametrize("checkpoint", ["{}", "{save: false}"])
def test_a_run_that_stopped_without_a_checkpoint_says_so(tmp_path: Path, checkpoint: str) -> None:
    run = ends_at(no_checkpoint(begin(tmp_path / "run", steps_done=10)), 40, checkpoint)
    words = "nothing is saved: the next start begins at step 0"
    assert line_of(run, "state") == f"stopped: at step 10; {words}"
    launch(run, Outcome(Status.FAILED, "why", 0, time.time(), "no further launch"))
    assert line_of(run, "state") == f"failed: why: no further launch; {words}"


def test_a_run_that_stopped_after_a_checkpoint_names_the_step_of_the_next_start(
    tmp_path: Path,
) -> None:
    run = begin(tmp_path / "run", steps_done=25)
    words = "the next start goes on from step 20"
    assert line_of(run, "state") == f"stopped: at step 25; {words}"
    launch(run, None)
    assert line_of(run, "state").endswith(f"; {words}")


def test_a_finished_run_says_that_no_checkpoint_is_left(tmp_path: Path) -> None:
    """As after an export; a run that never saves has nothing to miss."""
    run = no_checkpoint(begin(tmp_path / "run", steps_done=40))
    assert line_of(run, "state") == "done: no checkpoint is left"
    shutil.rmtree(run / "checkpoints")
    assert line_of(run, "state") == "done: no checkpoint is left"
    assert line_of(ends_at(run, 40, "{save: false}"), "state") == "done"
    ends_at(run, 40)
    launch(run, Outcome(Status.DONE, "done", 40, time.time(), "done"))
    assert line_of(run, "state") == "done: no checkpoint is left"


def test_a_run_that_ended_before_its_last_save_is_not_done(tmp_path: Path) -> None:
    """The log has the last step before its validation and its save."""
    run = begin(tmp_path / "run", steps_done=40)
    words = "stopped: at step 40; the next start goes on from step 20"
    assert line_of(run, "state") == words
    held = take_lock(run / ".lock", named="output=run")
    assert read_status(run).state == "running"
    held.close()
    (no_checkpoint(run) / "checkpoints" / "step_0000040.partial").mkdir()
    assert line_of(run, "state") == (
        "stopped: at step 40; nothing is saved: the next start begins at step 0"
    )


def test_a_finished_launch_names_the_newest_checkpoint_that_is_left(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", steps_done=40)
    launch(run, Outcome(Status.DONE, "done", 40, time.time(), "done"))
    assert line_of(run, "state") == "done: its last checkpoint is gone, the newest is of step 20"


def test_a_file_with_the_name_of_a_checkpoint_is_none(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", steps_done=25)
    (run / "checkpoints" / "step_0000030").touch()
    assert progress_of(run) == 20
    assert read_status(run).checkpoint == "step_0000020"
