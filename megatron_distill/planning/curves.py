"""Shares of a highest rate by the size of the work, as points between which they are linear."""

from __future__ import annotations

from itertools import pairwise
from math import log
from typing import Annotated

from pydantic import AfterValidator, Field

__all__ = ["Curve", "share"]


def _checked(curve: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    """Return a curve of shares. Raises ValueError: sizes do not ascend, or a share is none.

    A share is of the highest rate that is known, so that `calibrate` writes none above 1.
    """
    for (before, _), (after, _) in pairwise(curve):
        if after <= before:
            raise ValueError(
                f"the sizes, first of each pair, must ascend, but {after:g} follows {before:g}"
            )
    for size, reached in curve:
        if size <= 0 or not 0 < reached <= 1:
            raise ValueError(
                f"[{size:g}, {reached:g}] must be a size above 0 and a share from above 0 to 1, "
                "0.65 for 65 %"
            )
    return curve


Curve = Annotated[tuple[tuple[float, float], ...], Field(min_length=1), AfterValidator(_checked)]


def share(curve: Curve, size: float) -> float:
    """Return the value of a curve, linear in the logarithm of `size` between its points."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (left, low), (right, high) in pairwise(curve):
        if size <= right:
            return low + (high - low) * log(size / left) / log(right / left)
    return curve[-1][1]
