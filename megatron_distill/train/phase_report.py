"""Phases of all ranks in the log: smallest and largest times, and the slowest ranks.

Ranks that train gather their phases. Those of a teacher on ranks of its own note theirs in the
rendezvous store, where the student's first rank looks: neither side waits for the other.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from megatron_distill.log import get_logger
from megatron_distill.runtime.bridge import Bridge
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.roles import Role
from megatron_distill.runtime.segments import copied
from megatron_distill.train.phase_timers import COMMUNICATION, PHASES, WAITING

__all__ = [
    "PhaseNotes",
    "PhaseReports",
    "RankPhases",
    "TeacherReports",
    "straggler_text",
    "timers_text",
]

_LOGGER = get_logger(__name__)

# Less of a step than this is not worth a line.
_LEAST_SHARE: Final = 0.01
# Fast ranks wait in these.
_WAITS: Final = (COMMUNICATION, WAITING)
_TIMERS: Final = "timers"
_STRAGGLERS: Final = "stragglers"
_SLOWEST: Final = "slowest ranks, "


@dataclass(frozen=True)
class RankPhases:
    """Mean milliseconds per step of each phase on one rank, and its pipeline stage."""

    stage: int
    milliseconds: Mapping[str, float]

    @property
    def step(self) -> float:
        """Milliseconds of a step."""
        return sum(self.milliseconds.values())


class PhaseReports:
    """Logs the phases of all ranks every few steps, as means over the steps since the last time.

    Intervals are in steps; 0: never. A rank is compared with the ranks of its pipeline stage, whose
    work is the same; where no stage has two, none is compared.
    """

    def __init__(
        self,
        *,
        timers_interval: int,
        straggler_interval: int,
        stage: int,
        device: torch.device,
        teachers: TeacherReports | None = None,
    ) -> None:
        self._timers = _Means(timers_interval)
        self._stragglers = _Means(straggler_interval if dist.get_world_size() > 1 else 0)
        self._stage = stage
        self._device = device
        self._hosts: list[str] = []
        self._teachers = teachers

    @classmethod
    def of(
        cls,
        groups: Groups,
        device: torch.device,
        bridge: Bridge | None,
        *,
        timers_interval: int,
        straggler_interval: int,
    ) -> PhaseReports:
        """Return the reports of a run; `bridge`: to teachers on ranks of their own."""
        intervals = {"timers_interval": timers_interval, "straggler_interval": straggler_interval}
        teachers = None if bridge is None else TeacherReports(bridge, **intervals)
        return cls(stage=groups.pipeline.rank(), device=device, teachers=teachers, **intervals)

    def after_step(self, step: int, milliseconds: Mapping[str, float]) -> dict[str, object]:
        """Add a step's phases; return entries of its record.

        `timers_min` and `timers_max`, and `slowest_ranks`, are there where their lines are due;
        beside them, on the first rank, those of `TeacherReports`.

        Collective: the world, one all-gather of 72 bytes per rank and due report; at the first
        report of stragglers, one of the host's name too.
        """
        entries = self._after_timers(step, milliseconds)
        entries |= self._after_stragglers(step, milliseconds)
        if self._teachers is not None and dist.get_rank() == 0:
            entries |= self._teachers.after_step(step)
        return entries

    def _after_timers(self, step: int, milliseconds: Mapping[str, float]) -> dict[str, object]:
        if (mean := self._timers.after_step(milliseconds)) is None:
            return {}
        ranks = self._gather(mean)
        if dist.get_rank() == 0:
            _LOGGER.info("step %d: %s", step, timers_text(ranks, self._timers.interval))
        least, most = _extremes(ranks)
        return {"timers_min": least, "timers_max": most}

    def _after_stragglers(self, step: int, milliseconds: Mapping[str, float]) -> dict[str, object]:
        if (mean := self._stragglers.after_step(milliseconds)) is None:
            return {}
        ranks = self._gather(mean)
        if len({rank.stage for rank in ranks}) == len(ranks):
            self._stragglers = _Means(0)
            return {}
        if not self._hosts:
            self._hosts = [""] * len(ranks)
            dist.all_gather_object(self._hosts, socket.gethostname())
        if dist.get_rank() != 0:
            return {}
        text = straggler_text(ranks, self._hosts, self._stragglers.interval)
        _LOGGER.info("step %d: %s", step, text)
        return {"slowest_ranks": text.removeprefix(_SLOWEST)}

    def _gather(self, milliseconds: Mapping[str, float]) -> list[RankPhases]:
        mine = [float(self._stage), *(milliseconds[phase] for phase in PHASES)]
        own = copied(torch.tensor(mine, dtype=torch.float64), self._device)
        every = own.new_empty(dist.get_world_size() * len(mine))
        dist.all_gather_into_tensor(every, own)
        return [
            RankPhases(int(stage), dict(zip(PHASES, values, strict=True)))
            for stage, *values in every.view(-1, len(mine)).tolist()
        ]


class _Means:
    """Means of the phases over an interval of steps."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._steps = 0
        self._sums: dict[str, float] = {}

    def after_step(self, milliseconds: Mapping[str, float]) -> dict[str, float] | None:
        """Add a step; return the means at the end of an interval, and start a new one."""
        if self.interval == 0:
            return None
        self._steps += 1
        for phase, value in milliseconds.items():
            self._sums[phase] = self._sums.get(phase, 0.0) + value
        if self._steps < self.interval:
            return None
        means = {phase: total / self._steps for phase, total in self._sums.items()}
        self._steps, self._sums = 0, {}
        return means


