"""Attention in blocks of queries, in fp32: soft caps and dropout, on any device.

For scores that no kernel of torch takes. Scores are z = c tanh(a q.k / c) with the softmax's scale
a, normalised in fp32 (Gemma 2, arXiv 2408.00118, section 2). A block of queries attends to all
keys that it sees at once, so that no online softmax is needed. The backward pass recomputes the
block's scores, and draws its dropout again. At most `BLOCK_BYTES` of scores exist at a time, for
any sequence length, in either direction.

Shapes: b samples, g key-value heads, r query heads for each, s queries, S keys, d head size. A
block has q queries and K visible keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_distill.models.attention_kernels.rule import AttentionRule
from megatron_distill.runtime.segments import Segment, Segments

# fp32 scores of one block; a few tensors of this size exist together.
BLOCK_BYTES = 64 * 2**20
# More queries of a block only add keys that most of them do not see.
_LARGEST_BLOCK = 128


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    rule: AttentionRule,
    *,
    block_bytes: int = BLOCK_BYTES,
) -> Tensor:
    """Attend.

    query [s, b, n, d]; key and value [S, b, g, d], of the whole sequence in its order. Returns
    [s, b, n, d] in the type of the query.
    """
    blocks = list(_blocks(segments, rule.window, heads=query.shape[2], block_bytes=block_bytes))
    found: Tensor = _BlockedAttention.apply(query, key, value, blocks, rule)
    return found


@dataclass(frozen=True)
class _QueryBlock:
    """A block: samples, queries, the keys that one of them sees, and who sees which."""

    samples: slice
    queries: slice
    keys: slice
    earlier: int  # keys of the block before the first query's own
    window: int | None

    def hidden(self, device: torch.device) -> Tensor:
        """Return the mask [q, K], true where a query does not see a key."""
        own = torch.arange(self.queries.stop - self.queries.start, device=device) + self.earlier
        keys = torch.arange(self.keys.stop - self.keys.start, device=device)
        hidden = keys > own[:, None]
        if self.window is not None:
            hidden |= keys <= own[:, None] - self.window
        return hidden


def _blocks(
    segments: Segments, window: int | None, *, heads: int, block_bytes: int
) -> Iterator[_QueryBlock]:
    for segment, samples in _shared(segments):
        count = samples.stop - samples.start
        row_bytes = 4 * count * heads * min(segment.keys, window or segment.keys)
        length = max(1, min(_LARGEST_BLOCK, block_bytes // row_bytes))
        for start in range(0, segment.queries, length):
            stop = min(start + length, segment.queries)
            own = segment.earlier + start
            first = 0 if window is None else max(0, own - window + 1)
            yield _QueryBlock(
                samples,
                slice(segment.first_query + start, segment.first_query + stop),
                slice(segment.first_key + first, segment.first_key + segment.earlier + stop),
                own - first,
                window,
            )


def _shared(segments: Segments) -> Sequence[tuple[Segment, slice]]:
    """Return the segments; those that are equal in every sample as one."""
    if len(set(segments.bounds)) == 1:
        everyone = slice(0, len(segments.bounds))
        return [(segment, everyone) for segment in segments.segments if segment.sample == 0]
    return [(segment, slice(segment.sample, segment.sample + 1)) for segment in segments.segments]


class _Block:
    """The softmax of one block of queries, with the state for its gradient."""

    def __init__(self, query: Tensor, key: Tensor, hidden: Tensor, rule: AttentionRule) -> None:
        """Compute the block: query [b, g, r * q, d], key [b, g, K, d], hidden [q, K]."""
        scores = torch.matmul(query, key.transpose(-1, -2))
        if rule.softcap is None:
            self.bent, capped = None, scores.mul_(rule.scale)
        else:
            # [b, g, r * q, K]: the capped scores over the cap
            self.bent = scores.mul_(rule.scale / rule.softcap).tanh_()
            capped = self.bent * rule.softcap
        capped = capped.unflatten(2, (-1, hidden.shape[0]))
        capped.masked_fill_(hidden, float("-inf"))
        self.chance = capped.flatten(2, 3).softmax(-1)
        self.scale = rule.scale
        self.remaining: Tensor | None = None
        if rule.dropout:  # zero, or the factor that keeps the mean
            kept = torch.rand_like(self.chance) >= rule.dropout
            self.remaining = kept.to(self.chance.dtype).div_(1 - rule.dropout)

    def weights(self) -> Tensor:
        """Return the weights of the values."""
        return self.chance if self.remaining is None else self.chance * self.remaining

    def score_gradient(self, weight_gradient: Tensor) -> Tensor:
        """Return the gradient on q.k [b, g, r * q, K]; overwrites the block and the argument."""
        if self.remaining is not None:
            weight_gradient.mul_(self.remaining)
        mean = (self.chance * weight_gradient).sum(-1, keepdim=True)
        gradient = weight_gradient.sub_(mean).mul_(self.chance).mul_(self.scale)
        if self.bent is None:
            return gradient
        slope = self.bent.square_().neg_().add_(1.0)  # of the cap; hidden scores have probability 0
        return gradient.mul_(slope)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        blocks: Sequence[_QueryBlock],
        rule: AttentionRule,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.blocks, ctx.rule = blocks, rule
        ctx.random_state = _generator(query.device).get_state() if rule.dropout else None
        grouped = query.unflatten(2, (key.shape[2], -1))
        out = torch.empty(grouped.shape, dtype=query.dtype, device=query.device)
        for place in blocks:
            queries, keys, values = _read(place, grouped, key, value)
            block = _Block(queries, keys, place.hidden(query.device), rule)
            _rows(out, place).copy_(_as_rows(torch.matmul(block.weights(), values), grouped))
        return out.flatten(2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        grouped = query.unflatten(2, (key.shape[2], -1))
        of_out = gradients[0].unflatten(2, (key.shape[2], -1))
        of_query = torch.empty(grouped.shape, dtype=query.dtype, device=query.device)
        of_key, of_value = (torch.zeros_like(x, dtype=_exact(x)) for x in (key, value))
        later_state = None
        if ctx.random_state is not None:
            later_state = _generator(query.device).get_state()
            _generator(query.device).set_state(ctx.random_state)
        for place in ctx.blocks:
            queries, keys, values = _read(place, grouped, key, value)
            block = _Block(queries, keys, place.hidden(query.device), ctx.rule)
            gradient = _as_heads(_rows(of_out, place))
            to_values = torch.matmul(block.weights().transpose(-1, -2), gradient)
            of_value[place.keys, place.samples] += to_values.permute(2, 0, 1, 3)
            scores = block.score_gradient(torch.matmul(gradient, values.transpose(-1, -2)))
            _rows(of_query, place).copy_(_as_rows(torch.matmul(scores, keys), grouped))
            to_keys = torch.matmul(scores.transpose(-1, -2), queries)
            of_key[place.keys, place.samples] += to_keys.permute(2, 0, 1, 3)
        if later_state is not None:
            _generator(query.device).set_state(later_state)
        return of_query.flatten(2, 3), of_key.to(key.dtype), of_value.to(value.dtype), None, None


def _generator(device: torch.device) -> torch.Generator:
    """Return the generator that dropout draws from; its state is in host memory."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _exact(tensor: Tensor) -> torch.dtype:
    """Return the dtype of scores: fp32, or float64 for float64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _rows(grouped: Tensor, place: _QueryBlock) -> Tensor:
    return grouped[place.queries, place.samples]  # [q, b, g, r, d]


def _as_heads(rows: Tensor) -> Tensor:
    """Return [b, g, r * q, d] in the dtype of scores."""
    return rows.permute(1, 2, 3, 0, 4).flatten(2, 3).to(_exact(rows))


def _as_rows(heads: Tensor, grouped: Tensor) -> Tensor:
    """Return [q, b, g, r, d] from [b, g, r * q, d]."""
    return heads.unflatten(2, (grouped.shape[3], -1)).permute(3, 0, 1, 2, 4)


def _read(
    place: _QueryBlock, grouped: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [b, g, r * q, d], keys and values [b, g, K, d] in the dtype of scores."""
    keys, values = (
        x[place.keys, place.samples].permute(1, 2, 0, 3).to(_exact(x)) for x in (key, value)
    )
    return _as_heads(_rows(grouped, place)), keys, values
