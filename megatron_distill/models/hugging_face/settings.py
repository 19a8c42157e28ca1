"""Conversion between entries of a Hugging Face configuration and fields of our architecture.

A setting reads its fields from a configuration of `transformers`, and writes the equivalent
entries. A family is a tuple of settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_distill.errors import CheckpointError
from megatron_distill.models.architecture import Architecture, RopeScaling

Fields = dict[str, Any]
ConfigEntries = dict[str, Any]

SLIDING, FULL = "sliding_attention", "full_attention"


class Setting(Protocol):
    """Some fields of the architecture and their entries of config.json."""

    def read(self, theirs: Any) -> Fields:
        """Return fields of `Architecture`; raises CheckpointError for unsupported values."""
        ...

    def write(self, architecture: Architecture) -> ConfigEntries:
        """Return entries of the configuration."""
        ...


@dataclass(frozen=True)
class Field:
    """An entry with the same values as a field."""

    field: str
    entry: str

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        return {self.field: getattr(theirs, self.entry)}

    def write(self, architecture: Architecture) -> ConfigEntries:
        """See `Setting`."""
        return {self.entry: getattr(architecture, self.field)}


@dataclass(frozen=True)
class RenamedValues:
    """An entry whose values have other names here."""

    field: str
    entry: str
    values: Mapping[str, str]  # theirs to ours; the first of several is written

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        value = getattr(theirs, self.entry)
        if value not in self.values:
            known = ", ".join(map(repr, self.values))
            raise CheckpointError(f"{self.entry} is {value!r}; supported: {known}")
        return {self.field: self.values[value]}

    def write(self, architecture: Architecture) -> ConfigEntries:
        """See `Setting`."""
        wanted = getattr(architecture, self.field)
        spelled = [value for value, ours in self.values.items() if ours == wanted]
        return {self.entry: spelled[0]} if spelled else {}


@dataclass(frozen=True)
class Always:
    """A field with the same value in every model of the family."""

    field: str
    value: Any

    def read(self, theirs: Any) -> Fields:  # noqa: ARG002
        """See `Setting`."""
        return {self.field: self.value}

    def write(self, architecture: Architecture) -> ConfigEntries:  # noqa: ARG002
        """See `Setting`."""
        return {}


@dataclass(frozen=True)
class Only:
    """An entry with one supported value."""

    entry: str
    value: Any

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        found = getattr(theirs, self.entry, self.value)
        if found != self.value:
            raise CheckpointError(f"{self.entry} is {found!r}; supported: {self.value!r}")
        return {}

    def write(self, architecture: Architecture) -> ConfigEntries:  # noqa: ARG002
        """See `Setting`."""
        return {self.entry: self.value}


@dataclass(frozen=True)
class Off:
    """An entry that must be off: it enables an unsupported feature."""

    entry: str

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        found = getattr(theirs, self.entry, None)
        if found:
            raise CheckpointError(f"{self.entry} is {found!r}, which is not supported")
        return {}

    def write(self, architecture: Architecture) -> ConfigEntries:  # noqa: ARG002
        """See `Setting`."""
        return {}


@dataclass(frozen=True)
class HeadSize:
    """The head size: hidden size / heads unless an entry sets it.

    is_implied: the entry is written only if it differs from that, as in the family's models.
    """

    is_implied: bool = False

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        given = getattr(theirs, "head_dim", None)
        return {"head_size": given or theirs.hidden_size // theirs.num_attention_heads}

    def write(self, architecture: Architecture) -> ConfigEntries:
        """See `Setting`."""
        usual = architecture.hidden_size // architecture.num_attention_heads
        if self.is_implied and architecture.head_size == usual:
            return {}
        return {"head_dim": architecture.head_size}


def read_rope(parameters: Mapping[str, Any], *, may_be_partial: bool = False) -> Fields:
    """Return the rotary fields of standardised `rope_parameters`; raises CheckpointError.

    Most families rotate whole heads and ignore `partial_rotary_factor`.
    """
    kind = parameters["rope_type"]
    fraction = float(parameters.get("partial_rotary_factor", 1.0))
    if fraction != 1.0 and not may_be_partial:
        raise CheckpointError(
            f"partial_rotary_factor is {fraction}; this family rotates whole heads: remove it"
        )
    fields: Fields = {
        "rope_base": float(parameters["rope_theta"]),
        "rotary_fraction": fraction,
    }
    if kind == "default":
        return fields
    if kind == "linear":
        scaling = RopeScaling("linear", float(parameters["factor"]))
    elif kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            factor=float(parameters["factor"]),
            low_frequency_factor=float(parameters["low_freq_factor"]),
            high_frequency_factor=float(parameters["high_freq_factor"]),
            original_positions=int(parameters["original_max_position_embeddings"]),
        )
    else:
        raise CheckpointError(f"rope_type is {kind!r}; supported: 'default', 'linear' and 'llama3'")
    return {**fields, "rope_scaling": scaling}


def write_rope(architecture: Architecture, *, may_be_partial: bool = False) -> dict[str, Any]:
    """Return `rope_parameters` of an architecture, as `transformers` 5 writes them."""
    parameters: dict[str, Any] = {"rope_theta": architecture.rope_base, "rope_type": "default"}
    if architecture.rotary_fraction != 1.0 and may_be_partial:
        parameters["partial_rotary_factor"] = architecture.rotary_fraction
    scaling = architecture.rope_scaling
    if scaling is not None:
        parameters |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            parameters |= {
                "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
                "original_max_position_embeddings": scaling.original_positions,
            }
    return parameters


@dataclass(frozen=True)
class Rope:
    """Rotary positions, the same in every layer; `may_be_partial` allows a part of each head."""

    may_be_partial: bool = False

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        return read_rope(theirs.rope_parameters, may_be_partial=self.may_be_partial)

    def write(self, architecture: Architecture) -> ConfigEntries:
        """See `Setting`."""
        rope = write_rope(architecture, may_be_partial=self.may_be_partial)
        return {"rope_parameters": rope}


@dataclass(frozen=True)
class RopeByLayerType:
    """Separate rotary positions for sliding layers, never scaled there (Gemma 3)."""

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        sliding = read_rope(theirs.rope_parameters[SLIDING])
        if sliding.get("rope_scaling") is not None:
            raise CheckpointError(
                f"rope_parameters.{SLIDING} is scaled; this library scales full layers only"
            )
        full = read_rope(theirs.rope_parameters[FULL])
        return {**full, "sliding_rope_base": sliding["rope_base"]}

    def write(self, architecture: Architecture) -> ConfigEntries:
        """See `Setting`."""
        base = architecture.sliding_rope_base or architecture.rope_base
        return {
            "rope_parameters": {
                FULL: write_rope(architecture),
                SLIDING: {"rope_theta": base, "rope_type": "default"},
            }
        }


@dataclass(frozen=True)
class WindowEverywhere:
    """One sliding window for all layers, or none; `switch` names the entry that enables it."""

    switch: str | None = None

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        is_on = self.switch is None or getattr(theirs, self.switch)
        return {"sliding_window": theirs.sliding_window if is_on else None}

    def write(self, architecture: Architecture) -> ConfigEntries:
        """See `Setting`."""
        window = architecture.sliding_window
        entries: ConfigEntries = {"sliding_window": window}
        return entries | ({self.switch: window is not None} if self.switch else {})


@dataclass(frozen=True)
class WindowByLayer:
    """A sliding window for the layers that `layer_types` names; `switch` as above."""

    switch: str | None = None

    def read(self, theirs: Any) -> Fields:
        """See `Setting`."""
        unknown = set(theirs.layer_types) - {SLIDING, FULL}
        if unknown:
            raise CheckpointError(
                f"layer_types has {sorted(unknown)}; supported: {SLIDING!r}, {FULL!r}"
            )
        sliding = tuple(i for i, kind in enumerate(theirs.layer_types) if kind == SLIDING)
        if not theirs.sliding_window:  # Qwen2-MoE writes 0
            return {}
        everywhere = len(sliding) == theirs.num_hidden_layers
        return {
            "sliding_window": theirs.sliding_window,
            "sliding_layers": None if everywhere else sliding,
        }

    def write(self, architecture: Architecture) -> ConfigEntries:
        """See `Setting`."""
        window, layers = architecture.sliding_window, architecture.sliding_layers
        sliding = range(architecture.num_layers) if layers is None else layers
        kinds = [
            SLIDING if window is not None and layer in sliding else FULL
            for layer in range(architecture.num_layers)
        ]
        entries: ConfigEntries = {"sliding_window": window, "layer_types": kinds}
        if self.switch:
            entries[self.switch] = window is not None
        if self.switch and SLIDING in kinds:
            entries["max_window_layers"] = kinds.index(SLIDING)
        return entries


_COUNTS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_kv_heads",
    "head_size",
    "vocab_size",
    "max_position_embeddings",
)


def config_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of `transformers` for invalid configuration values."""
    from huggingface_hub.errors import StrictDataclassError

    return (
        StrictDataclassError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
        OSError,
    )


