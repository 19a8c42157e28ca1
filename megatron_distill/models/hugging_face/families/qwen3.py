"""Qwen 3: norms on queries and keys, and an explicit head size."""

from megatron_distill.models.hugging_face import llama_like as like
from megatron_distill.models.hugging_face.family import Family
from megatron_distill.models.hugging_face.settings import Always, HeadSize, Rope, WindowByLayer

FAMILY = Family(
    model_type="qwen3",
    model_class="Qwen3ForCausalLM",
    settings=(
        *like.DIMENSIONS,
        like.DENSE,
        like.RMS_NORM,
        like.SWIGLU,
        like.NO_ATTENTION_BIAS,
        Always("qk_norm", True),
        HeadSize(),
        Rope(),
        WindowByLayer(switch="use_sliding_window"),
    ),
    tensors={**like.DENSE_LAYERS, **like.QK_NORM},
)
