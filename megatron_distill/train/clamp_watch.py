"""Whether the ratios of a balance ever move, or sit at their clamp step after step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

__all__ = ["CLAMPED_STEPS", "ClampWatch"]

# In a row, after which a warning comes.
CLAMPED_STEPS: Final = 20
# Means over micro-batches are summed in fp32.
_ROUNDING: Final = 1e-5
# What a scale is of, what it is held against, and whose weights move it.
_SCALES: Final = {
    "kd_scale": ("distillation", "the cross-entropy", "objective.terms"),
    "feature_scale": ("feature losses", "the divergences", "objective.features"),
}


class ClampWatch:
    """Counts applied steps whose scales are at the clamp, from the logged figures of a balance.

    These are the same floats on every rank, and on the host already. A scale at either end counts;
    one step of it elsewhere begins the count anew. Each start of a run counts for itself.
    """

    def __init__(self, clamp: float | None) -> None:
        self._clamp = clamp
        self._counts = dict.fromkeys(_SCALES, 0)

    def observe(self, balance: Mapping[str, float]) -> list[str]:
        """Take an applied step's figures; return a warning for each scale, once."""
        if self._clamp is None:
            return []
        return list(self._warnings(balance, self._clamp))

    def _warnings(self, balance: Mapping[str, float], clamp: float) -> Iterator[str]:
        for name in [known for known in _SCALES if known in balance]:
            scale, count = balance[name], self._counts[name]
            held = any(math.isclose(scale, end, rel_tol=_ROUNDING) for end in (clamp, 1 / clamp))
            if count < CLAMPED_STEPS:
                self._counts[name] = count + 1 if held else 0
                if self._counts[name] == CLAMPED_STEPS:
                    yield _warning(name, scale, clamp)


def _warning(name: str, scale: float, clamp: float) -> str:
    losses, others, key = _SCALES[name]
    size, change = ("small", "raise") if scale >= 1 else ("large", "lower")
    return (
        f"objective.balance.clamp = {clamp:g}: {name} was {scale:.6g} in each of the last "
        f"{CLAMPED_STEPS} steps, so that nothing is balanced: {losses} stayed too {size} against "
        f"{others} for this clamp; raise objective.balance.clamp, or {change} the weights of {key}"
    )
