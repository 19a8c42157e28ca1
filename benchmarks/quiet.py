"""Measuring on a machine that others use too: wait for a quiet moment, and tell a disturbed run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

_LOOK_SECONDS = 3.0


def busy_seconds() -> float:
    """Return the processor seconds of all processes of this machine since it started."""
    times = psutil.cpu_times()._asdict()
    return sum(times[name] for name in times if name not in ("idle", "iowait", "guest"))


def wait_until_quiet(cores: float) -> None:
    """Return once fewer than `cores` processors are in use, looked at for some seconds."""
    while True:
        before = busy_seconds()
        time.sleep(_LOOK_SECONDS)
        if (busy_seconds() - before) / _LOOK_SECONDS < cores:
            return


def touch_bytes(count: int, *, large_pages: bool) -> None:
    """Write to so much memory and free it, for whoever comes next and takes pages of that size.

    What is free for a second or two may go back to the host (free page reporting), and a page that
    comes from there costs up to eighty times one that never left. The kernel keeps what is freed
    for the processor that freed it and for pages of that size, up to 1 GB here, and these do not go
    back: so small pages are touched as torch takes them, by its threads, and large ones, which
    numpy asks for, on every processor in turn.
    """
    if not large_pages:
        torch.empty(count, dtype=torch.uint8).fill_(1)
        return

    def touch(processor: int) -> None:
        os.sched_setaffinity(0, {processor})
        np.empty(count, np.uint8).fill(1)

    # In threads of their own: what is measured next may not start on the same one in every rank.
    for processor in os.sched_getaffinity(0):
        thread = threading.Thread(target=touch, args=(processor,))
        thread.start()
        thread.join()


def own_cpu_seconds(result: Mapping[str, Any]) -> list[float]:
    """Return the processor seconds of each timed step, over all ranks."""
    per_rank = (rank["cpu_seconds"] for rank in result["ranks"])
    return [sum(step) for step in zip(*per_rank, strict=True)]


def others(result: Mapping[str, Any]) -> list[float]:
    """Return how many processors other processes used during each timed step."""
    steps = zip(result["machine_seconds"], own_cpu_seconds(result), result["seconds"], strict=True)
    return [max(0.0, machine - own) / seconds for machine, own, seconds in steps]


def is_disturbed(result: Mapping[str, Any], cores: float) -> bool:
    """Whether others used more than `cores` processors in half of the timed steps or more."""
    return median(others(result)) > cores
