"""Where a model comes from: its shape, and the weights that it starts with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from megatron_distill.config import ArchitectureConfig, JobConfig, ModelConfig, check_architecture
from megatron_distill.errors import CheckpointError, ConfigError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.gpt import HiddenStateGPT
from megatron_distill.models.hugging_face.families import family_named
from megatron_distill.models.hugging_face.model import (
    HuggingFaceWeights,
    ModelDescription,
    describe,
)
from megatron_distill.models.weights import WeightSource, fill
from megatron_distill.runtime.collectives import together
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.assemble_tokenizer import Vocabulary
from megatron_distill.train.checkpoint import Description, resolve_checkpoint
from megatron_distill.train.checkpoint_weights import CheckpointWeights
from megatron_distill.train.run_state import check_same_model, saved_architecture


@dataclass(frozen=True)
class Origin:
    """What a model is, and how its weights are found; `open_weights` None: they are random."""

    architecture: Architecture
    open_weights: Callable[[], WeightSource] | None = None
    keep_layers: tuple[int, ...] | None = None

    def fill(self, chunks: Sequence[HiddenStateGPT], groups: Groups) -> None:
        """Read this rank's slices of the weights; raises CheckpointError on all ranks."""
        assert self.open_weights is not None
        with together():
            fill(chunks, self.open_weights(), groups=groups, keep_layers=self.keep_layers)


def find_origin(model: ModelConfig, role: str, config: JobConfig, vocabulary: Vocabulary) -> Origin:
    """Return where the model of a section comes from, its architecture fit for this run.

    Raises ConfigError or CheckpointError on all ranks: nothing there, another tokenizer, a
    vocabulary smaller than the tokenizer's, or a shape that this layout cannot hold.

    Collective: world, short objects.
    """
    if model.hf is None:
        with together():
            return read_origin(model, role, config, vocabulary)
    described = _described_on_first_rank(Path(model.hf).expanduser())
    with together():
        return _fitted(_from_hugging_face(model.hf, described), model, role, config, vocabulary)


def read_origin(model: ModelConfig, role: str, config: JobConfig, vocabulary: Vocabulary) -> Origin:
    """Return what `find_origin` does, in a process that needs no world.

    Raises ConfigError or CheckpointError. Of a vocabulary that is not known nothing is compared.
    """
    if model.hf is not None:
        folder = Path(model.hf).expanduser()
        origin = _from_hugging_face(model.hf, _described_and_checked(folder))
    elif model.checkpoint is not None:
        origin = _from_checkpoint(model, config, vocabulary)
    elif model.architecture is not None:
        origin = Origin(_described(model.architecture, config, vocabulary.size))
    else:
        raise ConfigError(
            f"{role} has no source; give {role}.hf, {role}.architecture or {role}.checkpoint"
        )
    return _fitted(origin, model, role, config, vocabulary)


def _fitted(
    origin: Origin, model: ModelConfig, role: str, config: JobConfig, vocabulary: Vocabulary
) -> Origin:
    """Return the origin with the layers that are kept; raises ConfigError if it does not fit."""
    if model.keep_layers is not None or model.num_layers is not None:
        origin = _shallower(origin, _kept(model, role, origin.architecture.num_layers))
    architecture = origin.architecture
    if vocabulary.is_known and architecture.vocab_size < vocabulary.size:
        raise ConfigError(_too_small(model, role, architecture.vocab_size, vocabulary.size))
    shape = ArchitectureConfig.model_validate(architecture.as_dict())
    problems = check_architecture(shape, role, config.parallel, config.data.sequence_length)
    if problems:
        raise ConfigError("\n".join(problems))
    return origin


def _too_small(model: ModelConfig, role: str, size: int, wanted: int) -> str:
    """Say of a vocabulary smaller than the tokenizer's which key there is to change."""
    source = "hf" if model.hf is not None else "checkpoint"
    if model.architecture is not None:
        return (
            f"{role}.architecture.vocab_size is {size}, but the tokenizer has {wanted} tokens; set "
            f"it to {wanted} or more"
        )
    return (
        f"{role}.{source} = {getattr(model, source)!r}: its vocabulary has {size} tokens, but the "
        f"tokenizer has {wanted}; set data.tokenizer.path to the tokenizer of that model"
    )


