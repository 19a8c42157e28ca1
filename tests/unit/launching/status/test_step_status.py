"""A run's state about its steps: why none is slow, more than are wanted, and the time left."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megatron_distill.launching.status.read import read_status
from tests.unit.launching.status.test_run_status import begin, launch


@pytest.mark.parametrize(
    ("settings", "layout", "reason"),
    [
        ("", None, "logging.straggler_interval"),
        ("logging: {straggler_interval: 0}\n", None, "logging.straggler_interval is 0"),
        (
            "logging: {straggler_interval: 100}\n",
            "tp1-pp2-vpp1-cp1-ep1-dp2",
            "fewer steps than logging.straggler_interval = 100",
        ),
        (
            "logging: {straggler_interval: 100}\n",
            "tp1-pp2-vpp1-cp1-ep1-dp1",
            "one rank per pipeline stage has nothing to be compared with",
        ),
        (
            "logging: {straggler_interval: 25}\n",
            None,
            "no start has made logging.straggler_interval = 25 steps, or a pipeline stage has one "
            "rank",
        ),
    ],
)
def test_a_run_without_slow_ranks_says_why(
    tmp_path: Path, settings: str, layout: str | None, reason: str
) -> None:
    run = begin(tmp_path / "run", steps_done=25)
    (run / "config.yaml").write_text(f"train: {{steps: 40}}\n{settings}")
    log = run / "metrics.jsonl"
    log.write_text(log.read_text().replace("slowest_ranks", "other"))
    description = run / "checkpoints" / "step_0000020" / "description.json"
    description.write_text(json.dumps({} if layout is None else {"layout": layout}))
    assert f"slowest     not known ({reason})" in read_status(run).lines()


def test_a_run_past_its_steps_has_no_share_of_them(tmp_path: Path) -> None:
    """Its second start asked for fewer."""
    run = begin(tmp_path / "run", steps_done=25)
    (run / "config.yaml").write_text("train: {steps: 20}\n")
    assert "step        25, past train.steps = 20" in read_status(run).lines()


SETTINGS = {
    "train": {"steps": 40},
    "validation": {"interval": 4, "samples": 8},
    "evaluation": {"interval": 15, "tasks": [{"task": "mmlu"}]},
    "checkpoint": {"interval": 7, "save": True, "asynchronous": False},
}
STEP, SAVE = 3.0, 1.5  # seconds, as in `begin`


def held_out(step: int, seconds: float) -> dict[str, object]:
    """The record of a validation."""
    return {"step": step, "validation": {"ce_loss": 2.0}, "validation_seconds": seconds}


def evaluated(step: int, *seconds: float, role: str = "student") -> dict[str, object]:
    """The record of an evaluation with a task for each of the seconds."""
    tasks = {f"task{index}": {"seconds": one} for index, one in enumerate(seconds)}
    return {"step": step, "evaluation": {role: tasks}}


def left_of(
    run: Path, measured: Sequence[Mapping[str, object]], *, steps_done: int = 22, **changes: object
) -> float | None:
    """Return the time left of a run with these records, each behind the step that it is of."""
    if not run.exists():
        begin(run, steps_done=1)
    (run / "config.yaml").write_text(json.dumps({**SETTINGS, **changes}))
    records: list[Mapping[str, object]] = [one for one in measured if one["step"] == 0]
    for step in range(1, steps_done + 1):
        # Two starts: the second one begins at step 13.
        start = {"device": {"kind": "cpu"}} if step in (1, 13) else {}
        records.append({"step": step, "step_seconds": STEP, **start})
        records += [one for one in measured if one["step"] == step]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    return read_status(run).seconds_left


def test_the_time_left_has_what_is_due_between_the_steps(tmp_path: Path) -> None:
    """Validations of 24, 28, 32, 36, 40; evaluations of 30, 40; saves of 28, 35, 40."""
    slow = [held_out(8, 90.0), evaluated(0, 70.0, 7.0)]  # of an earlier start
    newest = [held_out(16, 4.0), held_out(20, 6.0), evaluated(15, 10.0, 2.0)]
    left = 18 * STEP + 5 * 5.0 + 2 * 12.0 + 3 * SAVE
    assert left_of(tmp_path / "run", [*slow, *newest]) == pytest.approx(left)
    assert "left        1:48" in read_status(tmp_path / "run").lines()


def test_a_new_start_takes_what_the_one_before_measured(tmp_path: Path) -> None:
    """Also where it is too long ago to be among the newest records."""
    measured = [held_out(4, 8.0), held_out(8, 9.0), evaluated(0, 11.0)]
    left = 18 * STEP + 5 * 9.0 + 2 * 11.0 + 3 * SAVE
    assert left_of(tmp_path / "run", measured) == pytest.approx(left)
    log = tmp_path / "run" / "metrics.jsonl"
    step = json.dumps({"step": 22, "step_seconds": STEP, "sources": "x" * 100_000})
    with log.open("a") as stream:
        stream.write(f"{step}\n" * 20)
    assert read_status(tmp_path / "run").seconds_left == pytest.approx(left)


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, 20 * STEP + 5 * 4.0 + 2 * 12.0 + 4 * SAVE),
        ({"validation": {"interval": 0, "samples": 8}}, 20 * STEP + 4.0 + 2 * 12.0 + 4 * SAVE),
        ({"validation": {"interval": 4, "samples": 0}}, 20 * STEP + 2 * 12.0 + 4 * SAVE),
        ({"evaluation": {"interval": 15, "tasks": []}}, 20 * STEP + 5 * 4.0 + 4 * SAVE),
        ({"checkpoint": {"interval": 7, "save": False}}, 20 * STEP + 5 * 4.0 + 2 * 12.0),
        (
            {"checkpoint": {"interval": 7, "asynchronous": True}},
            20 * STEP + 5 * 4.0 + 2 * 12.0 + SAVE,
        ),
    ],
)
def test_only_what_the_settings_ask_for_takes_time(
    tmp_path: Path, changes: dict[str, object], left: float
) -> None:
    measured = [held_out(16, 4.0), held_out(20, 4.0), evaluated(15, 12.0)]
    found = left_of(tmp_path / "run", measured, steps_done=20, **changes)
    assert found == pytest.approx(left)


def test_what_is_due_after_the_newest_step_counts_until_it_has_ended(tmp_path: Path) -> None:
    """After step 28 a validation and a save, after the last one an evaluation too."""
    run, measured = tmp_path / "run", [held_out(20, 4.0), evaluated(15, 12.0)]
    rest = 12 * STEP + 3 * 4.0 + 2 * 12.0 + 2 * SAVE
    assert left_of(run, measured, steps_done=28) == pytest.approx(rest + 4.0 + SAVE)
    measured.append(held_out(28, 4.0))
    assert left_of(run, measured, steps_done=28) == pytest.approx(rest + SAVE)
    save(run, 28)
    assert left_of(run, measured, steps_done=28) == pytest.approx(rest)
    assert left_of(run, measured, steps_done=40) == pytest.approx(4.0 + 12.0 + SAVE)
    measured += [held_out(40, 4.0), evaluated(40, 12.0)]
    assert left_of(run, measured, steps_done=40) == pytest.approx(SAVE)
    save(run, 40)
    assert left_of(run, measured, steps_done=40) == 0.0


def test_what_is_not_measured_yet_takes_no_time(tmp_path: Path) -> None:
    """A teacher's evaluation, which is done once, says nothing about the student's."""
    run = begin(tmp_path / "run", steps_done=1)
    (run / "checkpoints" / "step_0000020" / "description.json").write_text("{}")
    damaged = {"step": 16, "validation": {}, "validation_seconds": None}
    measured = [damaged, evaluated(0, 50.0, role="teacher")]
    assert left_of(run, measured) == pytest.approx(18 * STEP)


def save(run: Path, step: int) -> None:
    """A checkpoint of a step."""
    folder = run / "checkpoints" / f"step_{step:07d}"
    folder.mkdir()
    (folder / "description.json").write_text(json.dumps({"save_seconds": SAVE}))


@pytest.mark.parametrize(
    ("changes", "measured", "pause"),
    [
        ({}, [held_out(20, 400.0), evaluated(15, 60.0, 40.0)], 500.0),
        # Not measured yet: no longer than as many samples of training, in steps of 4.
        ({"validation": {"interval": 4, "samples": 800}}, [], 200 * STEP),
        ({"validation": {"interval": 4, "samples": 0}}, [held_out(20, 400.0)], 0.0),
    ],
)
def test_a_run_whose_lock_is_elsewhere_may_be_silent_in_a_validation(
    tmp_path: Path, changes: dict[str, object], measured: list[dict[str, object]], pause: float
) -> None:
    run = tmp_path / "run"
    left_of(run, measured, train={"steps": 40, "global_batch_size": 4}, **changes)
    launch(run, None, started=time.time() - 9000)
    for silence, state in ((pause + 100.0, "running"), (pause + 140.0, "failed")):
        os.utime(run / "metrics.jsonl", (time.time() - silence,) * 2)
        assert read_status(run).state == state
