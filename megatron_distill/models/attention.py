"""Core attention of every layer: packed documents and context parallelism, without masks.

Shapes: s local positions, S positions of the whole sequence, b sequences, n heads and g key-value
heads of this tensor-parallel rank, d head size.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_distill.models.attention_kernels.choice import kernel_for
from megatron_distill.models.attention_kernels.rule import AttentionRule
from megatron_distill.models.context_keys import (
    gathered_keys,
    recomputes_attention,
    saved_in_part,
)
from megatron_distill.models.taps import AttentionTap, LayerCall, VisibleKeys
from megatron_distill.runtime.segments import Segments


class TorchAttention(MegatronModule):
    """Exact attention of local queries over all keys; replaces Megatron's core attention.

    `softcap` bounds the scores. The layer sets `window`, the number of keys that a query sees. A
    tap, if set, receives queries and keys; see `AttentionTap`. `kernel_for` chooses the kernel.

    Collective: context-parallel group, one all-gather of keys and values in forward, one more and a
    reduce-scatter in backward; 2 * g * d elements per token each.
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
        self.window: int | None = None
        self.rule = AttentionRule(
            scale=1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale,
            softcap=softcap,
            dropout=config.attention_dropout if attention_dropout is None else attention_dropout,
        )
        assert softcap is None or not self.rule.dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        attn_mask_type: AttnMaskType | None = None,  # noqa: ARG002
        attention_bias: LayerCall | None = None,
        packed_seq_params: None = None,
    ) -> Tensor:
        """Attend.

        query [s, b, n, d], key and value [s, b, g, d]. attention_bias, which upstream passes to
        every layer, is the micro-batch's `LayerCall`. Returns [s, b, n * d].
        """
        assert attention_mask is None
        assert packed_seq_params is None
        assert attention_bias is not None
        call = attention_bias
        # Whole sequences, of one rank each, need no keys of other context ranks.
        size = call.segments.size
        assert size in (1, self.context_group.size()), (size, self.context_group.size())
        saving: AbstractContextManager[None] = nullcontext()
        if size > 1:
            whole = gathered_keys(key, value, self.context_group)
            if not recomputes_attention(self.config):
                saving = saved_in_part(key, value, whole, self.context_group)
            key, value = whole.unbind(1)
        if self.tap is not None and call.micro_batch is not None:
            visible = VisibleKeys(call.segments, self.window)
            query, key = self.tap(query, key, visible, micro_batch=call.micro_batch)
        rule = replace(
            self.rule, window=self.window, dropout=self.rule.dropout if self.training else 0.0
        )
        with saving:
            return self.attend(query, key, value, call.segments, rule).flatten(2)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule
    ) -> Tensor:
        """Return [s, b, n, d], by the fastest kernel for these queries and this rule."""
        attend = kernel_for(query, rule).attend
        if rule.dropout and not self.config.sequence_parallel:
            with get_cuda_rng_tracker().fork():
                return attend(query, key, value, segments, rule)
        return attend(query, key, value, segments, rule)