def one_line(error: Exception) -> str:
    """Return the multi-line message of an error of `transformers` as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def check_values(architecture: Architecture) -> None:
    """Raise CheckpointError for impossible sizes."""
    for name in _COUNTS:
        _check_count(name, getattr(architecture, name))
    heads, groups = architecture.num_attention_heads, architecture.num_kv_heads
    if heads % groups:
        raise CheckpointError(
            f"num_attention_heads = {heads} is not a multiple of num_kv_heads = {groups}"
        )
    if architecture.sliding_window is not None:
        _check_count("sliding_window", architecture.sliding_window)
    moe = architecture.moe
    if moe is not None:
        for name in ("num_experts", "top_k", "ffn_hidden_size"):
            _check_count(f"moe.{name}", getattr(moe, name))
        if moe.shared_ffn_hidden_size is not None:
            _check_count("moe.shared_ffn_hidden_size", moe.shared_ffn_hidden_size)
        if moe.top_k > moe.num_experts:
            raise CheckpointError(
                f"{moe.top_k} experts per token, but there are only {moe.num_experts}"
            )
        if not architecture.expert_layers:
            raise CheckpointError(
                f"all {architecture.num_layers} layers are dense, none has experts"
            )


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{name} is {value!r}; it must be an integer of at least 1")