class PhaseNotes:
    """Notes the phases of a rank of a teacher, for `TeacherReports`.

    Of the last rank, whose stage has answers to send, those of every step; of each rank the means
    over both intervals, in steps.
    """

    def __init__(
        self, bridge: Bridge, *, timers_interval: int, straggler_interval: int, stage: int
    ) -> None:
        self._bridge = bridge
        self._means = {_TIMERS: _Means(timers_interval), _STRAGGLERS: _Means(straggler_interval)}
        self._stage = stage

    def after_step(
        self, step: int, milliseconds: Mapping[str, float], sender: Mapping[str, float]
    ) -> None:
        """Add a step's phases; `sender`: milliseconds of the thread that sends answers."""
        bridge = self._bridge
        if bridge.rank == bridge.role.ranks[-1]:
            newest = {"step": step, **milliseconds, "sender": dict(sender)}
            bridge.note(_newest(bridge.role), newest)
        for kind, means in self._means.items():
            if (mean := means.after_step(milliseconds)) is not None:
                place = {"step": step, "stage": self._stage, "host": socket.gethostname()}
                bridge.note(_of_rank(kind, bridge.rank), {**place, "milliseconds": mean})


class TeacherReports:
    """Logs the phases of teachers on ranks of their own; on the student's first rank.

    Intervals are those of `PhaseReports`, and so are the lines. Means of all ranks are of one
    interval: where a rank's have not arrived, they are looked for again after the next step.
    """

    def __init__(self, bridge: Bridge, *, timers_interval: int, straggler_interval: int) -> None:
        self._bridge = bridge
        self._intervals = {_TIMERS: timers_interval, _STRAGGLERS: straggler_interval}
        self._steps = 0
        self._due: dict[tuple[str, Role], int] = {}
        self._told: dict[tuple[str, Role], int] = {}

    def after_step(self, step: int) -> dict[str, object]:
        """Return entries of a step's record, each by teacher.

        `teacher_timers`: phases of the newest step that its last rank has done. Where their lines
        are due: `teacher_timers_min`, `teacher_timers_max` and `slowest_teacher_ranks`.
        """
        self._steps += 1
        found: dict[str, dict[str, object]] = {}
        for role in self._bridge.roles.teachers:
            newest = self._bridge.noted([_newest(role)])
            if newest is not None:
                found.setdefault("teacher_timers", {})[role.name] = newest[0]
            for kind, interval in self._intervals.items():
                if interval and self._steps % interval == 0:
                    self._due[kind, role] = step
        for (kind, role), due in self._due.items():
            told = self._told.get((kind, role), 0)
            if told >= due:
                continue
            notes = self._bridge.noted([_of_rank(kind, rank) for rank in role.ranks])
            if notes is not None and (done := _common_step(notes)) > told:
                self._told[kind, role] = done
                for key, entry in self._report(kind, role, done, notes).items():
                    found.setdefault(key, {})[role.name] = entry
        return dict(found)

    def _report(
        self, kind: str, role: Role, step: int, notes: Sequence[Mapping[str, Any]]
    ) -> dict[str, object]:
        ranks = [RankPhases(note["stage"], note["milliseconds"]) for note in notes]
        if kind == _TIMERS:
            text = timers_text(ranks, self._intervals[kind])
            _LOGGER.info("step %d, %s: %s", step, role.name, text)
            least, most = _extremes(ranks)
            return {"teacher_timers_min": least, "teacher_timers_max": most}
        if len({rank.stage for rank in ranks}) == len(ranks):
            return {}
        names = [self._bridge.roles.name(rank) for rank in role.ranks]
        hosts = [note["host"] for note in notes]
        text = straggler_text(ranks, hosts, self._intervals[kind], names=names)
        _LOGGER.info("step %d, %s: %s", step, role.name, text)
        return {"slowest_teacher_ranks": text.removeprefix(_SLOWEST)}


