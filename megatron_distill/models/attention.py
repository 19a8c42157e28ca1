"""Core attention on torch's scaled_dot_product_attention: grouped queries, documents, context
parallelism.

Shapes: s local positions, S positions of the whole sequence, b sequences, n heads and g key-value
heads of this tensor-parallel rank, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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

from megatron_distill.models.layer_kinds import limited
from megatron_distill.models.softcapped_attention import softcapped_attention
from megatron_distill.models.taps import AttentionTap, micro_batch_of
from megatron_distill.runtime.batch import Batch, zigzag_index


def attention_mask(
    batch: Batch, *, context_size: int, windows: Sequence[int | None] = (None,)
) -> Tensor | None:
    """Return who may attend to whom in a micro-batch, or None where plain causality says it all.

    Returns bool [b, planes, s, S], true where the query may see the key: same document, not later,
    and fewer than `window` positions back. There is a plane for each of `windows`; where causality
    alone says what None sees, for each of the others (`LayerKinds.mask_of` reads both). Keys stand
    in the order in which `TorchAttention` gathers them over the context-parallel ranks.
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
    """Return whether torch takes grouped queries as they are without holding all their scores.

    On CUDA only its flash kernel does, in half precision and without a mask; anything else would
    fall to the kernel that writes out [b, n, s, S]. With a key per query there is always another.
    """
    return device == "cpu" or (dtype in (torch.bfloat16, torch.float16) and not is_masked)


class TorchAttention(MegatronModule):
    """Exact attention of local queries over all keys, in the place of Megatron's core attention.

    `softcap` bounds the scores, which torch's attention cannot do; see `softcapped_attention`.
    Queries and keys pass a tap, if there is one; see `AttentionTap`.

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

        query [s, b, n, d], key and value [s, b, g, d]; attention_mask [b, 1, s, S] is a plane of
        what `attention_mask` returns, attention_bias the number of `taps.numbered`. Returns
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
