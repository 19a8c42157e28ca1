"""Core attention on torch's SDPA: grouped queries, packed documents, context parallelism.

Shapes: s local positions, S positions of the whole sequence, b sequences, n heads and g key-value
heads of this tensor-parallel rank, d head size.

Also exact attention with soft-capped scores, in blocks of queries, for which torch has no kernel.
Scores are z = c tanh(a q.k / c) with the softmax's scale a; masked and normalised in fp32 (Gemma 2,
arXiv 2408.00118, section 2). A block of queries attends to all of its keys at once, so that no
online softmax is needed. The backward pass recomputes the block's scores. At most `BLOCK_BYTES` of
scores exist at a time, for any sequence length, in either direction.

Shapes: b sequences, g key-value heads, r query heads for each of them, s queries, S keys, d head
size; q queries of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
)
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_distill.models.layer_kinds import limited
from megatron_distill.models.taps import AttentionTap, micro_batch_of
from megatron_distill.runtime.batch import Batch, zigzag_index


def attention_mask(
    batch: Batch, *, context_size: int, windows: Sequence[int | None] = (None,)
) -> Tensor | None:
    """Return the attention masks of a micro-batch, or None where all are causal.

    Returns bool [b, planes, s, S], true where the query may see the key: same document, not later,
    and fewer than `window` positions back. There is a plane for each of `windows`; the plane of
    None is omitted where it is purely causal (`LayerKinds.mask_of` reads both forms). Keys are in
    the order in which `TorchAttention` gathers them over the context-parallel ranks.
    """
    sequence_length = batch.document_ids_bS.shape[1]
    if context_size == 1 and not batch.isolate_documents:
        windows = limited(windows)
        if all(window >= sequence_length for window in windows):
            return None
    query_index_s = batch.sequence_index_s
    key_index_S = torch.cat(
        [
            zigzag_index(sequence_length, rank=rank, size=context_size, device=query_index_s.device)
            for rank in range(context_size)
        ]
    )
    earlier_sS = key_index_S[None, :] <= query_index_s[:, None]
    near_psS = torch.stack(
        [
            earlier_sS
            if window is None
            else earlier_sS & (key_index_S[None, :] > query_index_s[:, None] - window)
            for window in windows
        ]
    )
    documents = batch.document_ids_bS
    same_bsS = documents[:, query_index_s, None] == documents[:, None, key_index_S]
    return same_bsS.unsqueeze(1) & near_psS


def attends_in_groups(device: str, dtype: torch.dtype, *, is_masked: bool) -> bool:
    """Return whether torch supports grouped queries without storing all scores.

    On CUDA only its flash kernel does, in half precision and without a mask; else torch falls back
    to the kernel that stores [b, n, s, S]. With one key head per query head further kernels apply.
    """
    return device == "cpu" or (dtype in (torch.bfloat16, torch.float16) and not is_masked)


class TorchAttention(MegatronModule):
    """Exact attention of local queries over all keys; replaces Megatron's core attention.

    `softcap` bounds the scores, which torch's attention cannot do; see `softcapped_attention`. A
    tap, if set, receives queries and keys; see `AttentionTap`.

    Collective: context-parallel group, one all-gather of keys and one of values in forward, a
    reduce-scatter of each in backward; 2 * g * d elements per token and direction.
    """

    tap: AttentionTap | None = None

    def __init__(  # Megatron-Core calls it with all of these by name
        self,
        config: TransformerConfig,
        layer_number: int,  # noqa: ARG002
        attn_mask_type: AttnMaskType,  # noqa: ARG002
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,  # noqa: ARG002
        pg_collection: ProcessGroupCollection | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__(config=config)
        assert pg_collection is not None
        assert attention_type == "self", attention_type
        self.context_group = pg_collection.cp
        self.softmax_scale = (
            1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        )
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softcap = softcap
        assert softcap is None or not self.dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,  # noqa: ARG002
        attention_bias: Tensor | None = None,
        packed_seq_params: None = None,
    ) -> Tensor:
        """Attend.

        query [s, b, n, d], key and value [s, b, g, d]. attention_mask [b, 1, s, S] is a plane of
        `attention_mask`'s result, attention_bias the number of `taps.numbered`. Returns
        [s, b, n * d].
        """
        assert packed_seq_params is None
        if self.context_group.size() > 1:
            key = gather_from_sequence_parallel_region(key, group=self.context_group)
            value = gather_from_sequence_parallel_region(value, group=self.context_group)
        micro_batch = micro_batch_of(attention_bias)
        if self.tap is not None and micro_batch is not None:
            query, key = self.tap(query, key, attention_mask, micro_batch=micro_batch)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if self.dropout and self.training and not self.config.sequence_parallel:
            with get_cuda_rng_tracker().fork():
                attended = self._attend(query, key, value, attention_mask)
        else:
            attended = self._attend(query, key, value, attention_mask)
        return attended.permute(2, 0, 1, 3).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if self.softcap is not None:
            return softcapped_attention(
                query, key, value, mask, scale=self.softmax_scale, softcap=self.softcap
            )
        queries_per_key = query.shape[1] // key.shape[1]
        is_masked = mask is not None
        if not attends_in_groups(query.device.type, query.dtype, is_masked=is_masked):
            key, value = (x.repeat_interleave(queries_per_key, dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )


# fp32 scores of one block; a few tensors of this size exist together.
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
    """The softmax of one block of queries, with the state for its gradient."""

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
        """Return the gradient on q.k [b, g, r * q, S]; overwrites the block and the argument."""
        mean = (self.chance * chance_gradient).sum(-1, keepdim=True)
        through_softmax = chance_gradient.sub_(mean).mul_(self.chance)
        slope = self.bent.square_().neg_().add_(1.0)  # of the cap; hidden scores have probability 0
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
    """Return a tensor in the dtype of scores: fp32, or float64 for float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _blocks(
    query: Tensor, mask: Tensor | None, block: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield a block's queries, the keys visible to it, and the mask of keys hidden from each query.

    query is [b, g, r, s, d]; the mask is bool [b or 1, 1, q, keys], true where hidden.
    """
    length = query.shape[3]
    for start in range(0, length, block):
        rows = slice(start, min(start + block, length))
        if mask is not None:
            yield rows, slice(None), ~mask[:, :, rows]
            continue
        seen = slice(0, rows.stop)  # keys after the last query are hidden from all
        index = torch.arange(rows.stop, device=query.device)
        yield rows, seen, (index > index[rows, None])[None, None]
