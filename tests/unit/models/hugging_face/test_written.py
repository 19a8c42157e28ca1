"""Shapes from the entries of a config.json alone against those that `transformers` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_distill.errors import CheckpointError
from megatron_distill.models.hugging_face.description import describe, describe_for_plan
from megatron_distill.models.hugging_face.family import families
from megatron_distill.models.hugging_face.written import written_architecture
from tests.distributed.hugging_face_models import MODELS

SIZES: dict[str, Any] = {
    "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96,
    "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 6,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "vocab_size": 300,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 32}
GEMMA = {
    "head_dim": 16, "attention_bias": False, "attention_dropout": 0.0, "sliding_window": 8,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16,
}  # fmt: skip
GEMMA_3 = {
    **GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "rope_local_base_freq": 1e4,
}  # fmt: skip
# The entries of published models, older than the present names of `transformers`.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama 3.1": {
        "tie_word_embeddings": True, "mlp_bias": False, "attention_bias": False, "head_dim": 8,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    },
    "llama, linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "mistral": {"sliding_window": 32, "tie_word_embeddings": False},
    "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"partial_rotary_factor": 0.5, "sliding_window": None, "tie_word_embeddings": False,
             "original_max_position_embeddings": 64, "resid_pdrop": 0.0, "attention_dropout": 0.0},
    "qwen2": {"sliding_window": 64, "max_window_layers": 4, "use_sliding_window": False,
              "tie_word_embeddings": True},
    "qwen2_moe": {"num_experts": 4, "decoder_sparse_step": 1, "sliding_window": 64,
                  "shared_expert_intermediate_size": 48, "use_sliding_window": False,
                  "max_window_layers": 4, **EXPERTS},
    "qwen3": {"head_dim": 32, "sliding_window": None, "use_sliding_window": False,
              "tie_word_embeddings": True, "attention_bias": False, "rope_scaling": None},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "decoder_sparse_step": 2,
                  "sliding_window": None, "use_sliding_window": False, "mlp_only_layers": [1],
                  "tie_word_embeddings": False, **EXPERTS},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {**GEMMA_3, "rope_scaling": None, "sliding_window_pattern": 6},
    "gemma3_text, linear": {**GEMMA_3, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "gpt2": {"activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
             "layer_norm_epsilon": 1e-5, "n_ctx": 128, "n_embd": 64, "n_head": 4, "n_layer": 6,
             "n_positions": 128, "resid_pdrop": 0.1},
    "glm4_moe": {"attention_bias": True, "attention_dropout": 0.0, "head_dim": 16,
                 "partial_rotary_factor": 0.5, "n_group": 1, "topk_group": 1, "rope_scaling": None,
                 "n_routed_experts": 8, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
                 "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "use_qk_norm": True,
                 "tie_word_embeddings": False, **EXPERTS},
}  # fmt: skip
# Models whose entries leave the shape to `transformers`.
DERIVED: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},  # the size of a head
    "qwen2": {"sliding_window": 8, "max_window_layers": 2, "use_sliding_window": True},
    "llama": {"num_key_value_heads": None},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},  # heads, scores
    "gemma3_text": {**GEMMA_3, "rope_scaling": None, "sliding_window_pattern": 3},
    "glm4_moe": {"n_routed_experts": 8, "first_k_dense_replace": 1, **EXPERTS},
}


def folder_of(tmp_path: Path, entries: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(entries))
    return tmp_path


def written(folder: Path) -> Any:
    entries = json.loads((folder / "config.json").read_text())
    return written_architecture(families()[entries["model_type"]], entries)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_entries_give_the_shape_without_transformers(tmp_path: Path, name: str) -> None:
    kind = name.partition(" ")[0].strip(",")
    folder = folder_of(tmp_path, {**SIZES, **PUBLISHED[name], "model_type": kind})
    assert written(folder) == describe(folder).architecture


@pytest.mark.parametrize("name", MODELS)
def test_entries_that_transformers_writes_give_the_same_shape(tmp_path: Path, name: str) -> None:
    import transformers

    kind, settings = MODELS[name]
    transformers.AutoConfig.for_model(kind, **settings).save_pretrained(tmp_path)
    assert written(tmp_path) == describe(tmp_path).architecture


@pytest.mark.parametrize("name", DERIVED)
def test_shapes_beyond_the_entries_are_left_to_transformers(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, {**SIZES, **DERIVED[name], "model_type": name})
    assert written(folder) is None
    assert describe_for_plan(folder) == describe(folder)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
    ],
)
def test_wrong_entries_are_named_as_for_a_model_that_is_built(
    tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    folder = folder_of(tmp_path, {**SIZES, "model_type": "llama", **entries})
    with pytest.raises(CheckpointError, match=message) as planned:
        describe_for_plan(folder)
    with pytest.raises(CheckpointError) as built:
        describe(folder)
    assert str(planned.value) == str(built.value)
