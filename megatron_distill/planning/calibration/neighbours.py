"""The work of other processes during a measurement, by the seconds of this machine's cores."""

from __future__ import annotations

import os
from typing import Final

import psutil

from megatron_distill.errors import counted
from megatron_distill.launching.forked_ranks import ForkedRanks
from megatron_distill.log import get_logger

__all__ = ["busy_seconds", "measured_beside", "own_seconds"]

_LOGGER = get_logger(__name__)
# Share of the cores that others may use: the rates of two threads suffer first.
_UNSEEN: Final = 0.1


def measured_beside(others: float, *, cores: int) -> str:
    """Return the source of a measurement, and warn if other processes used many of the cores."""
    source = "measured by megatron-distill calibrate"
    if others <= _UNSEEN * cores:
        return source
    _LOGGER.warning(
        "other processes used %.1f of %s meanwhile, so that the rates are too low; calibrate again "
        "when they have ended",
        others,
        counted(cores, "core"),
    )
    return f"{source}, while other processes used {others:.1f} of {counted(cores, 'core')}"


def busy_seconds() -> float:
    """Return the seconds that this process's cores have worked, for any process."""
    times = psutil.cpu_times(percpu=True)
    mine = [times[core]._asdict() for core in os.sched_getaffinity(0) if core < len(times)]
    idle = ("idle", "iowait", "guest", "guest_nice")  # user has a guest's
    return sum(value for one in mine for name, value in one.items() if name not in idle)


def own_seconds(forked: ForkedRanks | None = None) -> float:
    """Return the seconds that this process, its ended children and forked ranks have worked."""
    return sum(os.times()[:4]) + (0.0 if forked is None else forked.cpu_seconds)
