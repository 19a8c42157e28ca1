"""GPT-2: learned positions, LayerNorm, biases, and matrices stored [in, out]."""

from dataclasses import dataclass
from typing import Any

from megatron_distill.log import get_logger
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.hugging_face.family import Family
from megatron_distill.models.hugging_face.rules import FusedQKV, Rule, Same
from megatron_distill.models.hugging_face.settings import (
    Always,
    ConfigEntries,
    Field,
    Fields,
    Off,
    Only,
    RenamedValues,
)

_LOGGER = get_logger(__name__)
_LAYER = "transformer.h.{layer}."
_ATTENTION = "decoder.layers.self_attention."
_MLP = "decoder.layers.mlp."


@dataclass(frozen=True)
class _Widths:
    """One key and value per query, head size = width / heads, feed-forward of four widths."""

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        return {
            "num_kv_heads": theirs.n_head,
            "head_size": theirs.n_embd // theirs.n_head,
            "ffn_hidden_size": theirs.n_inner or 4 * theirs.n_embd,
        }

    def write(self, architecture: Architecture) -> ConfigEntries:
        """See `Setting`."""
        return {"n_inner": architecture.ffn_hidden_size}


@dataclass(frozen=True)
class _HiddenDropout:
    """One dropout rate after embeddings and sublayers; if two differ, that of the sublayers."""

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        if theirs.embd_pdrop != theirs.resid_pdrop:
            _LOGGER.warning(
                "embd_pdrop %s: embeddings get the rate of resid_pdrop, %s, when this is trained",
                theirs.embd_pdrop,
                theirs.resid_pdrop,
            )
        return {"hidden_dropout": theirs.resid_pdrop}

    def write(self, architecture: Architecture) -> ConfigEntries:
        """See `Setting`."""
        return dict.fromkeys(("embd_pdrop", "resid_pdrop"), architecture.hidden_dropout)


def _both(ours: str, theirs: str) -> dict[str, Rule]:
    """Return the rules of a norm's weight and bias."""
    return {f"{ours}{kind}": Same(f"{theirs}.{kind}") for kind in ("weight", "bias")}


def _linear(ours: str, theirs: str) -> dict[str, Rule]:
    """Return the rules of a linear layer's matrix, stored transposed, and bias."""
    return {
        f"{ours}.weight": Same(f"{theirs}.weight", transposed=True),
        f"{ours}.bias": Same(f"{theirs}.bias"),
    }


FAMILY = Family(
    model_type="gpt2",
    model_class="GPT2LMHeadModel",
    settings=(
        Field("num_layers", "n_layer"),
        Field("hidden_size", "n_embd"),
        Field("num_attention_heads", "n_head"),
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "n_positions"),
        Field("norm_epsilon", "layer_norm_epsilon"),
        Field("tied_embeddings", "tie_word_embeddings"),
        Field("init_std", "initializer_range"),
        Field("attention_dropout", "attn_pdrop"),
        _HiddenDropout(),
        RenamedValues(
            "activation",
            "activation_function",
            {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
        ),
        _Widths(),
        Always("norm", "layernorm"),
        Always("positions", "learned"),
        Always("qkv_bias", True),
        Always("linear_bias", True),
        Only("scale_attn_weights", True),
        Off("scale_attn_by_inverse_layer_idx"),
        Off("add_cross_attention"),
    ),
    tensors={
        "embedding.word_embeddings.weight": Same("transformer.wte.weight"),
        "embedding.position_embeddings.weight": Same("transformer.wpe.weight"),
        **_both(f"{_ATTENTION}linear_qkv.layer_norm_", f"{_LAYER}ln_1"),
        f"{_ATTENTION}linear_qkv.weight": FusedQKV(f"{_LAYER}attn.c_attn.weight", transposed=True),
        f"{_ATTENTION}linear_qkv.bias": FusedQKV(f"{_LAYER}attn.c_attn.bias"),
        **_linear(f"{_ATTENTION}linear_proj", f"{_LAYER}attn.c_proj"),
        **_both(f"{_MLP}linear_fc1.layer_norm_", f"{_LAYER}ln_2"),
        **_linear(f"{_MLP}linear_fc1", f"{_LAYER}mlp.c_fc"),
        **_linear(f"{_MLP}linear_fc2", f"{_LAYER}mlp.c_proj"),
        **_both("decoder.final_layernorm.", "transformer.ln_f"),
        "output_layer.weight": Same("lm_head.weight"),
    },
    prefix="transformer.",
    buffers=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
)
