"""Attention and feed-forward with layer kinds and post norms, which upstream's modules lack.

A post norm normalises the output of attention or feed-forward before the residual sum (Gemma 2,
arXiv 2408.00118, section 2). It is inside those modules and not in upstream's sum of bias and
residual, which runs with gradients enabled even where a layer is recomputed.

Layers use Transformer Engine's modules where it runs, torch's elsewhere.

The core attention is `TorchAttention` in both, except where `EngineAttention` computes the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.attention import TorchAttention
from megatron_distill.models.experts import (
    GroupedExperts,
    SequenceBalancedRouter,
    grouped_experts_run,
)
from megatron_distill.models.layer_kinds import LayerKinds
from megatron_distill.models.taps import AttentionTap, LayerCall, LayerTap
from megatron_distill.models.transformer_engine import (
    EngineAttention,
    engine_attends,
    fused_config,
    fused_rope_config,
)
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.mcore_patches import has_transformer_engine

NormFactory = Callable[..., torch.nn.Module]


class KindAttention(SelfAttention):
    """Self-attention with its layer's window and rotary angles, and an optional post norm.

    The planes of angles are those of `LayerKinds`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *arguments: Any,
        kinds: LayerKinds,
        post_norm: NormFactory | None,
        is_fused: bool = False,
        **named: Any,
    ) -> None:
        super().__init__(config, *arguments, **named)
        self.kinds = kinds
        self.core_attention.window = kinds.window_of(self.layer_number - 1)
        self.plain_config = config
        self.rope_config = fused_rope_config(config) if is_fused else None
        self.post_norm = None if post_norm is None else _build(post_norm, config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None,
        *,
        rotary_pos_emb: Tensor | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from [s, b, h]; returns the residual update and a bias to add to it, if any."""
        layer = self.layer_number - 1  # of the whole model; upstream counts from one
        angles = self.kinds.angles_of(layer, rotary_pos_emb)
        if self.rope_config is not None:
            self.config = self.rope_config if hidden_states.shape[1] == 1 else self.plain_config
            if angles is not None:  # the kernel reads them in a line, whatever their strides
                angles = angles.contiguous()
        output, bias = super().forward(
            hidden_states,
            attention_mask,
            rotary_pos_emb=angles,
            **arguments,
        )
        return _normed(output, bias, self.post_norm)


class PostNormMLP(MLP):
    """A feed-forward with a norm on its output, before the residual sum."""

    def __init__(
        self, config: TransformerConfig, *, post_norm: NormFactory, **arguments: Any
    ) -> None:
        super().__init__(config, **arguments)
        self.post_norm = _build(post_norm, config)

    def forward(
        self, hidden_states: Tensor, per_token_scale: None = None, **arguments: Any
    ) -> tuple[Tensor, None]:
        """Transform [s, b, h]; returns the residual update, and None as bias."""
        output, bias = super().forward(hidden_states, per_token_scale, **arguments)
        normed, _ = _normed(output, bias, self.post_norm)
        return normed, None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Describe the parameters; upstream requires a separate method for the norm's."""
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
    submodules: MLPSubmodules, post_norm: NormFactory, *, tensor_group: dist.ProcessGroup
) -> type[MLP]:
    """Return a feed-forward that a layer builds from its configuration alone.

    A class, because upstream's layer passes full arguments only to its own MLP class, and warns
    about further ones.
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


def _build(norm: NormFactory, config: TransformerConfig) -> torch.nn.Module:
    return norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


def _normed(
    output: Tensor, bias: Tensor | None, norm: torch.nn.Module | None
) -> tuple[Tensor, Tensor | None]:
    if norm is None:
        return output, bias
    return norm(output if bias is None else output + bias), None


def transformer_engine_runs(device: torch.device) -> bool:
    """Return whether Megatron-Core uses Transformer Engine and the model is on a CUDA device."""
    return device.type == "cuda" and has_transformer_engine()


def layer_specs(
    architecture: Architecture,
    config: TransformerConfig,
    *,
    device: torch.device,
    vp_stage: int | None,
    groups: Groups,
    is_empty: bool = False,
) -> TransformerBlockSubmodules:
    """Return the specifications of one pipeline stage's layers and final norm.

    is_empty: the layers' parameters have shapes and no memory.
    """
    rank = groups.pipeline.rank()
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=rank)
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=rank)
    has_experts = [layer in architecture.expert_layers for layer in range(first, first + count)]
    kinds = {
        kind: _layer_spec(
            architecture,
            config,
            has_experts=kind,
            device=device,
            groups=groups,
            is_empty=is_empty,
        )
        for kind in set(has_experts)
    }
    return TransformerBlockSubmodules(
        layer_specs=[kinds[kind] for kind in has_experts], layer_norm=_norm(device)
    )


def _layer_spec(
    architecture: Architecture,
    config: TransformerConfig,
    *,
    has_experts: bool,
    device: torch.device,
    groups: Groups,
    is_empty: bool,
) -> ModuleSpec:
    experts = architecture.moe.num_experts if architecture.moe and has_experts else None
    make = _transformer_engine_layer if transformer_engine_runs(device) else _torch_layer
    layer = make(architecture, config, experts, device)
    assert layer.module is TransformerLayer
    layer.module = TappedLayer
    is_fused = transformer_engine_runs(device)
    layer.params = {**(layer.params or {}), "is_fused": is_fused, "is_empty": is_empty}
    norm = _norm(device)
    post_norm = norm if architecture.post_norms else None
    attention = layer.submodules.self_attention
    attention.module = KindAttention
    kinds = LayerKinds.of(architecture)
    attention.params |= {"kinds": kinds, "post_norm": post_norm, "is_fused": is_fused}
    attention.submodules.core_attention = (
        partial(EngineAttention, kinds=kinds)
        if is_fused and engine_attends(architecture, config, device)
        else partial(TorchAttention, softcap=architecture.attention_softcap)
    )
    if experts is not None:
        layer.submodules.mlp.submodules.router = SequenceBalancedRouter
    if post_norm is not None:
        assert not architecture.moe
        layer.submodules.mlp = mlp_with_post_norm(
            layer.submodules.mlp.submodules, post_norm, tensor_group=groups.tensor
        )
    return layer


def _norm(device: torch.device) -> type:
    if not transformer_engine_runs(device):
        return TorchNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _torch_layer(
    architecture: Architecture,
    config: TransformerConfig,
    experts: int | None,
    device: torch.device,
) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,
        qk_layernorm=architecture.qk_norm,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = TorchNorm
    layer.submodules.pre_mlp_layernorm = TorchNorm
    if architecture.qk_norm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = TorchNorm
        attention.k_layernorm = TorchNorm
    if experts is not None and _groups_experts(architecture, config, device):
        layer.submodules.mlp.submodules.experts = ModuleSpec(module=GroupedExperts)
    return layer


def _groups_experts(
    architecture: Architecture, config: TransformerConfig, device: torch.device
) -> bool:
    share = config.expert_tensor_parallel_size or 1
    return grouped_experts_run(architecture, config.params_dtype, device, tensor=share)


def _transformer_engine_layer(
    architecture: Architecture,
    config: TransformerConfig,
    experts: int | None,
    device: torch.device,
) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=experts,
        moe_grouped_gemm=not architecture.linear_bias,  # refused upstream
        qk_layernorm=architecture.qk_norm,
    )
    if experts is not None:
        # Transformer Engine's grouped product takes the rows of each expert as numbers of the host.
        # Those of an exchange are there anyway; one rank with all experts would wait for them.
        is_alone = config.expert_model_parallel_size == 1
        is_alone &= (config.expert_tensor_parallel_size or 1) == 1
        if is_alone and config.fp8 is None and _groups_experts(architecture, config, device):
            layer.submodules.mlp.submodules.experts = ModuleSpec(module=GroupedExperts)
        # Before experts the norm is a separate module; this gives it one name in all checkpoints.
        layer.submodules.sharded_state_dict_keys_map = {
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"
        }
    return layer


class ZeroCenteredRMSNorm(torch.nn.Module):
    """y = x / rms(x) * (1 + w), computed in fp32 and then rounded to the type of x.

    Source: Root Mean Square Layer Normalization, arXiv 1910.07467, equation 4; Gemma stores the
    gain as its distance from one.
    """

    def __init__(
        self, hidden_size: int, *, eps: float, dtype: torch.dtype, device: torch.device | int | str
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        gain = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.weight.shape, gain, self.eps).to(x.dtype)


class TorchNorm:
    """RMSNorm or LayerNorm of torch, by configuration, ready for sequence parallelism.

    Under sequence parallelism each tensor-parallel rank normalises its tokens, so a weight's
    gradient is a partial sum. Megatron-Core reduces these for parameters marked
    `sequence_parallel`. The constructor returns the torch module itself.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5
    ) -> torch.nn.Module:
        kinds = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        if config.layernorm_zero_centered_gamma:
            assert config.normalization == "RMSNorm", config.normalization
            kinds["RMSNorm"] = ZeroCenteredRMSNorm
        norm = kinds[config.normalization](
            hidden_size,
            eps=eps,
            dtype=config.params_dtype,
            device=torch.cuda.current_device(),
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class TappedLayer(TransformerLayer):
    """A stock layer that passes its output to its tap, if set."""

    tap: LayerTap | None = None

    def __init__(
        self,
        config: TransformerConfig,
        *arguments: Any,
        is_fused: bool = False,
        is_empty: bool = False,
        **named: Any,
    ) -> None:
        super().__init__(fused_config(config) if is_fused else config, *arguments, **named)
        if is_empty:
            for parameter in self.parameters():
                parameter.untyped_storage().resize_(0)

    def forward(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        hidden_sbH, context = super().forward(*arguments, **named)
        call: LayerCall | None = named.get("attention_bias")
        if self.tap is not None and call is not None and call.micro_batch is not None:
            tapped_sbH = self.tap(hidden_sbH, micro_batch=call.micro_batch)
            # Schedules free sent tensors, and refuse to free a view.
            hidden_sbH = make_viewless_tensor(
                tapped_sbH, requires_grad=tapped_sbH.requires_grad, keep_graph=True
            )
        return hidden_sbH, context


def tap_layers(
    chunks: Sequence[GPTModel],
    layers: Mapping[int, LayerTap],
    attentions: Mapping[int, AttentionTap],
) -> None:
    """Set taps on the named layers and attentions of the chunks, numbered from 1."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            layer.tap = layers.get(layer.layer_number)
            layer.self_attention.core_attention.tap = attentions.get(layer.layer_number)
