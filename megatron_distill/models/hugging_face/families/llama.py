"""Llama 2, 3, 3.1, 3.2."""

from megatron_distill.models.hugging_face import llama_like as like
from megatron_distill.models.hugging_face.family import Family
from megatron_distill.models.hugging_face.settings import HeadSize, Off, Rope

FAMILY = Family(
    model_type="llama",
    model_class="LlamaForCausalLM",
    settings=(
        *like.DIMENSIONS,
        like.DENSE,
        like.RMS_NORM,
        like.SWIGLU,
        like.NO_ATTENTION_BIAS,
        Off("mlp_bias"),
        HeadSize(),
        Rope(),
    ),
    tensors=like.DENSE_LAYERS,
    buffers=like.ROTARY_BUFFERS,
)