def _common_step(notes: Sequence[Mapping[str, Any]]) -> int:
    """Return the step that the notes of all ranks are of; 0: they are of several."""
    steps = {note["step"] for note in notes}
    return steps.pop() if len(steps) == 1 else 0


def _newest(role: Role) -> str:
    return f"phases/newest/{role.name}"


def _of_rank(kind: str, rank: int) -> str:
    return f"phases/{kind}/{rank}"


def _extremes(ranks: Sequence[RankPhases]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the smallest and the largest milliseconds of each phase."""
    phases = ranks[0].milliseconds
    least, most = (
        {phase: of(rank.milliseconds[phase] for rank in ranks) for phase in phases}
        for of in (min, max)
    )
    return least, most


def timers_text(ranks: Sequence[RankPhases], steps: int) -> str:
    """Return the smallest and the largest time of each phase over the ranks."""
    parts = []
    for phase in ranks[0].milliseconds:
        found = [rank.milliseconds[phase] for rank in ranks]
        if max(found) > 0.0:
            one = (
                f"{max(found):.1f}" if len(ranks) == 1 else f"({min(found):.1f}, {max(found):.1f})"
            )
            parts.append(f"{phase} {one}")
    over = "ms" if len(ranks) == 1 else f"(min, max) ms over {len(ranks)} ranks"
    return f"{over}, {_mean_of(steps)}: {', '.join(parts)}"


def straggler_text(
    ranks: Sequence[RankPhases],
    hosts: Sequence[str],
    steps: int,
    *,
    names: Sequence[str] | None = None,
) -> str:
    """Return the slowest rank of each phase, where it exceeds its peers by 1 % of a step.

    Communication has none, nor has waiting: in these the fast ranks wait for the slow ones.
    `names`: of the ranks; None: by number.
    """
    names = [f"rank {number}" for number in range(len(ranks))] if names is None else names
    least = _LEAST_SHARE * max(rank.step for rank in ranks)
    parts = []
    for phase in ranks[0].milliseconds:
        medians = _medians_of_stages(ranks, phase)
        excesses = [rank.milliseconds[phase] - medians[rank.stage] for rank in ranks]
        slowest = max(range(len(ranks)), key=excesses.__getitem__)
        if phase in _WAITS or excesses[slowest] < least:
            continue
        time, median = ranks[slowest].milliseconds[phase], medians[ranks[slowest].stage]
        ratio = f" ({time / median:.2f}x the median)" if median > 0.0 else ""
        parts.append(f"{phase} {names[slowest]} on {hosts[slowest]} {time:.1f} ms{ratio}")
    if not parts:
        return f"no rank is slower than its peers by 1 % of a step, {_mean_of(steps)}"
    return f"{_SLOWEST}{_mean_of(steps)}: {', '.join(parts)}"


def _medians_of_stages(ranks: Sequence[RankPhases], phase: str) -> dict[int, float]:
    """Return the median time of a phase over the ranks of each pipeline stage.

    Of two ranks it is the faster one's.
    """
    times: dict[int, list[float]] = {}
    for rank in ranks:
        times.setdefault(rank.stage, []).append(rank.milliseconds[phase])
    return {stage: statistics.median_low(found) for stage, found in times.items()}


def _mean_of(steps: int) -> str:
    return "of 1 step" if steps == 1 else f"mean of {steps} steps"
