"""Ids drawn from a teacher with replacement, the same on every run.

The uniform numbers of a position are a function of (seed, sample id, position) alone: Philox in
counter mode, whose raw output is fixed by its definition. Cumulated probabilities are integers, so
that no order of summation changes them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

__all__ = ["draw_ids", "uniforms"]

_WORDS_PER_BLOCK: Final = 4
_UNIFORM_BITS: Final = 53
_MASS_BITS: Final = 48
_BLOCK_NUMBERS: Final = 1 << 24
_CACHED_NUMBERS: Final = 1 << 17
_SLACK: Final = 1e-3


def uniforms(*, seed: int, sample_id: int, first: int, positions: int, draws: int) -> Tensor:
    """Numbers in [0, 1): fp64 ``[positions, draws]`` for positions from `first` of a sample."""
    assert draws >= 1
    blocks = -(-draws // _WORDS_PER_BLOCK)
    generator = np.random.Philox(key=seed, counter=[first * blocks, 0, 0, sample_id])
    words = generator.random_raw(positions * blocks * _WORDS_PER_BLOCK)
    found = (words >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64) * 2.0**-_UNIFORM_BITS
    return torch.from_numpy(found.reshape(positions, -1)[:, :draws].copy())


def draw_ids(
    log_probs: Tensor, draws: int, *, seed: int, sample_id: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Draw ids of N consecutive positions from `first`, each from its own distribution.

    Shapes: log-probs ``[N, V]`` over the whole vocabulary -> ids ``[N, M]`` int32, ascending, each
    once, and counts ``[N, M]`` int32, which sum up to M; both 0 after the last id. The counts' mean
    is M times the distribution (an id of a probability below 2^-48 is not drawn).

    Raises:
        ValueError: a row is not a distribution.
    """
    count, vocab_size = log_probs.shape
    ids = torch.zeros(count, draws, dtype=torch.int32)
    counts = torch.zeros(count, draws, dtype=torch.int32)
    on_host = log_probs.device.type == "cpu"
    rows = max(1, (_CACHED_NUMBERS if on_host else _BLOCK_NUMBERS) // vocab_size)
    for start in range(0, count, rows):
        block = log_probs[start : start + rows]
        mass = block.float().exp()
        if not ((mass.sum(1, dtype=torch.float64) - 1).abs() < _SLACK).all():
            raise ValueError("log_probs hold a row whose probabilities do not sum up to one")
        # A power of two is exact in fp32, and so is the integer that it makes of a number.
        edges = mass.mul_(2.0**_MASS_BITS).long().cumsum(1)
        fractions = uniforms(
            seed=seed, sample_id=sample_id, first=first + start, positions=len(block), draws=draws
        ).to(block.device)
        aims = (fractions * edges[:, -1:].double()).long()
        # The first edge beyond the aim; an id without mass has the edge of the one before it.
        drawn = torch.searchsorted(edges, aims, right=True).sort(dim=1).values.cpu()
        place = slice(start, start + len(block))
        _count(drawn, ids[place], counts[place])
    return ids, counts


def _count(drawn: Tensor, ids: Tensor, counts: Tensor) -> None:
    """Write the different ids of sorted rows, and how often each stands there."""
    is_new = torch.ones_like(drawn, dtype=torch.bool)
    is_new[:, 1:] = drawn[:, 1:] != drawn[:, :-1]
    column = is_new.cumsum(1) - 1
    ids.scatter_(1, column, drawn.int())
    counts.scatter_add_(1, column, torch.ones_like(ids))
