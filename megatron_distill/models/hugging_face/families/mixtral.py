"""Mixtral: experts in every layer; the weights of the chosen experts sum to one."""

from megatron_distill.models.hugging_face import llama_like as like
from megatron_distill.models.hugging_face.family import Family
from megatron_distill.models.hugging_face.mixture import Experts, expert_rules
from megatron_distill.models.hugging_face.settings import (
    HeadSize,
    Off,
    Rope,
    WindowEverywhere,
)

FAMILY = Family(
    model_type="mixtral",
    model_class="MixtralForCausalLM",
    settings=(
        *like.DIMENSIONS,
        like.RMS_NORM,
        like.SWIGLU,
        HeadSize(is_implied=True),
        Rope(),
        WindowEverywhere(),
        Experts("num_local_experts", "intermediate_size"),
        Off("router_jitter_noise"),
    ),
    tensors={
        **like.ENDS,
        **like.ATTENTION,
        **like.FEED_FORWARD_NORM,
        **expert_rules("block_sparse_moe", "gate", "w1", "w3", "w2"),
    },
    buffers=like.ROTARY_BUFFERS,
)
