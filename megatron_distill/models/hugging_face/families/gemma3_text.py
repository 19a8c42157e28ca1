"""Gemma 3, text: Gemma 2 with normalised queries and keys, and two rotary bases."""

from megatron_distill.models.hugging_face import llama_like as like
from megatron_distill.models.hugging_face.family import Family
from megatron_distill.models.hugging_face.llama_like import GEMMA_SETTINGS
from megatron_distill.models.hugging_face.settings import Always, RopeByLayerType

FAMILY = Family(
    model_type="gemma3_text",
    model_class="Gemma3ForCausalLM",
    settings=(*GEMMA_SETTINGS, RopeByLayerType(), Always("qk_norm", True)),
    tensors={
        **like.ENDS,
        **like.ATTENTION,
        **like.QK_NORM,
        **like.SANDWICH_NORMS,
        **like.FEED_FORWARD,
    },
)
