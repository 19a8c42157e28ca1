"""Measuring on a shared machine: wait for a quiet moment, and detect a disturbed run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

_LOOK_SECONDS = 3.0
_ATTEMPTS = 5


def busy_seconds() -> float:
    """Return the processor seconds of all processes of this machine since it started."""
    times = psutil.cpu_times()._asdict()
    return sum(times[name] for name in times if name not in ("idle", "iowait", "guest"))


def wait_until_quiet(cores: float) -> None:
    """Return once fewer than `cores` processors are in use, sampled for some seconds."""
    while True:
        before = busy_seconds()
        time.sleep(_LOOK_SECONDS)
        if (busy_seconds() - before) / _LOOK_SECONDS < cores:
            return


def run_in_quiet(child: Callable[[], Any], cores: float | None) -> Any:
    """Run a measurement while others use fewer than `cores` processors; return its last result.

    A disturbed one is repeated, `_ATTEMPTS` times at most. cores: None: run it once, at once.
    """
    if cores is None:
        return child()
    for _ in range(_ATTEMPTS):
        wait_until_quiet(cores)
        result = child()
        if not is_disturbed(result, cores):
            break
    return result


def touch_bytes(count: int, *, large_pages: bool) -> None:
    """Write to `count` bytes and free them, for a later allocation with pages of that size.

    Memory that is free for a second or two may go back to the host (free page reporting). A page
    from the host costs up to eighty times one that never left. Freed pages stay with the processor
    that freed them and with their page size, up to 1 GB here, and these do not go back. Small pages
    are therefore touched as torch takes them, by its threads. Large ones, which numpy requests, are
    touched on every processor in turn.
    """
    if not large_pages:
        torch.empty(count, dtype=torch.uint8).fill_(1)
        return

    def touch(processor: int) -> None:
        os.sched_setaffinity(0, {processor})
        np.empty(count, np.uint8).fill(1)

    # In separate threads: each rank's measurement may start on a different processor.
    for processor in os.sched_getaffinity(0):
        thread = threading.Thread(target=touch, args=(processor,))
        thread.start()
        thread.join()


def own_cpu_seconds(result: Mapping[str, Any]) -> list[float]:
    """Return the processor seconds of each timed step, over all ranks."""
    per_rank = (rank["cpu_seconds"] for rank in result["ranks"])
    return [sum(step) for step in zip(*per_rank, strict=True)]


def others(result: Mapping[str, Any]) -> list[float]:
    """Return the number of processors that other processes used during each timed step."""
    steps = zip(result["machine_seconds"], own_cpu_seconds(result), result["seconds"], strict=True)
    return [max(0.0, machine - own) / seconds for machine, own, seconds in steps]


def is_disturbed(result: Mapping[str, Any], cores: float) -> bool:
    """Whether other processes used more than `cores` processors in at least half of the steps."""
    return median(others(result)) > cores
