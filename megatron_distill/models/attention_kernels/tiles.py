"""Attention on CPUs: torch's flash kernel on tiles of queries and keys, merged by log-sum-exp.

A document is one causal tile. Where a rank's piece of the sequence cuts a document, the keys before
the piece are a second, full tile. A sliding window becomes blocks of queries, each with the keys
that its queries see and one small mask for all blocks. Partial results of a query are merged:

    lse = log(sum_i exp(lse_i)),    out = sum_i exp(lse_i - lse) out_i

(FlashAttention-2, arXiv 2307.08691, section 3.1; across devices: Ring Attention, arXiv 2310.01889).
The backward pass gives each tile the merged result and log-sum-exp, from which it recomputes its
own probabilities, so gradients are exact. Heads of a group read the same keys through a stride of
zero: keys are never repeated in memory.

Shapes: s queries, S keys, b samples, n heads, g key-value heads, r = n / g, d head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_distill.models.attention_kernels.rule import AttentionRule
from megatron_distill.runtime.segments import Segment, Segments

# Queries of a block under a sliding window: at least, so that a call pays; and at most.
_LEAST_BLOCK, _LARGEST_BLOCK = 64, 512
# Tiles of equal sizes up to this many queries are copied into one batch: a call costs more.
_STACKED_QUERIES = 128

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


@dataclass(frozen=True)
class KeyTile:
    """Keys of a tile, and which of them its queries see.

    `causal`: query i sees the keys up to i. `full`: every query sees every key. `band`: query i
    sees `keys - queries + 1` keys, from i on.
    """

    offset: int  # of the first key, from the segment's first key
    keys: int
    kind: str


@dataclass(frozen=True)
class TileShape:
    """Sizes of a tile; tiles of one shape run as one batch."""

    queries: int
    parts: tuple[KeyTile, ...]


@dataclass(frozen=True)
class AttentionTile:
    """A tile's place. `samples` of None: every sample of the micro-batch."""

    sample: int | None
    first_query: int
    first_key: int


AttentionTiling = Sequence[tuple[TileShape, Sequence[AttentionTile]]]


def attend(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule
) -> Tensor:
    """Attend on a CPU, without soft cap or dropout.

    query [s, b, n, d]; key and value [S, b, g, d], of the whole sequence in its order. Returns
    [s, b, n, d].
    """
    assert rule.softcap is None
    assert not rule.dropout
    tiles = segments.derived(("tiles", rule.window), partial(tiling, segments, rule.window))
    found: Tensor = _TiledAttention.apply(query, key, value, tiles, rule.scale)
    return found


def tiling(segments: Segments, window: int | None) -> AttentionTiling:
    """Return the tiles of all segments, by shape."""
    by_place: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    for segment in segments.segments:
        place = (segment.first_query, segment.queries, segment.first_key, segment.keys)
        by_place[place].append(segment.sample)
    by_shape: dict[TileShape, list[AttentionTile]] = defaultdict(list)
    for (first_query, queries, first_key, keys), samples in by_place.items():
        segment = Segment(0, first_query, queries, first_key, keys)
        owners = [None] if len(samples) == len(segments.bounds) else samples
        for shape, query_offset, key_offset in _tiles_of(segment, window):
            by_shape[shape] += [
                AttentionTile(owner, first_query + query_offset, first_key + key_offset)
                for owner in owners
            ]
    return list(by_shape.items())


def _tiles_of(segment: Segment, window: int | None) -> Iterator[tuple[TileShape, int, int]]:
    """Yield shapes, with the offsets of their first query and key in the segment."""
    earlier, queries = segment.earlier, segment.queries
    # The queries that see every key of the document up to their own.
    whole = queries if window is None else min(queries, max(0, window - earlier))
    if whole:
        causal = KeyTile(earlier, whole, "causal")
        before = (KeyTile(0, earlier, "full"),) if earlier else ()
        yield TileShape(whole, (*before, causal)), 0, 0
    if window is None or whole == queries:
        return
    block = min(max(window, _LEAST_BLOCK), _LARGEST_BLOCK)
    for start in range(whole, queries, block):
        length = min(block, queries - start)
        band = KeyTile(0, length + window - 1, "band")
        yield TileShape(length, (band,)), start, earlier + start - window + 1


