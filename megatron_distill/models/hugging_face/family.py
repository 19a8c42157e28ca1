"""A family of Hugging Face models: its configuration and its tensors, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from megatron_distill.errors import CheckpointError
from megatron_distill.models.architecture import Architecture, architecture_differences
from megatron_distill.models.hugging_face import families as _modules
from megatron_distill.models.hugging_face.rules import Rule
from megatron_distill.models.hugging_face.settings import (
    Setting,
    check_values,
    config_errors,
    one_line,
)

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Family:
    """One `model_type` of `transformers`.

    tensors: our tensors (`models.parameters`) to the rules of their rows. prefix: of all names but
    the head's; checkpoints of the bare model lack it. buffers: patterns of stored tensors that are
    not weights. older_entries: entry names before `transformers` 5 to the present names.
    has_prediction_layer: checkpoints may have one layer more, which predicts a further token. It is
    left out, as `transformers` does.
    """

    model_type: str
    model_class: str
    settings: tuple[Setting, ...]
    tensors: Mapping[str, Rule]
    prefix: str = "model."
    buffers: tuple[str, ...] = ()
    older_entries: Mapping[str, str] = field(default_factory=dict)
    has_prediction_layer: bool = False

    def architecture(self, config: Any) -> Architecture:
        """Return the architecture that a configuration of `transformers` describes.

        Raises CheckpointError for a value that this library does not compute.
        """
        fields: dict[str, Any] = {}
        for setting in self.settings:
            fields |= setting.read(config)
        architecture = Architecture(**fields)
        check_values(architecture)
        return architecture

    def config(self, architecture: Architecture, carried: Mapping[str, Any]) -> Any:
        """Return the configuration of `transformers` that describes an architecture.

        `carried` are further entries, from the original model. Raises CheckpointError if the family
        cannot express the architecture.
        """
        from transformers import AutoConfig

        # None first: the defaults of `transformers` are the tokens of each family's first models.
        entries: dict[str, Any] = {**dict.fromkeys(SPECIAL_TOKENS), **carried}
        for setting in self.settings:
            entries |= setting.write(architecture)
        try:
            config = AutoConfig.for_model(self.model_type, **entries)
            read = self.architecture(config)
        except CheckpointError as error:
            raise CheckpointError(f"{self.model_type}: {error}") from error
        except config_errors() as error:
            raise CheckpointError(f"{self.model_type}: {one_line(error)}") from error
        differences = architecture_differences(read, architecture)
        if differences:
            raise CheckpointError(
                f"{self.model_type}: the family cannot express this model (config.json vs model): "
                f"{'; '.join(differences)}"
            )
        config.architectures = [self.model_class]
        return config


@cache
def families() -> dict[str, Family]:
    """Return every known family by its `model_type`, in alphabetical order."""
    names = sorted(module.name for module in iter_modules(_modules.__path__))
    found = [import_module(f"{_modules.__name__}.{name}").FAMILY for name in names]
    return {family.model_type: family for family in found}


def family_named(model_type: object, *, where: str) -> Family:
    """Return a family by name; for an unknown one raises CheckpointError with the known ones."""
    known = families()
    if not isinstance(model_type, str) or model_type not in known:
        raise CheckpointError(
            f"{where}: model_type {model_type!r} is not supported; supported are "
            f"{', '.join(known)}. docs/extending/adding_a_model_family.md shows how to add one"
        )
    return known[model_type]
