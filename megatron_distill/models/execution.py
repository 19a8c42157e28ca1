"""Settings of a model's computation, and its translation into Megatron-Core's configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.pipeline_stages import even_layers
from megatron_distill.models.stage_table import StageLayers, layer_table
from megatron_distill.models.user_buffers import TensorOverlap
from megatron_distill.runtime.layout import Layout

__all__ = ["Execution", "Fp8", "Recompute", "WeightShards", "transformer_config"]


@dataclass(frozen=True)
class Recompute:
    """Activations to recompute in the backward pass.

    Attributes:
        modules: of every layer, "attention", "mlp" or "layernorm".
        layers: number of whole layers of each stage, from its first; None: all of them, 0: none.
    """

    modules: tuple[str, ...] = ()
    layers: int | None = 0

    @classmethod
    def of(
        cls, setting: str, modules: Sequence[str] = ("attention",), layers: int | None = None
    ) -> Recompute:
        """Translate `train.recompute` and its two further keys."""
        if setting == "full":
            return cls(layers=layers)
        return cls(tuple(modules) if setting == "selective" else ())

    def fields(self, architecture: Architecture) -> dict[str, object]:
        """Return Megatron-Core's fields."""
        if self.layers is None:
            return {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        if self.layers:
            return {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": self.layers,
            }
        feed_forward = ["mlp"] if architecture.moe is None else ["moe"]
        if architecture.has_mixed_layers:
            feed_forward = ["moe", "mlp"]
        names = {"attention": ["core_attn"], "mlp": feed_forward, "layernorm": ["layernorm"]}
        chosen = [name for module in self.modules for name in names[module]]
        if not chosen:
            return {}
        return {"recompute_granularity": "selective", "recompute_modules": chosen}


@dataclass(frozen=True)
class Fp8:
    """The number format of matrix products, "e4m3" or "hybrid", and the key that sets it."""

    format: str
    key: str


@dataclass(frozen=True)
class WeightShards:
    """The layers' weights of a frozen model are sharded over its data-parallel ranks.

    rest_on_host: the shards are in host memory, and copied to the device for each forward pass.
    """

    rest_on_host: bool = False


@dataclass(frozen=True)
class Execution:
    """Settings of computation that do not change the model's function."""

    dtype: torch.dtype
    device: torch.device
    recompute: Recompute = field(default_factory=lambda: Recompute())
    fp8: Fp8 | None = None
    # Layers of each pipeline stage, virtual stages in the order of the forward pass; None: even.
    layers_per_stage: tuple[int, ...] | None = None
    weight_shards: WeightShards | None = None
    tensor_overlap: TensorOverlap | None = None  # None: tensor-parallel messages are waited for


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return GELU by its tanh approximation (arXiv 1606.08415, section 2)."""
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": _gelu_tanh,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
}


_NORMS = {
    "rmsnorm": "RMSNorm",
    "layernorm": "LayerNorm",
    "zero_centered_rmsnorm": "RMSNorm",
}


def _unchanged(weight: torch.Tensor) -> torch.Tensor:
    """Leave a weight unchanged: `initialise` fills it, by name and not by layout."""
    return weight


def transformer_config(
    architecture: Architecture, layout: Layout, execution: Execution
) -> TransformerConfig:
    """Translate an architecture, a layout and an execution into Megatron-Core's configuration."""
    on_cuda = execution.device.type == "cuda"
    # Upstream frees a sent tensor once the send is queued: safe with CUDA streams, not with gloo.
    overlap_p2p = on_cuda and layout.virtual_pipeline is not None
    # A dense teacher beside a student with experts has no expert ranks.
    expert = layout.expert if architecture.moe else 1
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_size,
        softmax_scale=(
            None if architecture.attention_scalar is None else architecture.attention_scalar**-0.5
        ),
        normalization=_NORMS[architecture.norm],
        layernorm_zero_centered_gamma=architecture.is_zero_centered,
        layernorm_epsilon=architecture.norm_epsilon,
        activation_func=_ACTIVATIONS[architecture.activation],
        gated_linear_unit=architecture.is_gated,
        add_bias_linear=architecture.linear_bias,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        attention_dropout=architecture.attention_dropout,
        hidden_dropout=architecture.hidden_dropout,
        init_method=_unchanged,
        output_layer_init_method=_unchanged,
        init_method_std=architecture.init_std,
        embedding_init_method=_unchanged,
        params_dtype=execution.dtype,
        pipeline_dtype=execution.dtype,
        bf16=execution.dtype is torch.bfloat16,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        pipeline_model_parallel_layout=_stage_layers(architecture, layout, execution),
        context_parallel_size=layout.context,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1 if expert > 1 else layout.tensor,
        sequence_parallel=layout.sequence,
        tp_comm_overlap=execution.tensor_overlap is not None and layout.tensor > 1,
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=overlap_p2p,
        # Batched, two messages between the same two stages are matched in the wrong order.
        batch_p2p_comm=False,
        **_arithmetic(architecture, execution),
        **execution.recompute.fields(architecture),
        **_expert_fields(architecture, on_cuda=on_cuda),
    )


def _arithmetic(architecture: Architecture, execution: Execution) -> dict[str, object]:
    """Return the fields of fusions and of FP8.

    Fusions are compiled or CUDA kernels; on the host the unfused functions run.
    """
    on_cuda = execution.device.type == "cuda"
    return {
        # Upstream's fused GELUs are always the tanh approximation.
        "bias_activation_fusion": on_cuda and architecture.activation == "swiglu",
        "bias_dropout_fusion": on_cuda,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "fp8": execution.fp8.format if execution.fp8 else None,
        # Scales of the present tensors: no history, so nothing of it is in a checkpoint.
        "fp8_recipe": "tensorwise",
    }


def _stage_layers(
    architecture: Architecture, layout: Layout, execution: Execution
) -> StageLayers | None:
    layers = execution.layers_per_stage or even_layers(architecture.num_layers, layout.stages)
    assert sum(layers) == architecture.num_layers, (layers, architecture.num_layers)
    assert len(layers) == layout.stages, (layers, layout)
    return layer_table(layers, layout.pipeline)


def _expert_fields(architecture: Architecture, *, on_cuda: bool) -> dict[str, object]:
    moe = architecture.moe
    if moe is None:
        return {}
    assert moe.score == "softmax" or moe.renormalize or moe.top_k == 1
    if architecture.has_mixed_layers:
        has_experts = set(architecture.expert_layers)
        layers = {"moe_layer_freq": [int(i in has_experts) for i in range(architecture.num_layers)]}
    else:
        layers = {}
    return {
        **layers,
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.score,
        # Softmax before top-k: probabilities over all experts. After it: over the chosen experts.
        "moe_router_pre_softmax": not moe.renormalize,
        "moe_router_enable_expert_bias": moe.correction_bias,
        "moe_router_bias_update_rate": moe.bias_update_rate,
        "moe_router_num_groups": moe.groups,
        "moe_router_group_topk": moe.groups_per_token,
        "moe_router_topk_scaling_factor": None if moe.weight_scale == 1.0 else moe.weight_scale,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_aux_loss_coeff": moe.aux_loss_coefficient,
        # Per sequence: the only form independent of micro-batches and data-parallel ranks.
        "moe_router_load_balancing_type": ("seq_aux_loss" if moe.aux_loss_coefficient else "none"),
        # Upstream's exchange takes its sizes from a GPU only.
        "moe_token_dispatcher_type": "alltoall" if on_cuda else "allgather",
        "moe_router_dtype": "fp32",
    }