def _described_and_checked(folder: Path) -> ModelDescription:
    """Read config.json and every file's header."""
    described = describe(folder)
    HuggingFaceWeights(folder, described).check()
    return described


def _described_on_first_rank(folder: Path) -> ModelDescription:
    """Read a folder's description on one rank; all others take its word."""
    said: list[tuple[str, dict[str, object]] | None] = [None]
    with together():
        if dist.get_rank() == 0:
            described = _described_and_checked(folder)
            said = [(described.family.model_type, described.architecture.as_dict())]
    dist.broadcast_object_list(said, src=0)
    assert said[0] is not None
    model_type, fields = said[0]
    family = family_named(model_type, where=str(folder))
    return ModelDescription(family, Architecture.from_dict(fields))


def _from_hugging_face(source: str, described: ModelDescription) -> Origin:
    folder = Path(source).expanduser()
    return Origin(described.architecture, lambda: HuggingFaceWeights(folder, described))


def _from_checkpoint(model: ModelConfig, config: JobConfig, vocabulary: Vocabulary) -> Origin:
    assert model.checkpoint is not None
    folder = resolve_checkpoint(model.checkpoint)
    description = Description.read(folder)
    saved = saved_architecture(description, folder)
    wanted, identity = saved, vocabulary.identity
    if model.architecture is not None:
        size = vocabulary.size if vocabulary.is_known else saved.vocab_size
        wanted = _described(model.architecture, config, size)
    if not vocabulary.is_known:
        identity = description.tokenizer
    check_same_model(description, wanted, identity, folder)
    return Origin(wanted, lambda: CheckpointWeights(folder, saved))


def _described(described: ArchitectureConfig, config: JobConfig, vocab_size: int) -> Architecture:
    """Return the architecture of a section, `vocab_size` where it names none."""
    fields = described.model_dump()
    moe = fields["moe"]
    if moe is not None:
        moe["ffn_hidden_size"] = moe["ffn_hidden_size"] or described.ffn_hidden_size
    heads = described.num_attention_heads
    defaults = {
        "num_kv_heads": heads,
        "head_size": described.hidden_size // heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": config.data.sequence_length,
    }
    for name, value in defaults.items():
        if fields[name] is None:
            fields[name] = value
    return Architecture.from_dict(fields)


def _kept(model: ModelConfig, role: str, available: int) -> tuple[int, ...]:
    """Return the layers to keep; raises ConfigError where the source has fewer."""
    if model.keep_layers is not None:
        if model.keep_layers[-1] >= available:
            raise ConfigError(
                f"{role}.keep_layers = {list(model.keep_layers)}: the source has {available} "
                f"layers, 0 to {available - 1}"
            )
        return model.keep_layers
    count = model.num_layers
    assert count is not None
    if count > available:
        raise ConfigError(
            f"{role}.num_layers = {count}: the source has {available} layers; keep at most these"
        )
    return evenly_spread(count, available)


def evenly_spread(count: int, available: int) -> tuple[int, ...]:
    """Return `count` of `available` layers at even distances, the first and the last among them."""
    if count == 1:
        return (0,)
    gaps = count - 1
    return tuple((2 * i * (available - 1) + gaps) // (2 * gaps) for i in range(count))


def _shallower(origin: Origin, kept: tuple[int, ...]) -> Origin:
    if origin.open_weights is None:
        raise CheckpointError("layers can be kept of weights only, and these are random")
    architecture = origin.architecture
    sliding = architecture.sliding_layers
    if sliding is not None:
        sliding = tuple(index for index, layer in enumerate(kept) if layer in sliding)
    shape = replace(architecture, num_layers=len(kept), sliding_layers=sliding)
    return replace(origin, architecture=shape, keep_layers=kept)
