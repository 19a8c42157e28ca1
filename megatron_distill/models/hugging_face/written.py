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
from megatron_distill.models.hugging_face.settings import FULL

__all__ = ["written_architecture"]

# Values of `transformers` for entries that published models leave out; None: others decide.
_LIKE_LLAMA: Final = {"head_dim": None, "attention_dropout": 0.0, "tie_word_embeddings": False}
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
}


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
        found["rope_parameters"] = _rope(found)
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
