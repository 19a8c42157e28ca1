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
    theirs, ours = model_fields(there), model_fields(here)
    return [
        f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here"
        for key in {**ours, **theirs}
        if theirs.get(key) != ours.get(key)
    ]


def model_fields(architecture: Architecture) -> dict[str, object]:
    """Flatten an architecture to dotted names, less what leaves the model as it is."""
    flat: dict[str, object] = {}
    fields = architecture.as_dict()
    if architecture.sliding_layers == tuple(range(architecture.num_layers)):
        fields["sliding_layers"] = None  # two ways to say all of them
    for key, value in fields.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            flat[key] = value
    return {key: value for key, value in flat.items() if key not in _NOT_THE_MODEL}
