"""Times of phases: the timers of a rank, and the lines with those of all."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron_distill.config.schema.training import LoggingConfig
from megatron_distill.runtime.bridge import Bridge
from megatron_distill.runtime.roles import Roles
from megatron_distill.signals import OnDemand
from megatron_distill.train import phase_timers
from megatron_distill.train.phase_report import (
    PhaseNotes,
    PhaseReports,
    RankPhases,
    TeacherReports,
    straggler_text,
    timers_text,
)
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
    TEACHER_PHASES,
    WAITING,
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


HOSTS = [f"node{rank // 2}" for rank in range(6)]


def rank(stage: int = 0, **milliseconds: float) -> RankPhases:
    return RankPhases(stage, {**dict.fromkeys(PHASES, 0.0), **milliseconds})


def test_the_slowest_rank_of_a_phase_is_named_with_its_host() -> None:
    usual = {FORWARD: 100.0, BACKWARD: 200.0, COMMUNICATION: 60.0}
    ranks = [rank(**usual) for _ in range(6)]
    ranks[3] = rank(**usual | {FORWARD: 150.0, COMMUNICATION: 0.0})
    ranks[4] = rank(**usual | {BACKWARD: 210.0})
    assert straggler_text(ranks, HOSTS, 10) == (
        "slowest ranks, mean of 10 steps: forward rank 3 on node1 150.0 ms (1.50x the median), "
        "backward rank 4 on node2 210.0 ms (1.05x the median)"
    )


def test_of_two_ranks_the_slower_one_is_compared_with_the_faster() -> None:
    ranks = [rank(**{FORWARD: 100.0}), rank(**{FORWARD: 300.0})]
    assert straggler_text(ranks, HOSTS, 1) == (
        "slowest ranks, of 1 step: forward rank 1 on node0 300.0 ms (3.00x the median)"
    )


def test_a_stage_with_more_work_is_not_a_straggler() -> None:
    ranks = [rank(stage, **{FORWARD: 100.0, LOSS: 80.0 * stage}) for stage in (0, 0, 0, 1, 1, 1)]
    none_slower = "no rank is slower than its peers by 1 % of a step, mean of 2 steps"
    assert straggler_text(ranks, HOSTS, 2) == none_slower
    ranks[4] = rank(1, **{FORWARD: 100.0, LOSS: 81.7})  # 0.9 % of a step
    assert straggler_text(ranks, HOSTS, 2) == none_slower
    ranks[4] = rank(1, **{FORWARD: 100.0, LOSS: 81.9})
    assert straggler_text(ranks, HOSTS, 2) == (
        "slowest ranks, mean of 2 steps: loss rank 4 on node2 81.9 ms (1.02x the median)"
    )


def test_a_phase_that_only_one_rank_has_is_named_without_a_ratio() -> None:
    ranks = [rank(**{FORWARD: 100.0}) for _ in range(3)]
    ranks[1] = rank(**{FORWARD: 100.0, TEACHER: 40.0})
    assert straggler_text(ranks, HOSTS, 2) == (
        "slowest ranks, mean of 2 steps: teacher rank 1 on node0 40.0 ms"
    )


def test_the_line_of_all_ranks_leaves_out_phases_without_time() -> None:
    ranks = [rank(**{FORWARD: 100.0 + number, LOSS: 5.25 * number}) for number in range(3)]
    assert timers_text(ranks, 5) == (
        "(min, max) ms over 3 ranks, mean of 5 steps: forward (100.0, 102.0), loss (0.0, 10.5)"
    )
    assert timers_text(ranks[:1], 1) == "ms, of 1 step: forward 100.0"


@pytest.mark.parametrize(("ranks", "due"), [(2, [100, 200]), (1, [])])
def test_a_run_of_several_ranks_names_slow_ones_by_itself(
    ranks: int, due: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gathered(_: PhaseReports, own: Mapping[str, float]) -> list[RankPhases]:
        return [RankPhases(0, own), rank(**{FORWARD: 300.0})]

    def gather_object(found: list[str], own: str) -> None:
        found[:] = [own] * len(found)

    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_gather_object", gather_object)
    monkeypatch.setattr(PhaseReports, "_gather", gathered)
    interval = LoggingConfig().straggler_interval
    reports = PhaseReports(
        timers_interval=0, straggler_interval=interval, stage=0, device=torch.device("cpu")
    )
    phases = rank(**{FORWARD: 100.0}).milliseconds
    found = {step: reports.after_step(step, phases) for step in range(1, 251)}
    assert [step for step, entries in found.items() if entries] == due
    place = f"forward rank 1 on {socket.gethostname()}"
    text = f"mean of 100 steps: {place} 300.0 ms (3.00x the median)"
    assert all(found[step] == {"slowest_ranks": text} for step in due)


# Two ranks of the student, then those of two teachers.
ROLES = Roles(5, (("small", 1), ("large", 2)))
INTERVAL = 2


class Teachers:
    """The notes of three ranks of teachers, and the student's reports of them."""

    def __init__(self, *, stages: tuple[int, int] = (0, 0)) -> None:
        store = dist.HashStore()
        intervals = {"timers_interval": INTERVAL, "straggler_interval": INTERVAL}

        def bridge(rank: int) -> Bridge:
            group = cast(dist.ProcessGroup, None)  # nothing is sent
            return Bridge(rank, ROLES, store, group, lambda _: nullcontext(), 1.0)

        self.reports = TeacherReports(bridge(0), **intervals)
        self.notes = {
            rank: PhaseNotes(bridge(rank), stage=stage, **intervals)
            for rank, stage in zip((2, 3, 4), (0, *stages), strict=True)
        }

    def note(self, rank: int, step: int, **milliseconds: float) -> dict[str, float]:
        """Note a step; returns its phases."""
        phases = {**dict.fromkeys(TEACHER_PHASES, 0.0), **milliseconds}
        self.notes[rank].after_step(step, phases, {"sending": 4.0})
        return phases

    def step(self, step: int, *ranks: int) -> dict[str, Any]:
        """A step on these ranks, the last of which is slow; returns the entries of its record."""
        for rank in ranks:
            usual = {FORWARD: 100.0 + step, WAITING: 50.0}
            self.note(rank, step, **usual | ({FORWARD: 160.0, WAITING: 0.0} if rank == 4 else {}))
        return self.reports.after_step(step)


