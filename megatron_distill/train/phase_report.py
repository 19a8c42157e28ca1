"""Phases of all ranks in the log: smallest and largest times, and the slowest ranks."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from megatron_distill.log import get_logger
from megatron_distill.runtime.segments import copied
from megatron_distill.train.phase_timers import COMMUNICATION, PHASES

__all__ = ["PhaseReports", "RankPhases", "straggler_text", "timers_text"]

_LOGGER = get_logger(__name__)

# Less of a step than this is not worth a line.
_LEAST_SHARE: Final = 0.01


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
        self, *, timers_interval: int, straggler_interval: int, stage: int, device: torch.device
    ) -> None:
        self._timers = _Means(timers_interval)
        self._stragglers = _Means(straggler_interval if dist.get_world_size() > 1 else 0)
        self._stage = stage
        self._device = device
        self._hosts: list[str] = []

    def after_step(self, step: int, milliseconds: Mapping[str, float]) -> dict[str, object]:
        """Add a step's phases; return entries of its record.

        `timers_min` and `timers_max`, and `slowest_ranks`, are there where their lines are due.

        Collective: the world, one all-gather of 72 bytes per rank and due report; at the first
        report of stragglers, one of the host's name too.
        """
        entries: dict[str, object] = {}
        if (mean := self._timers.after_step(milliseconds)) is not None:
            ranks = self._gather(mean)
            entries = {
                f"timers_{name}": {
                    phase: of(rank.milliseconds[phase] for rank in ranks) for phase in PHASES
                }
                for name, of in (("min", min), ("max", max))
            }
            if dist.get_rank() == 0:
                _LOGGER.info("step %d: %s", step, timers_text(ranks, self._timers.interval))
        if (mean := self._stragglers.after_step(milliseconds)) is not None:
            ranks = self._gather(mean)
            if len({rank.stage for rank in ranks}) == len(ranks):
                self._stragglers = _Means(0)
                return entries
            if not self._hosts:
                self._hosts = [""] * len(ranks)
                dist.all_gather_object(self._hosts, socket.gethostname())
            if dist.get_rank() == 0:
                text = straggler_text(ranks, self._hosts, self._stragglers.interval)
                _LOGGER.info("step %d: %s", step, text)
                entries["slowest_ranks"] = text.removeprefix("slowest ranks, ")
        return entries

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
        self._sums = dict.fromkeys(PHASES, 0.0)

    def after_step(self, milliseconds: Mapping[str, float]) -> dict[str, float] | None:
        """Add a step; return the means at the end of an interval, and start a new one."""
        if self.interval == 0:
            return None
        self._steps += 1
        for phase, value in milliseconds.items():
            self._sums[phase] += value
        if self._steps < self.interval:
            return None
        means = {phase: total / self._steps for phase, total in self._sums.items()}
        self._steps, self._sums = 0, dict.fromkeys(PHASES, 0.0)
        return means


def timers_text(ranks: Sequence[RankPhases], steps: int) -> str:
    """Return the smallest and the largest time of each phase over the ranks."""
    parts = []
    for phase in PHASES:
        found = [rank.milliseconds[phase] for rank in ranks]
        if max(found) > 0.0:
            one = (
                f"{max(found):.1f}" if len(ranks) == 1 else f"({min(found):.1f}, {max(found):.1f})"
            )
            parts.append(f"{phase} {one}")
    over = "ms" if len(ranks) == 1 else f"(min, max) ms over {len(ranks)} ranks"
    return f"{over}, {_mean_of(steps)}: {', '.join(parts)}"


def straggler_text(ranks: Sequence[RankPhases], hosts: Sequence[str], steps: int) -> str:
    """Return the slowest rank of each phase, where it exceeds its peers by 1 % of a step.

    Communication has none: in it the fast ranks wait for the slow ones.
    """
    least = _LEAST_SHARE * max(rank.step for rank in ranks)
    parts = []
    for phase in PHASES:
        medians = _medians_of_stages(ranks, phase)
        excesses = [rank.milliseconds[phase] - medians[rank.stage] for rank in ranks]
        slowest = max(range(len(ranks)), key=excesses.__getitem__)
        if phase == COMMUNICATION or excesses[slowest] < least:
            continue
        time, median = ranks[slowest].milliseconds[phase], medians[ranks[slowest].stage]
        ratio = f" ({time / median:.2f}x the median)" if median > 0.0 else ""
        parts.append(f"{phase} rank {slowest} on {hosts[slowest]} {time:.1f} ms{ratio}")
    if not parts:
        return f"no rank is slower than its peers by 1 % of a step, {_mean_of(steps)}"
    return f"slowest ranks, {_mean_of(steps)}: {', '.join(parts)}"


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
