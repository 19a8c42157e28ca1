"""Attention of context ranks whose keys and values travel around a ring; measured, not used.

In step t of a pass a rank has the keys of rank r - t. It attends to them while the next ones
arrive. Partial results are merged by log-sum-exp, in fp32 or float64. In the backward pass the
gradients of a rank's keys travel with them, one step behind, and come home with the last message
(Ring Attention, arXiv 2310.01889). Causal work is balanced by the pieces of `pieces_of`. Keys that
no local query sees are skipped by the products, but travel.

Shapes: s local positions, b samples, n heads, g key-value heads, r = n / g, d head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_distill.models.attention_kernels.rule import AttentionRule
from megatron_distill.models.attention_kernels.tiles import (
    AttentionTile,
    AttentionTiling,
    KeyTile,
    TileShape,
    _batches,
    _flash,
    _flash_backward,
    _keys_of,
    _Views,
)
from megatron_distill.runtime.segments import Piece, Segments, pieces_of


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    rule: AttentionRule,
    group: dist.ProcessGroup,
) -> Tensor:
    """Attend on CPUs, without window, soft cap or dropout.

    query [s, b, n, d]; key and value [s, b, g, d], of this rank. Returns [s, b, n, d].

    Collective: `group`, size - 1 messages of 2 * g * d values per local token in forward; as many
    in backward, and `size` messages of their gradients in fp32 or float64.
    """
    assert rule.window is None
    assert rule.softcap is None
    assert not rule.dropout
    steps = segments.derived("ring", lambda: ring_tilings(segments))
    found: Tensor = _RingAttention.apply(query, key, value, steps, rule.scale, group)
    return found


def ring_tilings(segments: Segments) -> list[AttentionTiling]:
    """Return the tiles of each step, those of the rank's own keys first.

    A tile's first key is an index into the keys of the step's rank.
    """
    sources = [(segments.rank - step) % segments.size for step in range(segments.size)]
    return [_tiling(segments, source) for source in sources]


def _tiling(segments: Segments, source: int) -> AttentionTiling:
    """Return the tiles of one rank's keys, in an order in which results can be merged.

    Causal tiles come first: they set the results. Tiles of one batch share no query, since each
    piece has its own.
    """
    found: list[tuple[TileShape, list[AttentionTile]]] = []
    for piece in pieces_of(segments.keys, rank=source, size=segments.size):
        found += _of_piece(segments, piece).items()
    return sorted(found, key=lambda tiles: tiles[0].parts[0].kind)


def _of_piece(segments: Segments, piece: Piece) -> dict[TileShape, list[AttentionTile]]:
    by_place: dict[tuple[TileShape, int, int], list[int]] = defaultdict(list)
    for segment in segments.segments:
        first = max(segment.first_key, piece.start)
        stop = min(segment.first_key + segment.keys, piece.stop)
        if first < stop:
            own = segment.first_key + segment.earlier  # the position of the first query
            part = KeyTile(0, stop - first, "causal" if first == own else "full")
            place = (segment.first_query, piece.first_query + first - piece.start)
            by_place[TileShape(segment.queries, (part,)), *place].append(segment.sample)
    by_shape: dict[TileShape, list[AttentionTile]] = defaultdict(list)
    for (shape, first_query, first_key), samples in by_place.items():
        owners = [None] if len(samples) == len(segments.bounds) else samples
        by_shape[shape] += [AttentionTile(owner, first_query, first_key) for owner in owners]
    return by_shape


class _Message:
    """A tensor on its way to the next rank, and the one that arrives from the rank before."""

    def __init__(self, sent: Tensor, group: dist.ProcessGroup, *, tag: int) -> None:
        size, rank = group.size(), group.rank()
        self._sent, self._arriving = sent, torch.empty_like(sent)
        after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, after, group, tag),
                dist.P2POp(dist.irecv, self._arriving, before, group, tag),
            ]
        )

    def arrived(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._arriving


_KEYS, _GRADIENTS = 1, 2  # tags: both are on their way at once


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        steps: Sequence[AttentionTiling],
        scale: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        grouped = query.unflatten(2, (key.shape[2], -1))
        out = torch.empty(grouped.shape, dtype=exact)
        lse = torch.empty(grouped.shape[:-1], dtype=exact)
        held = mine = torch.stack([key, value])
        for step, tiling in enumerate(steps):
            message = _Message(held, group, tag=_KEYS) if step < len(steps) - 1 else None
            _attend_to(held, grouped, tiling, scale, out, lse)
            if message is not None:
                held = message.arrived()
        result = out.to(query.dtype)
        # `mine`: the value of a layer is a view that would hold its queries and keys too.
        ctx.save_for_backward(query, mine, result, lse)
        ctx.steps, ctx.scale, ctx.group = steps, scale, group
        return result.flatten(2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, held, result, lse = ctx.saved_tensors
        exact = torch.promote_types(query.dtype, torch.float32)
        groups = held.shape[3]
        grouped = query.unflatten(2, (groups, -1))
        of_result = gradients[0].unflatten(2, (groups, -1))
        of_query = torch.zeros(grouped.shape, dtype=exact)
        returning = None
        for step, tiling in enumerate(ctx.steps):
            message = _Message(held, ctx.group, tag=_KEYS) if step < len(ctx.steps) - 1 else None
            of_held = torch.zeros(held.shape, dtype=exact)
            known = _Views(grouped), _Views(result), _Views(lse), _Views(of_result)
            _differentiate(held, known, tiling, ctx.scale, of_query, of_held)
            if returning is not None:
                of_held += returning.arrived()
            if len(ctx.steps) > 1:
                returning = _Message(of_held, ctx.group, tag=_GRADIENTS)
            if message is not None:
                held = message.arrived()
        of_key, of_value = (of_held if returning is None else returning.arrived()).to(query.dtype)
        return of_query.to(query.dtype).flatten(2, 3), of_key, of_value, None, None, None


def _attend_to(
    held: Tensor, query: Tensor, tiling: AttentionTiling, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Merge the results of one step into `out` and its log-sum-exp `lse`."""
    keys, values = (_Views(x.unsqueeze(3)) for x in held)
    queries, results, sums = _Views(query), _Views(out), _Views(lse)
    for length, ((part, mask),), tiles in _batches(tiling, query.dtype):
        rows = [tile.first_query for tile in tiles]
        q = queries.gathered(tiles, rows, length)
        k, v = _keys_of(keys, values, tiles, part, q.shape[1])
        is_causal = part.kind == "causal"
        found, found_sums = _flash(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
        if not is_causal:  # the queries have results of later keys
            earlier_sums = sums.gathered(tiles, rows, length)
            total = torch.logaddexp(earlier_sums, found_sums)
            found = found.to(out.dtype) * (found_sums - total).exp_().unsqueeze(-1)
            share = (earlier_sums - total).exp_().unsqueeze(-1)
            found.addcmul_(results.gathered(tiles, rows, length), share)
            found_sums = total
        results.put(found, tiles, rows, add=False)
        sums.put(found_sums, tiles, rows, add=False)


def _differentiate(
    held: Tensor,
    known: tuple[_Views, _Views, _Views, _Views],
    tiling: AttentionTiling,
    scale: float,
    of_query: Tensor,
    of_held: Tensor,
) -> None:
    """Add the gradients of one step; known: queries, results, log-sum-exp, results' gradient."""
    keys, values = (_Views(x.unsqueeze(3)) for x in held)
    totals = [_Views(x.unsqueeze(3)) for x in of_held]
    for length, ((part, mask),), tiles in _batches(tiling, held.dtype):
        rows = [tile.first_query for tile in tiles]
        q, result, sums, gradient = (views.gathered(tiles, rows, length) for views in known)
        k, v = _keys_of(keys, values, tiles, part, q.shape[1])
        dq, *of_keys = _flash_backward(
            gradient, q, k, v, result, sums, 0.0, part.kind == "causal", attn_mask=mask, scale=scale
        )
        _Views(of_query).put(dq, tiles, rows, add=True)
        starts = [tile.first_key for tile in tiles]
        for total, share in zip(totals, of_keys, strict=True):
            total.put(share.sum(1, keepdim=True, dtype=of_held.dtype), tiles, starts, add=True)
