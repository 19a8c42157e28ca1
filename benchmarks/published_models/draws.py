"""The random draws of llama2.c's `run`: its generator, and its choice among likely tokens."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Coins", "Drawn", "draw"]

_BITS: Final = (1 << 64) - 1
_MULTIPLIER: Final = 0x2545F4914F6CDD1D


class Coins:
    """Numbers from 0 to 1, the latter left out: xorshift* of a seed."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def next(self) -> float:
        """Return the next number, of 24 bits."""
        state = self._state
        state ^= state >> 12
        state ^= (state << 25) & _BITS
        state ^= state >> 27
        self._state = state
        return (((state * _MULTIPLIER) & _BITS) >> 40) / 2**24


class Drawn(NamedTuple):
    """A token, and how near the draw was to that of another one, as a probability."""

    token: int
    margin: float


def draw(probabilities: NDArray[np.float32], *, top_p: float, coin: float) -> Drawn:
    """Return the token that `run` draws from the likeliest ones, which have a mass of `top_p`.

    Sums are of float32, in its order.
    """
    least = (1 - top_p) / (len(probabilities) - 1)
    likely = np.flatnonzero(probabilities >= np.float32(least))
    likely = likely[np.argsort(-probabilities[likely], kind="stable")]
    sums = np.cumsum(probabilities[likely], dtype=np.float32)
    last = min(int(np.searchsorted(sums, np.float32(top_p), side="right")), len(sums) - 1)
    drawn = np.float32(coin) * sums[last]
    place = min(int(np.searchsorted(sums, drawn, side="right")), last)
    below = float(drawn - sums[place - 1]) if place else 1.0
    above = float(sums[place] - drawn) if place < last else 1.0
    return Drawn(int(likely[place]), min(below, above))
