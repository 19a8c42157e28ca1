"""The memory that a step needs, free of what its threads hold by chance."""

from __future__ import annotations

from collections.abc import Callable

PASSES = 3


def least_peak(step: Callable[[], object], passes: int = PASSES) -> int:
    """Return the peak bytes of tensors above those alive before; the lowest of some passes.

    A thread of gloo holds the tensors of a finished collective until it runs again, which on a busy
    machine may be after the next ones exist.
    """
    from benchmarks.harness.peak import LiveStorages

    peaks = []
    for _ in range(passes):
        with LiveStorages() as live:
            step()
        peaks.append(live.peak)
    return min(peaks)
