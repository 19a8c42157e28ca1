"""Gemma 2: norms on both sides of each block, soft caps, a sliding window in every second layer."""

from megatron_distill.models.hugging_face import llama_like as like
from megatron_distill.models.hugging_face.family import Family
from megatron_distill.models.hugging_face.llama_like import GEMMA_SETTINGS
from megatron_distill.models.hugging_face.settings import Rope

FAMILY = Family(
    model_type="gemma2",
    model_class="Gemma2ForCausalLM",
    settings=(*GEMMA_SETTINGS, Rope()),
    tensors={**like.ENDS, **like.ATTENTION, **like.SANDWICH_NORMS, **like.FEED_FORWARD},
)
