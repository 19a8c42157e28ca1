"""Rules and settings shared by Llama and similar families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.hugging_face.rules import Rule, Same, SplitQKV, Stacked
from megatron_distill.models.hugging_face.settings import (
    Always,
    ConfigEntries,
    Field,
    Fields,
    HeadSize,
    Off,
    RenamedValues,
    Setting,
    WindowByLayer,
)

LAYER = "model.layers.{layer}."
_ATTENTION = "decoder.layers.self_attention."
_MLP = "decoder.layers.mlp."

DIMENSIONS: tuple[Setting, ...] = (
    Field("num_layers", "num_hidden_layers"),
    Field("hidden_size", "hidden_size"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("num_kv_heads", "num_key_value_heads"),
    Field("vocab_size", "vocab_size"),
    Field("max_position_embeddings", "max_position_embeddings"),
    Field("norm_epsilon", "rms_norm_eps"),
    Field("tied_embeddings", "tie_word_embeddings"),
    Field("init_std", "initializer_range"),
    Field("attention_dropout", "attention_dropout"),
)
DENSE = Field("ffn_hidden_size", "intermediate_size")
RMS_NORM = Always("norm", "rmsnorm")
SWIGLU = RenamedValues("activation", "hidden_act", {"silu": "swiglu"})
NO_ATTENTION_BIAS = Off("attention_bias")

ENDS: dict[str, Rule] = {
    "embedding.word_embeddings.weight": Same("model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": Same("model.norm.weight"),
    "output_layer.weight": Same("lm_head.weight"),
}
ATTENTION: dict[str, Rule] = {
    f"{_ATTENTION}linear_qkv.layer_norm_weight": Same(f"{LAYER}input_layernorm.weight"),
    f"{_ATTENTION}linear_qkv.weight": SplitQKV(
        *(f"{LAYER}self_attn.{letter}_proj.weight" for letter in "qkv")
    ),
    f"{_ATTENTION}linear_proj.weight": Same(f"{LAYER}self_attn.o_proj.weight"),
}
QKV_BIAS: dict[str, Rule] = {
    f"{_ATTENTION}linear_qkv.bias": SplitQKV(
        *(f"{LAYER}self_attn.{letter}_proj.bias" for letter in "qkv")
    ),
}
QK_NORM: dict[str, Rule] = {
    f"{_ATTENTION}q_layernorm.weight": Same(f"{LAYER}self_attn.q_norm.weight"),
    f"{_ATTENTION}k_layernorm.weight": Same(f"{LAYER}self_attn.k_norm.weight"),
}
FEED_FORWARD_NORM: dict[str, Rule] = {
    f"{_MLP}linear_fc1.layer_norm_weight": Same(f"{LAYER}post_attention_layernorm.weight"),
}
FEED_FORWARD: dict[str, Rule] = {
    f"{_MLP}linear_fc1.weight": Stacked(
        (f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight")
    ),
    f"{_MLP}linear_fc2.weight": Same(f"{LAYER}mlp.down_proj.weight"),
}
# Norms before and after both attention and feed-forward (Gemma 2, Gemma 3).
SANDWICH_NORMS: dict[str, Rule] = {
    f"{_ATTENTION}post_norm.weight": Same(f"{LAYER}post_attention_layernorm.weight"),
    f"{_MLP}linear_fc1.layer_norm_weight": Same(f"{LAYER}pre_feedforward_layernorm.weight"),
    f"{_MLP}post_norm.weight": Same(f"{LAYER}post_feedforward_layernorm.weight"),
}
DENSE_LAYERS: dict[str, Rule] = {**ENDS, **ATTENTION, **FEED_FORWARD_NORM, **FEED_FORWARD}

# Old checkpoints contain the rotary frequencies, which follow from the configuration.
ROTARY_BUFFERS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


@dataclass(frozen=True)
class EmbeddingScale:
    """Embeddings are multiplied by the square root of their width."""

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        return {"embedding_scale": theirs.hidden_size**0.5}

    def write(self, architecture: Architecture) -> ConfigEntries:  # noqa: ARG002
        """See `Setting`."""
        return {}


@dataclass(frozen=True)
class QueryScalar:
    """The number whose square root divides the attention scores."""

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        scalar = float(theirs.query_pre_attn_scalar)
        is_usual = scalar == HeadSize().read(theirs)["head_size"]
        return {"attention_scalar": None if is_usual else scalar}

    def write(self, architecture: Architecture) -> ConfigEntries:
        """See `Setting`."""
        scalar = architecture.attention_scalar or architecture.head_size
        return {"query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar}


GEMMA_SETTINGS = (
    *DIMENSIONS,
    DENSE,
    NO_ATTENTION_BIAS,
    Off("use_bidirectional_attention"),
    HeadSize(),
    RenamedValues(
        "activation", "hidden_activation", {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu"}
    ),
    Always("norm", "zero_centered_rmsnorm"),
    Always("post_norms", True),
    EmbeddingScale(),
    QueryScalar(),
    WindowByLayer(),
    Field("attention_softcap", "attn_logit_softcapping"),
    Field("logit_softcap", "final_logit_softcapping"),
)