class _Views:
    """The parts of a tensor that belong to the tiles of one shape.

    Works on [positions, b, g, r, d], or the same without d; r is one for keys.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def of(self, tile: AttentionTile, start: int, length: int) -> Tensor:
        """Return [batch, r, length, ...] of one tile, a view wherever strides permit."""
        rows = self.tensor[start : start + length]
        if tile.sample is None:
            return rows.flatten(1, 2).transpose(0, 1).transpose(1, 2)
        return rows[:, tile.sample].transpose(0, 1).transpose(1, 2)

    def gathered(
        self, tiles: Sequence[AttentionTile], starts: Sequence[int], length: int
    ) -> Tensor:
        """Return those of several tiles as one batch."""
        views = [self.of(tile, start, length) for tile, start in zip(tiles, starts, strict=True)]
        return views[0] if len(views) == 1 else torch.cat(views)

    def put(
        self, batch: Tensor, tiles: Sequence[AttentionTile], starts: Sequence[int], *, add: bool
    ) -> None:
        """Write, or add, a batch to the tiles."""
        groups = self.tensor.shape[2]
        sizes = [groups * (self.tensor.shape[1] if t.sample is None else 1) for t in tiles]
        parts = batch.split(sizes)
        for tile, start, part in zip(tiles, starts, parts, strict=True):
            rows = self.tensor[start : start + batch.shape[2]]
            if tile.sample is not None:
                rows = rows[:, tile.sample : tile.sample + 1]
            shaped = part.unflatten(0, (-1, groups)).movedim(3, 0)  # [length, b or 1, g, r, ...]
            if add:
                rows.add_(shaped)
            else:
                rows.copy_(shaped)


MaskedKeys = tuple[KeyTile, Tensor | None]  # with its mask


def _batches(
    tiling: AttentionTiling, dtype: torch.dtype
) -> Iterator[tuple[int, Sequence[MaskedKeys], Sequence[AttentionTile]]]:
    """Yield queries and parts of the tiles that one call computes: many small, or a large one."""
    for shape, tiles in tiling:
        parts = [(part, _band(part, shape.queries, dtype)) for part in shape.parts]
        if shape.queries <= _STACKED_QUERIES:
            yield shape.queries, parts, tiles
        else:
            for tile in tiles:
                yield shape.queries, parts, [tile]


def _band(part: KeyTile, queries: int, dtype: torch.dtype) -> Tensor | None:
    """Return the mask [queries, keys] of a band, added to scores; None for the other kinds."""
    if part.kind != "band":
        return None
    offset = torch.arange(part.keys) - torch.arange(queries)[:, None]
    hidden = (offset < 0) | (offset > part.keys - queries)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tiling: AttentionTiling, scale: float
    ) -> Tensor:
        groups = key.shape[2]
        exact = torch.promote_types(query.dtype, torch.float32)
        grouped = query.unflatten(2, (groups, -1))  # [s, b, g, r, d]
        out = torch.empty(grouped.shape, dtype=query.dtype)
        lse = torch.empty(grouped.shape[:-1], dtype=exact)
        queries, keys, values = (
            _Views(grouped),
            _Views(key.unsqueeze(3)),
            _Views(value.unsqueeze(3)),
        )
        for length, parts, tiles in _batches(tiling, query.dtype):
            rows = [tile.first_query for tile in tiles]
            q = queries.gathered(tiles, rows, length)
            found = []
            for part, mask in parts:
                k, v = _keys_of(keys, values, tiles, part, q.shape[1])
                found.append(
                    _flash(q, k, v, 0.0, part.kind == "causal", attn_mask=mask, scale=scale)
                )
            attended, sums = found[0] if len(found) == 1 else _merged(found, query.dtype)
            _Views(out).put(attended, tiles, rows, add=False)
            _Views(lse).put(sums, tiles, rows, add=False)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.tiling, ctx.scale = tiling, scale
        return out.flatten(2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        groups = key.shape[2]
        exact = torch.promote_types(query.dtype, torch.float32)
        grouped = query.unflatten(2, (groups, -1))
        queries, keys, values = (
            _Views(grouped),
            _Views(key.unsqueeze(3)),
            _Views(value.unsqueeze(3)),
        )
        of_out = _Views(gradients[0].unflatten(2, (groups, -1)))
        of_query = torch.empty(grouped.shape, dtype=query.dtype)
        of_key = torch.zeros(key.shape, dtype=exact).unsqueeze(3)
        of_value = torch.zeros_like(of_key)
        for length, parts, tiles in _batches(ctx.tiling, query.dtype):
            rows = [tile.first_query for tile in tiles]
            q, result, sums, gradient = (
                views.gathered(tiles, rows, length)
                for views in (queries, _Views(out), _Views(lse), of_out)
            )
            shares = []
            for part, mask in parts:
                k, v = _keys_of(keys, values, tiles, part, q.shape[1])
                dq, dk, dv = _flash_backward(
                    gradient, q, k, v, result, sums, 0.0, part.kind == "causal",
                    attn_mask=mask, scale=ctx.scale,
                )  # fmt: skip
                shares.append(dq)
                starts = [tile.first_key + part.offset for tile in tiles]
                for total, share in ((of_key, dk), (of_value, dv)):
                    summed = share.sum(1, keepdim=True, dtype=exact)
                    _Views(total).put(summed, tiles, starts, add=True)
            _Views(of_query).put(_summed(shares), tiles, rows, add=False)
        of_keys = (total.squeeze(3).to(key.dtype) for total in (of_key, of_value))
        return of_query.flatten(2, 3), *of_keys, None, None


def _keys_of(
    keys: _Views, values: _Views, tiles: Sequence[AttentionTile], part: KeyTile, heads: int
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a tile, the same for each of a group's heads."""
    starts = [tile.first_key + part.offset for tile in tiles]
    k, v = (views.gathered(tiles, starts, part.keys) for views in (keys, values))
    return k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)


def _summed(shares: Sequence[Tensor]) -> Tensor:
    """Return the sum, rounded once."""
    exact = torch.promote_types(shares[0].dtype, torch.float32)
    return shares[0] if len(shares) == 1 else torch.stack(list(shares)).sum(0, dtype=exact)


def _merged(parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge the results of disjoint sets of keys, and their log-sum-exp."""
    sums = torch.logsumexp(torch.stack([lse for _, lse in parts]), dim=0)
    weighted = [out.to(sums.dtype) * (lse - sums).exp().unsqueeze(-1) for out, lse in parts]
    return torch.stack(weighted).sum(0).to(dtype), sums
