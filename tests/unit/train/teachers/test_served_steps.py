"""Times of the steps that a rank of a teacher serves; rounds of held-out batches have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch

from megatron_distill.train.phase_report import PhaseNotes
from megatron_distill.train.phase_timers import FORWARD, OTHER, TEACHER_PHASES, WAITING, PhaseTimers
from megatron_distill.train.profile import StepProfiler
from megatron_distill.train.teachers.served_steps import SENDING, SLOT, ServedSteps
from tests.unit.train.test_phase_report import DeviceEvent

LAST = 3


class Recorded:
    """The calls of a profiler and of notes, and the seconds of a thread that sends answers."""

    def __init__(self) -> None:
        self.profiled: list[tuple[str, int]] = []
        self.noted: list[tuple[int, Mapping[str, float], Mapping[str, float]]] = []
        self.seconds = {SLOT: 0.0, SENDING: 0.0}

    def before_step(self, step: int) -> None:
        self.profiled.append(("before", step))

    def after_step(self, step: int, *noted: Any) -> None:
        if noted:
            self.noted.append((step, *noted))
        else:
            self.profiled.append(("after", step))


def served(device: str, recorded: Recorded) -> ServedSteps:
    timers = PhaseTimers(torch.device(device), TEACHER_PHASES)
    profiler, notes = cast(StepProfiler, recorded), cast(PhaseNotes, recorded)
    return ServedSteps(timers, profiler, notes, recorded, last_step=LAST)


def serve(steps: ServedSteps, number: int | None) -> None:
    """Wait for a command and run its round; None: of a held-out batch."""
    with steps.waiting():
        pass
    if number is None:
        with steps.timers.phase(FORWARD):
            pass
        return
    with steps.step(number), steps.timers.phase(FORWARD):
        pass


@pytest.fixture(autouse=True)
def device_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    monkeypatch.setattr(DeviceEvent, "done", 0.0)
    monkeypatch.setattr(DeviceEvent, "now", 0.0)


def test_steps_are_noted_and_held_out_rounds_are_not() -> None:
    recorded = Recorded()
    steps = served("cpu", recorded)
    for number in (1, None, None, 2):
        serve(steps, number)
        recorded.seconds = {SLOT: 0.5, SENDING: 2.0 + recorded.seconds[SENDING]}
    assert [step for step, *_ in recorded.noted] == [1, 2]
    assert recorded.profiled == [("before", 1), ("after", 1), ("before", 2), ("after", 2)]
    assert [sender for *_, sender in recorded.noted] == [
        {SLOT: 0.0, SENDING: 0.0},
        {SLOT: 500.0, SENDING: 6000.0},
    ]
    for _, phases, _ in recorded.noted:
        assert tuple(phases) == TEACHER_PHASES
        assert min(phases[WAITING], phases[FORWARD]) > 0.0


def test_a_step_is_noted_once_the_device_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceEvent, "synchronize", lambda _: None)
    recorded = Recorded()
    steps = served("cuda", recorded)
    serve(steps, 1)
    ended = DeviceEvent.now
    with steps.waiting():
        pass
    assert recorded.noted == []  # nothing has waited for the device
    monkeypatch.setattr(DeviceEvent, "done", ended)
    with steps.step(2):
        pass
    ((step, phases, _),) = recorded.noted
    assert step == 1
    usual = {WAITING: 1000.0, FORWARD: 1000.0, OTHER: 3000.0}
    assert phases == {**dict.fromkeys(TEACHER_PHASES, 0.0), **usual}


def test_the_last_step_is_noted_before_a_further_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(event: DeviceEvent) -> None:
        DeviceEvent.done = event.at

    monkeypatch.setattr(DeviceEvent, "synchronize", finish)
    recorded = Recorded()
    steps = served("cuda", recorded)
    for number in range(1, LAST):
        serve(steps, number)
    assert recorded.noted == []
    serve(steps, LAST)
    assert [step for step, *_ in recorded.noted] == list(range(1, LAST + 1))
