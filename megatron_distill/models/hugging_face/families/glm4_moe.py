"""GLM 4.5 and 4.6: dense first layers; then experts, chosen by sigmoid, and a shared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.hugging_face import llama_like as like
from megatron_distill.models.hugging_face.family import Family
from megatron_distill.models.hugging_face.mixture import (
    DenseFirst,
    Experts,
    SharedCount,
    SigmoidRouting,
    expert_rules,
    mlp_rules,
)
from megatron_distill.models.hugging_face.rules import Same
from megatron_distill.models.hugging_face.settings import (
    ConfigEntries,
    Field,
    Fields,
    HeadSize,
    Only,
    Rope,
)
from megatron_distill.models.parameters import EXPERT_BIAS

_OURS, _THEIRS = "decoder.layers.mlp.", f"{like.LAYER}mlp."


@dataclass(frozen=True)
class PredictionLayers:
    """The number of layers that predict further tokens, which are left out."""

    entry: str

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        getattr(theirs, self.entry)
        return {}

    def write(self, architecture: Architecture) -> ConfigEntries:  # noqa: ARG002
        """See `Setting`."""
        return {self.entry: 0}


FAMILY = Family(
    model_type="glm4_moe",
    model_class="Glm4MoeForCausalLM",
    settings=(
        *like.DIMENSIONS,
        like.RMS_NORM,
        like.SWIGLU,
        Field("qkv_bias", "attention_bias"),
        Field("qk_norm", "use_qk_norm"),
        HeadSize(),
        Rope(may_be_partial=True),
        Only("norm_topk_prob", True),
        Experts(
            "n_routed_experts",
            "moe_intermediate_size",
            parts=(
                DenseFirst("first_k_dense_replace"),
                SharedCount("n_shared_experts", "moe_intermediate_size"),
                SigmoidRouting(),
            ),
        ),
        PredictionLayers("num_mtp_layers"),
    ),
    tensors={
        **like.DENSE_LAYERS,
        **like.QKV_BIAS,
        **like.QK_NORM,
        **expert_rules("mlp", "gate", "gate_proj", "up_proj", "down_proj"),
        f"{_OURS}{EXPERT_BIAS}": Same(f"{_THEIRS}gate.e_score_correction_bias"),
        **mlp_rules(f"{_OURS}shared_experts.", f"{_THEIRS}shared_experts."),
    },
    has_prediction_layer=True,
)
