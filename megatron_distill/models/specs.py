"""Which modules make a layer: Transformer Engine's where it can run, torch's elsewhere.

The core attention is ours in both: documents packed into one sequence need a mask per sequence,
and context parallelism must work on every backend.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.attention import TorchAttention
from megatron_distill.models.layer_kinds import LayerKinds
from megatron_distill.models.norm import TorchNorm
from megatron_distill.models.router import SequenceBalancedRouter
from megatron_distill.models.sublayers import KindAttention, mlp_with_post_norm
from megatron_distill.models.tapped_layer import TappedLayer
from megatron_distill.runtime.groups import Groups


def transformer_engine_runs(device: torch.device) -> bool:
    """Return whether Transformer Engine is installed and the model is on a CUDA device."""
    return device.type == "cuda" and find_spec("transformer_engine") is not None


def layer_specs(
    architecture: Architecture,
    config: TransformerConfig,
    *,
    device: torch.device,
    vp_stage: int | None,
    groups: Groups,
) -> TransformerBlockSubmodules:
    """Return the layers and the final norm that one pipeline stage builds."""
    layer = (
        _transformer_engine_layer(architecture)
        if transformer_engine_runs(device)
        else _torch_layer(architecture, config)
    )
    assert layer.module is TransformerLayer
    layer.module = TappedLayer
    norm = _norm(device)
    post_norm = norm if architecture.post_norms else None
    attention = layer.submodules.self_attention
    attention.module = KindAttention
    attention.params |= {"kinds": LayerKinds.of(architecture), "post_norm": post_norm}
    attention.submodules.core_attention = partial(
        TorchAttention, softcap=architecture.attention_softcap
    )
    if architecture.moe:
        layer.submodules.mlp.submodules.router = SequenceBalancedRouter
    if post_norm is not None:
        assert not architecture.moe
        layer.submodules.mlp = mlp_with_post_norm(
            layer.submodules.mlp.submodules, post_norm, tensor_group=groups.tensor
        )
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=groups.pipeline.rank())
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def _norm(device: torch.device) -> type:
    if not transformer_engine_runs(device):
        return TorchNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _torch_layer(architecture: Architecture, config: TransformerConfig) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=architecture.moe.num_experts if architecture.moe else None,
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
    return layer


def _transformer_engine_layer(architecture: Architecture) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=architecture.moe.num_experts if architecture.moe else None,
        moe_grouped_gemm=False,
        qk_layernorm=architecture.qk_norm,
    )
    if architecture.moe:
        # In front of experts the norm is a module of its own, with one name in all checkpoints.
        layer.submodules.sharded_state_dict_keys_map = {
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"
        }
    return layer
