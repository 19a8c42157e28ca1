"""Qwen 3 with experts, in every layer or in some."""

from megatron_distill.models.hugging_face import llama_like as like
from megatron_distill.models.hugging_face.family import Family
from megatron_distill.models.hugging_face.mixture import DenseByList, Experts, expert_rules
from megatron_distill.models.hugging_face.settings import (
    Always,
    HeadSize,
    Rope,
    WindowEverywhere,
)

FAMILY = Family(
    model_type="qwen3_moe",
    model_class="Qwen3MoeForCausalLM",
    settings=(
        *like.DIMENSIONS,
        like.RMS_NORM,
        like.SWIGLU,
        like.NO_ATTENTION_BIAS,
        Always("qk_norm", True),
        HeadSize(),
        Rope(),
        WindowEverywhere(switch="use_sliding_window"),
        Experts(
            "num_experts",
            "moe_intermediate_size",
            renormalize="norm_topk_prob",
            parts=(DenseByList(),),
        ),
    ),
    tensors={
        **like.ENDS,
        **like.ATTENTION,
        **like.QK_NORM,
        **like.FEED_FORWARD_NORM,
        **like.FEED_FORWARD,
        **expert_rules("mlp", "gate", "gate_proj", "up_proj", "down_proj"),
    },
    older_entries={"num_experts": "num_local_experts"},
)
