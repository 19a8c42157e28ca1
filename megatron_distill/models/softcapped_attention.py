"""Exact attention with soft-capped scores, in blocks of queries, for which torch has no kernel.

Scores are z = c tanh(a q.k / c) with the softmax's scale a, then masked and normalised in fp32
(Gemma 2, arXiv 2408.00118, section 2). A block of queries meets all of its keys at once, so that
each softmax is a plain one; the backward pass computes the block's scores anew. No more than
`BLOCK_BYTES` of scores exist at a time, whatever the sequence's length, in either direction.

Shapes: b sequences, g key-value heads, r query heads for each of them, s queries, S keys, d head
size; q queries of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# fp32 scores of one block; a handful of tensors of this size exist together.
BLOCK_BYTES = 64 * 2**20


def softcapped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float,
    block_bytes: int = BLOCK_BYTES,
) -> Tensor:
    """Attend.

    query [b, n, s, d], key and value [b, g, S, d], n a multiple of g; mask bool [b, 1, s, S], true
    where the query sees the key, at least one for each; None: query i sees the keys up to i.
    Returns [b, n, s, d] in the type of the query.
    """
    b, n, s, d = query.shape
    g = key.shape[1]
    assert mask is not None or s == key.shape[2], (query.shape, key.shape)
    block = max(1, block_bytes // (4 * b * n * key.shape[2]))
    grouped = query.reshape(b, g, n // g, s, d)
    out = _SoftcappedAttention.apply(grouped, key, value, mask, scale, softcap, block)
    return out.reshape(b, n, s, d)


class _Block:
    """The softmax of one block of queries and what its gradient needs."""

    def __init__(
        self, query: Tensor, key: Tensor, hidden: Tensor, *, scale: float, softcap: float
    ) -> None:
        """Compute the block: query [b, g, r * q, d], key [b, g, S, d], hidden [b or 1, 1, q, S]."""
        bent = torch.matmul(query, key.transpose(-1, -2)).mul_(scale / softcap).tanh_()
        capped = (bent * softcap).unflatten(2, (-1, hidden.shape[2]))
        capped.masked_fill_(hidden.unsqueeze(2), float("-inf"))
        self.bent = bent  # [b, g, r * q, S]: the capped scores over the cap
        self.chance = capped.flatten(2, 3).softmax(-1)
        self.scale = scale

    def score_gradient(self, chance_gradient: Tensor) -> Tensor:
        """Return the gradient of q.k [b, g, r * q, S]; uses up the block and the argument."""
        mean = (self.chance * chance_gradient).sum(-1, keepdim=True)
        through_softmax = chance_gradient.sub_(mean).mul_(self.chance)
        slope = self.bent.square_().neg_().add_(1.0)  # of the cap; hidden scores have chance zero
        return through_softmax.mul_(slope).mul_(self.scale)


class _SoftcappedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # [b, g, r, s, d]
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float,
        block: int,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.settings = (scale, softcap, block)
        keys, values = _exact(key), _exact(value)
        out = torch.empty_like(query)
        for rows, seen, hidden in _blocks(query, mask, block):
            queries = _exact(query[..., rows, :]).flatten(2, 3)
            found = _Block(queries, keys[:, :, seen], hidden, scale=scale, softcap=softcap)
            attended = torch.matmul(found.chance, values[:, :, seen])
            out[..., rows, :] = attended.unflatten(2, (query.shape[2], -1))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (out_gradient,) = gradients
        query, key, value, mask = ctx.saved_tensors
        scale, softcap, block = ctx.settings
        keys, values = _exact(key), _exact(value)
        query_gradient = torch.empty_like(query)
        key_gradient, value_gradient = torch.zeros_like(keys), torch.zeros_like(values)
        for rows, seen, hidden in _blocks(query, mask, block):
            queries = _exact(query[..., rows, :]).flatten(2, 3)
            found = _Block(queries, keys[:, :, seen], hidden, scale=scale, softcap=softcap)
            gradient = _exact(out_gradient[..., rows, :]).flatten(2, 3)
            value_gradient[:, :, seen] += torch.matmul(found.chance.transpose(-1, -2), gradient)
            scores = found.score_gradient(
                torch.matmul(gradient, values[:, :, seen].transpose(-1, -2))
            )
            from_scores = torch.matmul(scores, keys[:, :, seen])
            query_gradient[..., rows, :] = from_scores.unflatten(2, (query.shape[2], -1))
            key_gradient[:, :, seen] += torch.matmul(scores.transpose(-1, -2), queries)
        return (
            query_gradient,
            key_gradient.to(key.dtype),
            value_gradient.to(value.dtype),
            None,
            None,
            None,
            None,
        )


def _exact(tensor: Tensor) -> Tensor:
    """Return a tensor in the type in which scores are computed: fp32, or float64 if it is that."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _blocks(
    query: Tensor, mask: Tensor | None, block: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield a block's queries, the keys that it can see, and which of them each one must not.

    query is [b, g, r, s, d]; what is hidden is bool [b or 1, 1, q, keys].
    """
    length = query.shape[3]
    for start in range(0, length, block):
        rows = slice(start, min(start + block, length))
        if mask is not None:
            yield rows, slice(None), ~mask[:, :, rows]
            continue
        seen = slice(0, rows.stop)  # what is later than the last query is so for all of them
        index = torch.arange(rows.stop, device=query.device)
        yield rows, seen, (index > index[rows, None])[None, None]
