"""Ids drawn from a teacher with replacement, the same on every run and for every split.

The uniform numbers of a position are a function of (seed, sample id, position) alone: Philox in
counter mode, whose raw output is fixed by its definition. Cumulative probabilities are integers:
the order of summation, over columns or ranks, does not change them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.topk import gather_ranks
from megatron_distill.ops.vocab import VocabShard

__all__ = ["draw_at", "draw_ids", "uniforms"]

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
    log_probs: Tensor,
    draws: int,
    *,
    seed: int,
    sample_id: int,
    first: int = 0,
    shard: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw ids of N consecutive positions from `first`, each from the position's distribution.

    Shapes: log-probs ``[N, V]`` over this rank's real columns (without a shard: the whole
    vocabulary) -> ids ``[N, M]`` int32, ascending, each once, and counts ``[N, M]`` int32, which
    sum up to M; both 0 after the last id. The counts' mean is M times the distribution (an id of a
    probability below 2^-48 is not drawn). Every rank gets the same result, for any split.

    Collective: that of `draw_at`.

    Raises:
        ValueError: a row is not a distribution; on all ranks.
    """
    fractions = uniforms(
        seed=seed, sample_id=sample_id, first=first, positions=log_probs.shape[0], draws=draws
    )
    return draw_at(log_probs, fractions, shard, group)


def draw_at(
    log_probs: Tensor,
    fractions: Tensor,
    shard: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw ids of N rows with uniform numbers ``[N, M]`` of each; otherwise as `draw_ids`.

    Collective: over ``group`` per block of rows one all-gather of 8 bytes per row, and one of 8
    bytes per draw; none where it is None.

    Raises:
        ValueError: a row is not a distribution, or the columns are not the shard's.
    """
    count, width = log_probs.shape
    shard = shard or VocabShard(width, 0, width)
    if width != shard.real_width:
        raise ValueError(f"log_probs have {width} columns; the shard has {shard.real_width}")
    ids = torch.zeros(count, fractions.shape[1], dtype=torch.int32)
    counts = torch.zeros_like(ids)
    on_host = log_probs.device.type == "cpu"
    # By the whole vocabulary's size, so that all ranks have the same blocks.
    rows = max(1, (_CACHED_NUMBERS if on_host else _BLOCK_NUMBERS) // shard.size)
    for start in range(0, count, rows):
        place = slice(start, min(start + rows, count))
        part = fractions[place].to(log_probs.device)
        drawn = _draw(log_probs[place], part, shard, group).sort(dim=1).values.cpu()
        _count(drawn, ids[place], counts[place])
    return ids, counts


def _draw(
    log_probs: Tensor, fractions: Tensor, shard: VocabShard, group: dist.ProcessGroup | None
) -> Tensor:
    """Ids ``[n, M]`` int64, one for each uniform number."""
    # Scaling by a power of two is exact in fp32, and so is the resulting integer.
    edges = log_probs.float().exp().mul_(2.0**_MASS_BITS).long().cumsum(1)
    own = edges[:, -1] if edges.shape[1] else edges.new_zeros(len(edges))
    totals = gather_ranks(own, group)
    whole = totals.sum(0)
    if not ((whole.double() * 2.0**-_MASS_BITS - 1).abs() < _SLACK).all():
        raise ValueError("log_probs contain a row whose probabilities do not sum to one")
    rank = 0 if group is None else dist.get_rank(group)
    aims = (fractions * whole.double().unsqueeze(1)).long() - totals[:rank].sum(0).unsqueeze(1)
    if edges.shape[1] == 0:
        return gather_ranks(torch.full_like(aims, -1), group).amax(0)
    # The first edge beyond the aim. An id without mass has its predecessor's edge and is never
    # chosen.
    found = torch.searchsorted(edges, aims, right=True) + shard.start
    is_own = (aims >= 0) & (aims < own.unsqueeze(1))
    return gather_ranks(torch.where(is_own, found, -1), group).amax(0)


def _count(drawn: Tensor, ids: Tensor, counts: Tensor) -> None:
    """Write the distinct ids of sorted rows, and their counts."""
    is_new = torch.ones_like(drawn, dtype=torch.bool)
    is_new[:, 1:] = drawn[:, 1:] != drawn[:, :-1]
    column = is_new.cumsum(1) - 1
    ids.scatter_(1, column, drawn.int())
    counts.scatter_add_(1, column, torch.ones_like(ids))
