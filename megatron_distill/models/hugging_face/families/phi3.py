"""Phi 3: queries, keys and values in one matrix, gate and up in another."""

from megatron_distill.models.hugging_face import llama_like as like
from megatron_distill.models.hugging_face.family import Family
from megatron_distill.models.hugging_face.rules import FusedQKV, Same
from megatron_distill.models.hugging_face.settings import (
    Field,
    HeadSize,
    Rope,
    WindowEverywhere,
)

FAMILY = Family(
    model_type="phi3",
    model_class="Phi3ForCausalLM",
    settings=(
        *like.DIMENSIONS,
        like.DENSE,
        like.RMS_NORM,
        like.SWIGLU,
        HeadSize(is_implied=True),
        Rope(may_be_partial=True),
        WindowEverywhere(),
        Field("hidden_dropout", "resid_pdrop"),
    ),
    tensors={
        **like.DENSE_LAYERS,
        "decoder.layers.self_attention.linear_qkv.weight": FusedQKV(
            f"{like.LAYER}self_attn.qkv_proj.weight"
        ),
        "decoder.layers.mlp.linear_fc1.weight": Same(f"{like.LAYER}mlp.gate_up_proj.weight"),
    },
    buffers=like.ROTARY_BUFFERS,
)
