"""The shape of a GPT, and its translation into Megatron-Core's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from megatron_distill.models.pipeline_stages import StageLayers, even_layers, stage_layers
from megatron_distill.models.user_buffers import TensorOverlap
from megatron_distill.runtime.groups import Layout


@dataclass(frozen=True)
class MixtureOfExperts:
    """Mixture of experts in the feed-forward layers; one auxiliary loss per sequence."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    aux_loss_coefficient: float = 0.0
    renormalize: bool = True  # the chosen experts' probabilities sum to one
    dense_layers: tuple[int, ...] = ()  # from 0, with the model's dense feed-forward instead
    shared_ffn_hidden_size: int | None = None  # of the expert that sees every token; None: none
    shared_gate: bool = False  # the shared expert's output times the sigmoid of a projection
    score: str = "softmax"  # or "sigmoid", each expert by itself
    correction_bias: bool = False  # added to the scores where experts are chosen, not to weights
    bias_update_rate: float = 0.0  # change of that bias per step, towards equal loads
    groups: int | None = None  # of neighbouring experts; a token's experts are in few of them
    groups_per_token: int | None = None
    weight_scale: float = 1.0  # factor of the chosen experts' weights


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the positions of pretraining.

    `linear` divides all of them by `factor`; `llama3` only the low ones, with a smooth transition
    between the wavelengths `original_positions / low_frequency_factor` and `.../high_...`.
    """

    kind: str  # "linear" or "llama3"
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True)
class Architecture:
    """The fields that determine the parameters and the function of a GPT."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int  # rows of the weights; the tokenizer may have fewer tokens
    max_position_embeddings: int
    norm: str = "rmsnorm"
    norm_epsilon: float = 1e-5
    activation: str = "swiglu"
    positions: str = "rope"
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_fraction: float = 1.0  # of each head, from its start
    sliding_window: int | None = None  # keys that a query sees, itself included
    sliding_layers: tuple[int, ...] | None = None  # None: all, where there is a window
    sliding_rope_base: float | None = None  # unscaled, of the sliding layers; None: rope_base
    attention_scalar: float | None = None  # scores are divided by its square root; None: head_size
    attention_softcap: float | None = None
    post_norms: bool = False  # also after attention and feed-forward, before the residual sum
    embedding_scale: float = 1.0
    qkv_bias: bool = False
    linear_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    init_std: float = 0.02
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    vocab_divisible_by: int = 128
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    moe: MixtureOfExperts | None = None

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward has a gate: three matrices instead of two."""
        return _ACTIVATIONS[self.activation].is_gated

    @property
    def has_mixed_layers(self) -> bool:
        """Whether some layers have experts and some a dense feed-forward."""
        return self.moe is not None and bool(self.moe.dense_layers)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers with experts, from 0."""
        if self.moe is None:
            return ()
        return tuple(i for i in range(self.num_layers) if i not in self.moe.dense_layers)

    @property
    def is_zero_centered(self) -> bool:
        """Whether a norm's weight is stored as its distance from one."""
        return self.norm == "zero_centered_rmsnorm"

    @property
    def num_sliding_layers(self) -> int:
        """Layers with the sliding window."""
        if self.sliding_window is None:
            return 0
        return self.num_layers if self.sliding_layers is None else len(set(self.sliding_layers))

    def padded_vocab_size(self, tensor_size: int) -> int:
        """Rows of the embedding over all tensor-parallel ranks: a multiple of the padding unit."""
        unit = self.vocab_divisible_by * tensor_size
        return -(-self.vocab_size // unit) * unit

    def as_dict(self) -> dict[str, object]:
        """Return plain values, for a checkpoint's metadata."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> Architecture:
        """Rebuild an architecture from `as_dict`."""
        fields: dict[str, Any] = dict(values)
        if fields.get("moe"):
            moe = dict(fields["moe"])
            moe["dense_layers"] = tuple(moe.get("dense_layers") or ())
            fields["moe"] = MixtureOfExperts(**moe)
        if fields.get("rope_scaling"):
            fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
        if fields.get("sliding_layers") is not None:
            fields["sliding_layers"] = tuple(fields["sliding_layers"])
        return cls(**fields)


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


@dataclass(frozen=True)
class _Activation:
    function: Callable[[torch.Tensor], torch.Tensor]
    is_gated: bool


_ACTIVATIONS = {
    "swiglu": _Activation(F.silu, is_gated=True),
    "geglu": _Activation(F.gelu, is_gated=True),
    "geglu_tanh": _Activation(_gelu_tanh, is_gated=True),
    "gelu": _Activation(F.gelu, is_gated=False),
    "gelu_tanh": _Activation(_gelu_tanh, is_gated=False),
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
    activation = _ACTIVATIONS[architecture.activation]
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
        activation_func=activation.function,
        gated_linear_unit=activation.is_gated,
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
    return stage_layers(layers, layout.pipeline)


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
        # gloo has no all-to-all.
        "moe_token_dispatcher_type": "alltoall" if on_cuda else "allgather",
        "moe_router_dtype": "fp32",
    }


# Padding, regularisation and initialisation: a further run may change them.
_NOT_THE_MODEL = frozenset(
    {
        "vocab_divisible_by",
        "attention_dropout",
        "hidden_dropout",
        "init_std",
        "moe.aux_loss_coefficient",
        "moe.bias_update_rate",
    }
)


def architecture_differences(there: Architecture, here: Architecture) -> list[str]:
    """Return the differences between two architectures, by dotted field."""
    theirs, ours = model_fields(there), model_fields(here)
    return [
        f"{key} {theirs.get(key)!r} vs {ours.get(key)!r}"
        for key in {**ours, **theirs}
        if theirs.get(key) != ours.get(key)
    ]


def model_fields(architecture: Architecture) -> dict[str, object]:
    """Flatten an architecture to dotted names, without fields that do not change the model."""
    flat: dict[str, object] = {}
    fields = architecture.as_dict()
    if architecture.sliding_layers == tuple(range(architecture.num_layers)):
        fields["sliding_layers"] = None  # two spellings of all layers
    for key, value in fields.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            flat[key] = value
    return {key: value for key, value in flat.items() if key not in _NOT_THE_MODEL}
