"""Qwen 2 and 2.5: biases on queries, keys and values."""

from megatron_distill.models.hugging_face import llama_like as like
from megatron_distill.models.hugging_face.family import Family
from megatron_distill.models.hugging_face.settings import Always, HeadSize, Rope, WindowByLayer

FAMILY = Family(
    model_type="qwen2",
    model_class="Qwen2ForCausalLM",
    settings=(
        *like.DIMENSIONS,
        like.DENSE,
        like.RMS_NORM,
        like.SWIGLU,
        Always("qkv_bias", True),
        HeadSize(is_implied=True),
        Rope(),
        WindowByLayer(switch="use_sliding_window"),
    ),
    tensors={**like.DENSE_LAYERS, **like.QKV_BIAS},
    buffers=like.ROTARY_BUFFERS,
)
