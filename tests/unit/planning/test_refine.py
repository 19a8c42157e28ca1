"""A run's log as a correction of a device: afterwards its phases are predicted as measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_distill.errors import DataError
from megatron_distill.planning.device import load_device
from megatron_distill.planning.parameters import stage_numbers
from megatron_distill.planning.refine import read_steps, refined
from megatron_distill.planning.run import Choice
from megatron_distill.planning.step_time import phase_seconds, step_time
from megatron_distill.runtime.groups import Layout
from tests.unit.planning.shapes import STUDENT, TEACHER, run_of

DEVICE = load_device("h100-80gb")
RUN = run_of(teacher=TEACHER)
CHOICE = Choice(
    layout=Layout(8),
    ranks=64,
    micro_batch_size=1,
    layers=(32,),
    place="shared",
    teacher_layout=Layout(8),
    teacher_layers=(80,),
)
NUMBERS = stage_numbers(STUDENT, CHOICE.layout, CHOICE.layers)
SPEED = {"teacher": 1.3, "forward": 0.8, "loss": 2.0, "backward": 1.1, "optimizer": 1.5}


def log(path: Path, steps: int, **changes: float) -> Path:
    predicted = phase_seconds(RUN, CHOICE, DEVICE, NUMBERS)
    timers = {phase: 1e3 * seconds * SPEED.get(phase, 1.0) for phase, seconds in predicted.items()}
    total = sum(timers.values()) / 1e3
    record = {
        "step_seconds": total,
        "timers": timers,
        "tokens_per_second": RUN.tokens / total,
        "tflops_per_device": 2.0 * RUN.tokens / total / 64 / 1e12,
        **changes,
    }
    slow = {**record, "timers": {phase: 9 * time for phase, time in timers.items()}}
    lines = [json.dumps(slow if step < 3 else record) for step in range(steps)]
    path.write_text("\n".join([*lines, '{"step": 7, "tim']), encoding="utf-8")
    return path


def test_the_refined_device_predicts_the_measured_phases(tmp_path: Path) -> None:
    measured = read_steps(log(tmp_path / "metrics.jsonl", 9))
    assert measured.count == 6
    device = refined(DEVICE, RUN, CHOICE, measured, shared_by=64)
    assert device.factors["teacher"] == pytest.approx(1.3, rel=1e-3)
    after = phase_seconds(RUN, CHOICE, device, NUMBERS)
    for phase in ("teacher", "forward", "loss", "backward"):
        assert after[phase] == pytest.approx(measured.phases[phase], rel=1e-3)  # type: ignore[index,literal-required]
    before = step_time(RUN, CHOICE, DEVICE, NUMBERS).total
    now = step_time(RUN, CHOICE, device, NUMBERS).total
    assert abs(now - measured.step) < abs(before - measured.step)
    assert now == pytest.approx(measured.step, rel=0.01)


def test_the_log_has_the_number_of_devices(tmp_path: Path) -> None:
    assert read_steps(log(tmp_path / "metrics.jsonl", 9)).devices(2.0) == 64


def test_a_log_without_steps_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="metrics.jsonl: has no step"):
        read_steps(log(tmp_path / "metrics.jsonl", 3))
