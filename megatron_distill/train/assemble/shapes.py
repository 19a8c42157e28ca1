"""From a configuration to the shapes of its models; neither torch nor Megatron-Core is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from megatron_distill.config import (
    ArchitectureConfig,
    JobConfig,
    ModelConfig,
    ParallelConfig,
    check_model,
)
from megatron_distill.errors import ConfigError, counted
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.hugging_face.description import ModelDescription, describe
from megatron_distill.runtime.layout import Layout
from megatron_distill.train.checkpoint.description import (
    Description,
    check_same_model,
    resolve_checkpoint,
    saved_architecture,
)

if TYPE_CHECKING:
    from megatron_distill.data.tokenizers.open import Vocabulary

__all__ = ["ModelShape", "evenly_spread", "layout_of", "read_shape"]

_ANY_SIZE: Final = 1 << 15  # of a vocabulary that is not known yet


@dataclass(frozen=True)
class ModelShape:
    """A model's architecture, and the layers of its source that it has; None: all."""

    architecture: Architecture
    keep_layers: tuple[int, ...] | None = None


def layout_of(parallel: ParallelConfig) -> Layout:
    """Translate the parallel sizes."""
    return Layout(**parallel.model_dump(exclude={"layers_per_stage"}))


def read_shape(
    config: JobConfig,
    role: str,
    vocabulary: Vocabulary | None,
    described: ModelDescription | None = None,
) -> ModelShape:
    """Return the shape of a role's model, from descriptions alone.

    `vocabulary` None: not known yet, and compared with nothing. `described` is that of the model's
    `hf`, where it is known. Raises ConfigError or CheckpointError.
    """
    model = config.models[role]
    length = model.sequence_length or config.data.sequence_length
    if model.hf is not None:
        architecture = (described or describe(Path(model.hf).expanduser())).architecture
    elif model.checkpoint is not None:
        architecture = _in_checkpoint(model.checkpoint, model.architecture, vocabulary, length)
    else:
        assert model.architecture is not None, "the rules of the configuration ask for a source"
        size = _ANY_SIZE if vocabulary is None else vocabulary.size
        architecture = Architecture.from_dict(model.architecture.resolved(length, size))
    layers: tuple[int, ...] | None = None
    if model.keep_layers is not None or model.num_layers is not None:
        layers = _copied_layers(model, role, architecture.num_layers)
        architecture = architecture.of_layers(layers)
    if vocabulary is not None and architecture.vocab_size < vocabulary.size:
        raise ConfigError(_too_small(model, role, architecture.vocab_size, vocabulary.size))
    check_model(config, role, architecture.as_dict())
    return ModelShape(architecture, layers)


def _too_small(model: ModelConfig, role: str, size: int, wanted: int) -> str:
    """Return the error for a vocabulary smaller than the tokenizer's, with the key to change."""
    source = "hf" if model.hf is not None else "checkpoint"
    if model.architecture is not None:
        return (
            f"{role}.architecture.vocab_size is {size}, but the tokenizer has {wanted} tokens; set "
            f"it to {wanted} or more"
        )
    return (
        f"{role}.{source} = {getattr(model, source)!r}: its vocabulary has {size} tokens, but the "
        f"tokenizer has {wanted}. Set data.tokenizer.path to the tokenizer of that model, or give "
        f"the model {wanted} rows (`resize_token_embeddings` of transformers)"
    )


def _in_checkpoint(
    checkpoint: str, shape: ArchitectureConfig | None, vocabulary: Vocabulary | None, length: int
) -> Architecture:
    folder = resolve_checkpoint(checkpoint)
    description = Description.read(folder)
    saved = wanted = saved_architecture(description, folder)
    if shape is not None:
        size = max(saved.vocab_size, 0 if vocabulary is None else vocabulary.size)
        wanted = Architecture.from_dict(shape.resolved(length, size))
    tokenizer = description.tokenizer if vocabulary is None else vocabulary.identity
    check_same_model(description, wanted, tokenizer, folder)
    return wanted


def _copied_layers(model: ModelConfig, role: str, available: int) -> tuple[int, ...]:
    """Return the layers to copy; raises ConfigError where the source has fewer."""
    if model.keep_layers is not None:
        if model.keep_layers[-1] >= available:
            raise ConfigError(
                f"{role}.keep_layers = {list(model.keep_layers)}: the source has "
                f"{counted(available, 'layer')}, 0 to {available - 1}, counted from 0"
            )
        return model.keep_layers
    count = model.num_layers
    assert count is not None
    if count > available:
        raise ConfigError(
            f"{role}.num_layers = {count}: the source has only {counted(available, 'layer')}; "
            "lower it"
        )
    return evenly_spread(count, available)


def evenly_spread(count: int, available: int) -> tuple[int, ...]:
    """Return `count` of `available` layers at even distances, including the first and the last."""
    if count == 1:
        return (0,)
    gaps = count - 1
    return tuple((2 * i * (available - 1) + gaps) // (2 * gaps) for i in range(count))
