"""Timers of the phases of a step."""

from __future__ import annotations

import pytest
import torch

from megatron_distill.signals import OnDemand
from megatron_distill.train import phase_timers
from megatron_distill.train.phase_timers import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    LOSS,
    OPTIMIZER,
    OTHER,
    PHASES,
    TEACHER,
    MegatronTimers,
    PhaseTimers,
)


class DeviceEvent:
    """An event of a device that takes a second for the work between two records."""

    now = 0.0
    done = 0.0  # of the device, where the host does not wait
    waits = 0
    made = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        DeviceEvent.made += 1

    def record(self) -> None:
        DeviceEvent.now += 1.0
        self.at = DeviceEvent.now

    def synchronize(self) -> None:
        assert self.at == DeviceEvent.now, "an event after this one is waited for"
        DeviceEvent.waits += 1

    def query(self) -> bool:
        return self.at <= DeviceEvent.done

    def elapsed_time(self, end: DeviceEvent) -> float:
        return (end.at - self.at) * 1000.0  # milliseconds, as CUDA's


def run_step(timers: PhaseTimers) -> None:
    """The phases of a step of one micro-batch, one clock tick after each change."""
    megatron = MegatronTimers(timers)
    with timers.phase(DATA):
        pass
    with timers.phase(OPTIMIZER):
        pass
    megatron("forward-backward", log_level=1).start(barrier=True)
    megatron("forward-compute", log_level=2).start()
    with timers.phase(TEACHER):
        pass
    with timers.phase(LOSS):
        megatron("forward-recv").start()
    megatron("forward-recv").stop()
    megatron("forward-compute").stop()
    megatron("backward-compute").start()
    megatron("backward-compute").stop()
    megatron("forward-backward").stop()
    with timers.phase(OPTIMIZER):
        pass


EXPECTED = {
    DATA: 1.0, TEACHER: 1.0, FORWARD: 3.0, LOSS: 1.0, BACKWARD: 1.0, COMMUNICATION: 3.0,
    OPTIMIZER: 2.0, OTHER: 5.0,
}  # fmt: skip


@pytest.fixture(params=["cpu", "cuda"])
def timers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PhaseTimers:
    """Timers whose clock ticks once per look."""
    clock = iter(range(1000))
    monkeypatch.setattr(phase_timers.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    return PhaseTimers(torch.device(request.param))


def test_phases_exclude_the_phases_within_them_and_add_up_to_the_step(timers: PhaseTimers) -> None:
    for _ in range(2):
        timers.start_step()
        run_step(timers)
        assert timers.end_step() == EXPECTED
        assert tuple(EXPECTED) == PHASES
        run_step(timers)  # a validation between two steps: not measured


def test_on_cuda_events_are_reused_and_only_the_last_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    monkeypatch.setattr(DeviceEvent, "waits", 0)
    monkeypatch.setattr(DeviceEvent, "made", 0)
    timers = PhaseTimers(torch.device("cuda"))
    for steps in (1, 2, 3):
        timers.start_step()
        run_step(timers)
        assert DeviceEvent.waits == steps - 1
        timers.end_step()
    assert (DeviceEvent.waits, DeviceEvent.made) == (3, sum(EXPECTED.values()) + 1)


def test_a_step_is_read_later_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    monkeypatch.setattr(DeviceEvent, "waits", 0)
    monkeypatch.setattr(DeviceEvent, "done", DeviceEvent.now)
    timers = PhaseTimers(torch.device("cuda"))
    timers.start_step()
    run_step(timers)
    first = timers.close_step()
    timers.start_step()  # the next step, while the device is at the first
    assert (first.is_known, DeviceEvent.waits) == (False, 0)
    monkeypatch.setattr(DeviceEvent, "done", DeviceEvent.now - 1.0)
    monkeypatch.setattr(DeviceEvent, "synchronize", lambda _: None)
    assert first.is_known
    assert timers.read(first) == EXPECTED
    run_step(timers)
    assert timers.read(timers.close_step()) == EXPECTED


def test_a_step_that_an_error_left_is_forgotten(timers: PhaseTimers) -> None:
    timers.start_step()
    with pytest.raises(ValueError, match="in a phase"), timers.phase(FORWARD):
        raise ValueError("in a phase")
    timers.start_step()
    run_step(timers)
    assert timers.end_step() == EXPECTED


def test_signals_count_when_they_are_computed(timers: PhaseTimers) -> None:
    signals = timers.of_teacher(OnDemand(3, lambda _: None))
    timers.start_step()
    assert [signals[number] for number in (0, 0, 1)] == [None] * 3
    assert timers.end_step()[TEACHER] == 2.0
