"""The memory that a step needs, free of what its threads hold by chance."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable

PASSES = 3
_PAUSE = 0.1  # seconds: threads of gloo have released the tensors of finished collectives


def settle() -> None:
    """Wait until only what is needed is alive."""
    gc.collect()
    time.sleep(_PAUSE)


def least_peak(step: Callable[[], object], passes: int = PASSES) -> int:
    """Return the peak bytes of tensors above those alive before; the lowest of some passes.

    All but the first pause near the peak, so that threads release what they no longer need.
    """
    from benchmarks.harness.peak import LiveStorages

    peaks: list[int] = []
    for _ in range(passes):
        with LiveStorages(settled_above=0.8 * min(peaks, default=math.inf)) as live:
            step()
        peaks.append(live.peak)
    return min(peaks)
