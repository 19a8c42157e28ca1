"""Qwen 1.5 and 2 with experts: an additional gated expert sees every token."""

from megatron_distill.models.hugging_face import llama_like as like
from megatron_distill.models.hugging_face.family import Family
from megatron_distill.models.hugging_face.mixture import (
    DenseByList,
    Experts,
    SharedWidth,
    expert_rules,
    mlp_rules,
)
from megatron_distill.models.hugging_face.rules import Same
from megatron_distill.models.hugging_face.settings import Field, HeadSize, Rope, WindowByLayer

_OURS, _THEIRS = "decoder.layers.mlp.shared_experts.", f"{like.LAYER}mlp.shared_expert"

FAMILY = Family(
    model_type="qwen2_moe",
    model_class="Qwen2MoeForCausalLM",
    settings=(
        *like.DIMENSIONS,
        like.RMS_NORM,
        like.SWIGLU,
        Field("qkv_bias", "qkv_bias"),
        HeadSize(is_implied=True),
        Rope(),
        WindowByLayer(switch="use_sliding_window"),
        Experts(
            "num_experts",
            "moe_intermediate_size",
            renormalize="norm_topk_prob",
            parts=(DenseByList(), SharedWidth("shared_expert_intermediate_size")),
        ),
    ),
    tensors={
        **like.DENSE_LAYERS,
        **like.QKV_BIAS,
        **expert_rules("mlp", "gate", "gate_proj", "up_proj", "down_proj"),
        **mlp_rules(_OURS, f"{_THEIRS}."),
        f"{_OURS}gate_weight": Same(f"{_THEIRS}_gate.weight"),
    },
    buffers=like.ROTARY_BUFFERS,
)
