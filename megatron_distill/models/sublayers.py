"""A layer's attention and feed-forward with what upstream's lack: kinds of layers, and post norms.

A post norm normalises what attention or feed-forward adds to the residual stream, before it is
added (Gemma 2, arXiv 2408.00118, section 2). It stands inside those modules and not in upstream's
sum of bias and residual, which runs with gradients on even where a layer is recomputed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor

from megatron_distill.models.layer_kinds import LayerKinds

Norm = Callable[..., torch.nn.Module]


class KindAttention(SelfAttention):
    """Self-attention that sees and turns as its layer's kind does, with a post norm or none.

    The planes of masks and angles are those of `LayerKinds`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *arguments: Any,
        kinds: LayerKinds,
        post_norm: Norm | None,
        **named: Any,
    ) -> None:
        super().__init__(config, *arguments, **named)
        self.kinds = kinds
        self.post_norm = None if post_norm is None else _build(post_norm, config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from [s, b, h]; returns what the layer adds and a bias to add to that, if any."""
        layer = self.layer_number - 1  # of the whole model, which upstream counts from one
        output, bias = super().forward(
            hidden_states,
            self.kinds.mask_of(layer, attention_mask),
            rotary_pos_emb=self.kinds.angles_of(layer, rotary_pos_emb),
            **arguments,
        )
        return _normed(output, bias, self.post_norm)


class PostNormMLP(MLP):
    """A feed-forward with a norm on what it adds to the residual stream."""

    def __init__(self, config: TransformerConfig, *, post_norm: Norm, **arguments: Any) -> None:
        super().__init__(config, **arguments)
        self.post_norm = _build(post_norm, config)

    def forward(
        self, hidden_states: Tensor, per_token_scale: None = None, **arguments: Any
    ) -> tuple[Tensor, None]:
        """Transform [s, b, h]; returns what the layer adds, and no bias."""
        output, bias = super().forward(hidden_states, per_token_scale, **arguments)
        normed, _ = _normed(output, bias, self.post_norm)
        return normed, None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Describe the parameters; the norm apart, of which upstream wants a method of its own."""
        without_norm = copy.copy(self)
        without_norm._modules = {  # noqa: SLF001
            name: module for name, module in self._modules.items() if name != "post_norm"
        }
        state = super(PostNormMLP, without_norm).sharded_state_dict(
            prefix, sharded_offsets, metadata
        )
        norm = sharded_state_dict_default(
            self.post_norm, f"{prefix}post_norm.", sharded_offsets, metadata, tp_group=self.tp_group
        )
        return {**state, **norm}


def mlp_with_post_norm(
    submodules: MLPSubmodules, post_norm: Norm, *, tensor_group: dist.ProcessGroup
) -> type[MLP]:
    """Return a feed-forward that a layer builds from its configuration alone.

    As a type, because a layer knows what to tell upstream's own MLP only, and warns of any other.
    """

    class LayerMLP(PostNormMLP):
        def __init__(self, config: TransformerConfig) -> None:
            super().__init__(
                config,
                post_norm=post_norm,
                submodules=submodules,
                ffn_hidden_size=config.ffn_hidden_size,
                tp_group=tensor_group,
            )

    return LayerMLP


def _build(norm: Norm, config: TransformerConfig) -> torch.nn.Module:
    return norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


def _normed(
    output: Tensor, bias: Tensor | None, norm: torch.nn.Module | None
) -> tuple[Tensor, Tensor | None]:
    if norm is None:
        return output, bias
    return norm(output if bias is None else output + bias), None
