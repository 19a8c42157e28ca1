"""The architecture of a config.json from its entries alone, without `transformers`.

Its import takes longer than a whole plan. Architectures that do not follow from the entries and
the values below are left to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from megatron_distill.errors import CheckpointError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.hugging_face.family import Family
from megatron_distill.models.hugging_face.settings import FULL, SLIDING, RopeByLayerType

__all__ = ["written_architecture"]

# Values of `transformers` for entries that published models leave out; None: others decide.
_LIKE_LLAMA: Final = {"head_dim": None, "attention_dropout": 0.0, "tie_word_embeddings": False}
_LIKE_GEMMA: Final = {"tie_word_embeddings": True, "use_bidirectional_attention": False}
_UNSAID: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {**_LIKE_LLAMA, "attention_bias": False, "mlp_bias": False},
    "mistral": _LIKE_LLAMA,
    "mixtral": {**_LIKE_LLAMA, "router_jitter_noise": 0.0},
    "qwen2": {**_LIKE_LLAMA, "use_sliding_window": False},
    "qwen2_moe": {
        **_LIKE_LLAMA,
        "use_sliding_window": False,
        "qkv_bias": True,
        "mlp_only_layers": [],
    },
    "qwen3": {"attention_dropout": 0.0, "attention_bias": False, "use_sliding_window": False},
    "phi3": {"head_dim": None},
    "glm4_moe": {"partial_rotary_factor": 0.5, "num_mtp_layers": 1},
    "qwen3_moe": {"attention_dropout": 0.0, "attention_bias": False, "mlp_only_layers": []},
    "gemma2": _LIKE_GEMMA,
    "gemma3_text": _LIKE_GEMMA,
    "gpt2": {
        "n_inner": None,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
}
# Every so many layers one sees all positions, where `layer_types` is not written.
_FULL_EVERY: Final = {"gemma2": 2, "gemma3_text": 6}


class _UnsaidError(Exception):
    """An entry is not there; no AttributeError, for which a setting might take another value."""


class _Written:
    """The entries as attributes, as settings read them from a configuration of `transformers`."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries

    def __getattr__(self, name: str) -> Any:
        if name not in self._entries:
            raise _UnsaidError(name)
        return self._entries[name]


def written_architecture(family: Family, entries: Mapping[str, Any]) -> Architecture | None:
    """Return the architecture of the entries of a config.json.

    None: they leave something to `transformers`, or it has to name what is wrong with them.
    """
    found = {**_UNSAID.get(family.model_type, {}), **entries}
    for present, older in family.older_entries.items():
        if present not in found and older in found:
            found[present] = found[older]
    if found.get("use_sliding_window") is False:
        found["sliding_window"] = None
        found.setdefault("layer_types", [FULL])
    try:
        if family.model_type in _FULL_EVERY and found.get("layer_types") is None:
            found["layer_types"] = _layer_types(found, _FULL_EVERY[family.model_type])
        by_layer_type = any(isinstance(one, RopeByLayerType) for one in family.settings)
        found["rope_parameters"] = _rope_by_layer_type(found) if by_layer_type else _rope(found)
        return family.architecture(_Written(found))
    except (_UnsaidError, CheckpointError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _rope(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `rope_parameters`, from the entries that older files have in their place."""
    given = dict(entries.get("rope_scaling") or entries.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in given.values()):
        return given  # by kinds of layers
    given.setdefault("rope_type", given.get("type", "default"))
    for name in ("rope_theta", "partial_rotary_factor"):
        if entries.get(name) is not None:
            given.setdefault(name, entries[name])
    length = "original_max_position_embeddings"
    if given["rope_type"] != "default" and entries.get(length) is not None:
        raise _UnsaidError(length)  # which of both lengths it takes
    return given


def _rope_by_layer_type(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `rope_parameters` by kinds of layers; older files have only a base of sliding ones."""
    given, scaling = entries.get("rope_parameters"), entries.get("rope_scaling")
    if given is not None and scaling is None:
        return _rope(entries)
    if given is not None or (scaling and "rope_type" not in scaling):
        raise _UnsaidError("rope_scaling")  # which of both it takes, or an older name of its kind
    sliding = {"rope_type": "default", "rope_theta": entries["rope_local_base_freq"]}
    return {FULL: _rope(entries), SLIDING: sliding}


def _layer_types(entries: Mapping[str, Any], full_every: int) -> list[str]:
    """Return the kinds of layers; `full_every`: one of so many sees all positions."""
    if entries.get("sliding_window_pattern", full_every) != full_every:
        raise _UnsaidError("layer_types")
    layers = range(1, entries["num_hidden_layers"] + 1)
    return [SLIDING if layer % full_every else FULL for layer in layers]
