"""Configurations of `transformers` into architectures and back, for every family."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distill.errors import CheckpointError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.hugging_face.family import families
from tests.distributed.hugging_face_models import MODELS
from tests.distributed.megatron_world import small_architecture

FAMILIES = sorted({model_type for model_type, _ in MODELS.values()})
SLIDING, FULL = "sliding_attention", "full_attention"
# Said by other entries that are compared, or only what the model is called.
DERIVED = {"max_window_layers", "n_inner", "architectures"}

# Entries that change nothing in what a causal language model computes when it is not trained.
NOT_THE_FUNCTION = {
    # what `transformers` returns, keeps or names
    "architectures", "chunk_size_feed_forward", "dtype", "id2label", "is_encoder_decoder",
    "label2id", "output_hidden_states", "output_router_logits", "problem_type", "return_dict",
    "transformers_version", "use_cache",
    # which tokens begin, end and fill up
    "bos_token_id", "eos_token_id", "pad_token_id",
    # the loss, rounding, and a way of cutting matrix products
    "router_aux_loss_coef", "reorder_and_upcast_attn", "pretraining_tp",
    # heads of other tasks
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj",
    # repeated by layer_types, sliding_window or rope_parameters, which are read
    "max_window_layers", "use_sliding_window", "original_max_position_embeddings",
}  # fmt: skip
# A rate that phi3 has an entry for and no module.
WITHOUT_EFFECT = {"phi3": {"embd_pdrop"}}


class Recorder:
    """Passes a configuration on, and remembers which entries were looked at."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.looked_at: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.looked_at.add(name)
        return getattr(self.config, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_entry_is_read_or_known_to_change_nothing(name: str) -> None:
    import transformers

    # An entry that another one switches off is not looked at.
    recorder = Recorder(transformers.AutoConfig.for_model(name, use_sliding_window=True))
    families()[name].architecture(recorder)
    config = type(recorder.config)
    entries = {config.attribute_map.get(f.name, f.name) for f in dataclasses.fields(config)}
    read = {config.attribute_map.get(entry, entry) for entry in recorder.looked_at}
    ignored = NOT_THE_FUNCTION | WITHOUT_EFFECT.get(name, set())
    assert entries - read - ignored == set(), "read them, fix them, or list why they do not matter"


def test_no_entry_is_listed_that_no_family_has() -> None:
    import transformers

    entries: dict[str, set[str]] = {
        name: {f.name for f in dataclasses.fields(type(transformers.AutoConfig.for_model(name)))}
        for name in FAMILIES
    }
    assert set().union(*entries.values()) >= NOT_THE_FUNCTION
    assert all(entries[name] >= ignored for name, ignored in WITHOUT_EFFECT.items())


positive = st.floats(1e-3, 1.0)
rates = st.sampled_from([0.0, 0.1, 0.25])


@st.composite
def rope(draw: st.DrawFn, *, may_be_partial: bool = False) -> dict[str, Any]:
    """Draw rotary positions of a kind that is computed here."""
    parameters: dict[str, Any] = {"rope_theta": draw(st.sampled_from([1e3, 1e4, 5e5]))}
    kind = "default" if may_be_partial else draw(st.sampled_from(["default", "linear", "llama3"]))
    parameters["rope_type"] = kind
    if kind != "default":
        parameters["factor"] = draw(st.sampled_from([2.0, 8.0]))
    if kind == "llama3":
        parameters |= {
            "low_freq_factor": 1.0,
            "high_freq_factor": draw(st.sampled_from([3.0, 4.0])),
        }
        parameters["original_max_position_embeddings"] = draw(st.sampled_from([16, 32]))
    if may_be_partial and draw(st.booleans()):
        parameters["partial_rotary_factor"] = 0.5
    return parameters


@st.composite
def llama_like(draw: st.DrawFn, model_type: str) -> dict[str, Any]:
    """Draw entries of a family after Llama."""
    groups, layers = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    heads = groups * draw(st.integers(1, 3))
    entries: dict[str, Any] = {
        "num_hidden_layers": layers, "num_key_value_heads": groups, "num_attention_heads": heads,
        "hidden_size": heads * 8, "intermediate_size": draw(st.integers(1, 99)),
        "vocab_size": draw(st.integers(3, 999)), "rms_norm_eps": draw(positive),
        "max_position_embeddings": draw(st.integers(64, 99)), "attention_dropout": draw(rates),
        "tie_word_embeddings": draw(st.booleans()), "initializer_range": draw(positive),
        "rope_parameters": draw(rope(may_be_partial=model_type in ("phi3", "glm4_moe"))),
    }  # fmt: skip
    # The published ones have it always; for the others one that follows from the width is left out.
    if model_type in ("qwen3_moe", "glm4_moe") or (model_type != "phi3" and draw(st.booleans())):
        entries["head_dim"] = draw(st.sampled_from([2, 12]))
    if model_type == "phi3":
        entries["resid_pdrop"] = draw(rates)
    if model_type in ("mistral", "mixtral", "phi3", "qwen3_moe"):
        entries["sliding_window"] = draw(st.none() | st.integers(1, 20))
    if model_type == "qwen3_moe":
        entries["use_sliding_window"] = entries["sliding_window"] is not None
    if model_type in ("qwen2", "qwen3", "qwen2_moe", "gemma2", "gemma3_text"):
        kinds = draw(st.lists(st.sampled_from([SLIDING, FULL]), min_size=layers, max_size=layers))
        entries |= {"sliding_window": draw(st.integers(1, 20)), "layer_types": kinds}
    if model_type in ("qwen2", "qwen3", "qwen2_moe"):
        entries["use_sliding_window"] = SLIDING in kinds
    if model_type.startswith("gemma"):
        entries |= draw(gemma(model_type, entries["rope_parameters"]))
    if "moe" in model_type or model_type == "mixtral":
        entries |= draw(mixture(model_type, layers))
    return entries


@st.composite
def mixture(draw: st.DrawFn, model_type: str, layers: int) -> dict[str, Any]:
    """Draw what only models with experts have."""
    experts = draw(st.integers(1, 6))
    names = {"mixtral": "num_local_experts", "glm4_moe": "n_routed_experts"}
    entries = {names.get(model_type, "num_experts"): experts}
    entries["num_experts_per_tok"] = draw(st.integers(1, experts))
    if model_type == "mixtral":
        return entries
    entries["moe_intermediate_size"] = draw(st.integers(1, 50))
    if model_type == "glm4_moe":
        return entries | {
            "first_k_dense_replace": draw(st.integers(0, layers - 1)), "num_mtp_layers": 0,
            "n_shared_experts": draw(st.integers(1, 3)),
            "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
            "use_qk_norm": draw(st.booleans()), "attention_bias": draw(st.booleans()),
        }  # fmt: skip
    dense = draw(st.lists(st.integers(0, layers - 1), unique=True, max_size=layers - 1))
    entries |= {"norm_topk_prob": draw(st.booleans()), "mlp_only_layers": sorted(dense)}
    if model_type == "qwen2_moe":
        entries["shared_expert_intermediate_size"] = draw(st.integers(1, 50))
        entries["qkv_bias"] = draw(st.booleans())
    return entries


@st.composite
def gemma(draw: st.DrawFn, model_type: str, full: dict[str, Any]) -> dict[str, Any]:
    """Draw what only Gemmas have."""
    caps = st.none() | st.sampled_from([10.0, 50.0])
    entries: dict[str, Any] = {
        "attn_logit_softcapping": draw(caps), "final_logit_softcapping": draw(caps),
        "query_pre_attn_scalar": draw(st.integers(1, 99)),
        "hidden_activation": draw(st.sampled_from(["gelu_pytorch_tanh", "gelu"])),
    }  # fmt: skip
    if model_type == "gemma3_text":
        sliding = {"rope_type": "default", "rope_theta": draw(st.sampled_from([1e3, 1e4]))}
        entries["rope_parameters"] = {FULL: full, SLIDING: sliding}
    return entries


@st.composite
def gpt2(draw: st.DrawFn) -> dict[str, Any]:
    """Draw entries of GPT-2."""
    heads, dropout = draw(st.integers(1, 5)), draw(rates)
    return {
        "n_layer": draw(st.integers(1, 5)), "n_head": heads, "n_embd": heads * 8,
        "n_positions": draw(st.integers(1, 99)), "vocab_size": draw(st.integers(3, 999)),
        "n_inner": draw(st.none() | st.integers(1, 99)), "layer_norm_epsilon": draw(positive),
        "tie_word_embeddings": draw(st.booleans()), "initializer_range": draw(positive),
        "attn_pdrop": draw(rates), "resid_pdrop": dropout, "embd_pdrop": dropout,
        "activation_function": draw(st.sampled_from(["gelu_new", "gelu"])),
    }  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_configuration_comes_back_as_it_was(name: str, data: st.DataObject) -> None:
    import transformers

    entries = data.draw(gpt2() if name == "gpt2" else llama_like(name))
    family = families()[name]
    config = transformers.AutoConfig.for_model(name, **entries)
    architecture = family.architecture(config)
    tokens = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    again = family.config(architecture, tokens)
    assert family.architecture(again) == architecture
    assert Architecture.from_dict(architecture.as_dict()) == architecture
    given_entries, exported = config.to_dict(), again.to_dict()
    differing = {
        key for key in given_entries | exported if given_entries.get(key) != exported.get(key)
    }
    assert differing <= DERIVED


def test_heads_turned_in_part_leave_only_as_a_family_that_turns_so() -> None:
    architecture = small_architecture(rotary_fraction=0.5)
    refused = {}
    for name, family in families().items():
        try:
            family.config(architecture, {})
        except CheckpointError as error:
            refused[name] = str(error)
    assert families().keys() - refused.keys() == {"phi3"}  # GLM always has experts
    assert refused["llama"] == (
        "llama: the family cannot express this model (config.json vs model): "
        "rotary_fraction 1.0 vs 0.5"
    )
