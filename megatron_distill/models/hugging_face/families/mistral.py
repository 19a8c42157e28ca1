"""Mistral: Llama with a sliding window."""

from megatron_distill.models.hugging_face import llama_like as like
from megatron_distill.models.hugging_face.family import Family
from megatron_distill.models.hugging_face.settings import HeadSize, Rope, WindowEverywhere

FAMILY = Family(
    model_type="mistral",
    model_class="MistralForCausalLM",
    settings=(
        *like.DIMENSIONS,
        like.DENSE,
        like.RMS_NORM,
        like.SWIGLU,
        HeadSize(),
        Rope(),
        WindowEverywhere(),
    ),
    tensors=like.DENSE_LAYERS,
    buffers=like.ROTARY_BUFFERS,
)
