"""Timers of the phases of a step."""

from __future__ import annotations

import pytest
import torch

from megatron_distill.signals import OnDemand
from megatron_distill.train import phase_timers
from megatron_distill.train.phase_timers import TEACHER, PhaseTimers


class DeviceEvent:
    """An event of a device that takes a second for the work between two records."""

    now = 0.0
    waits = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        DeviceEvent.now += 1.0
        self.at = DeviceEvent.now

    def synchronize(self) -> None:
        DeviceEvent.waits += 1

    def elapsed_time(self, end: DeviceEvent) -> float:
        return (end.at - self.at) * 1000.0  # milliseconds, as CUDA's


def test_on_cuda_phases_are_measured_by_events_and_waited_for_when_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    monkeypatch.setattr(DeviceEvent, "waits", 0)
    timers = PhaseTimers(torch.device("cuda"))
    for name in (TEACHER, "other", TEACHER):
        with timers.phase(name):
            pass
    assert DeviceEvent.waits == 0
    assert timers.read() == {TEACHER: 2.0, "other": 1.0}
    assert timers.read() == {}


def test_signals_count_when_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(phase_timers.time, "perf_counter", lambda: float(next(clock)))
    timers = PhaseTimers(torch.device("cpu"))
    signals = timers.of_teacher(OnDemand(3, lambda _: None))
    assert timers.read() == {}
    assert [signals[number] for number in (0, 0, 1)] == [None] * 3
    assert timers.read() == {TEACHER: 2.0}
