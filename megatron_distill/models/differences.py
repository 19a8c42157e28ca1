"""In what two architectures are not the same model."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_distill.models.architecture import Architecture

# Padding, regularisation and what was drawn once: another run may choose them anew.
_NOT_THE_MODEL = frozenset(
    {
        "vocab_divisible_by",
        "attention_dropout",
        "hidden_dropout",
        "init_std",
        "moe.aux_loss_coefficient",
    }
)


def architecture_differences(there: Architecture, here: Architecture) -> list[str]:
    """Say in which dotted fields two architectures compute different things."""
    theirs, ours = _flat(there.as_dict()), _flat(here.as_dict())
    return [
        f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here"
        for key in {**ours, **theirs}
        if theirs.get(key) != ours.get(key)
    ]


def _flat(architecture: Mapping[str, object]) -> dict[str, object]:
    """Flatten an architecture to dotted names, less what leaves the model as it is."""
    flat: dict[str, object] = {}
    if architecture["sliding_layers"] == tuple(range(int(str(architecture["num_layers"])))):
        architecture = {**architecture, "sliding_layers": None}  # two ways to say all of them
    for key, value in architecture.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            flat[key] = value
    return {key: value for key, value in flat.items() if key not in _NOT_THE_MODEL}