def test_every_record_has_the_newest_phases_of_each_teachers_last_rank() -> None:
    teachers = Teachers()
    assert teachers.reports.after_step(1) == {}  # none has done a step
    found = teachers.step(2, 3, 4)["teacher_timers"]
    assert list(found) == ["large"]
    assert (found["large"][FORWARD], found["large"]["sender"]) == (160.0, {"sending": 4.0})
    found = teachers.step(3, 2, 3)["teacher_timers"]
    assert {name: phases["step"] for name, phases in found.items()} == {"small": 3, "large": 2}


def test_the_log_has_the_phases_of_all_ranks_and_the_slowest_of_each_teacher(
    caplog: pytest.LogCaptureFixture,
) -> None:
    teachers = Teachers()
    with caplog.at_level("INFO"):
        assert set(teachers.step(1, 2, 3, 4)) == {"teacher_timers"}
        found = teachers.step(2, 2, 3, 4)
    least, most = found["teacher_timers_min"], found["teacher_timers_max"]
    assert (least["large"][FORWARD], most["large"][FORWARD]) == (101.5, 160.0)
    assert least["small"] == most["small"]
    host = socket.gethostname()
    slowest = f"mean of 2 steps: forward large.1 on {host} 160.0 ms (1.58x the median)"
    assert found["slowest_teacher_ranks"] == {"large": slowest}  # one rank has no peer
    assert [record.getMessage() for record in caplog.records] == [
        "step 2, small: ms, mean of 2 steps: waiting 50.0, forward 101.5",
        "step 2, large: (min, max) ms over 2 ranks, mean of 2 steps: waiting (0.0, 50.0), "
        "forward (101.5, 160.0)",
        f"step 2, large: slowest ranks, {slowest}",
    ]


def test_means_that_are_late_are_in_the_record_in_which_they_are_there() -> None:
    teachers = Teachers()
    teachers.step(1, 2, 3, 4)
    assert set(teachers.step(2, 2, 3)["teacher_timers_min"]) == {"small"}
    assert set(teachers.step(3, 2, 3)) == {"teacher_timers"}
    teachers.note(4, 2)
    found = teachers.step(4, 2)  # the next one is due, too
    assert set(found["teacher_timers_min"]) == {"small", "large"}
    assert set(found["slowest_teacher_ranks"]) == {"large"}
    assert set(teachers.reports.after_step(5)) == {"teacher_timers"}  # and is not there
    teachers.note(3, 4)
    teachers.note(4, 3)
    teachers.note(4, 4)
    assert set(teachers.reports.after_step(6)["teacher_timers_min"]) == {"large"}


def test_means_of_all_ranks_are_of_the_same_steps() -> None:
    teachers = Teachers()
    for step in (1, 2, 3, 4):
        teachers.note(3, step, **{FORWARD: 100.0})
    for step in (1, 2):
        teachers.note(4, step, **{FORWARD: 300.0})
    for step in (1, 2):
        assert set(teachers.reports.after_step(step)) == {"teacher_timers"}
    for step in (3, 4):
        teachers.note(4, step, **{FORWARD: 100.0})
    found = teachers.reports.after_step(3)
    assert found["teacher_timers_min"] == found["teacher_timers_max"]
    assert set(found["slowest_teacher_ranks"]) == {"large"}


def test_stages_of_a_teacher_are_not_compared() -> None:
    teachers = Teachers(stages=(0, 1))
    teachers.step(1, 2, 3, 4)
    found = teachers.step(2, 2, 3, 4)
    assert set(found) == {"teacher_timers", "teacher_timers_min", "teacher_timers_max"}
