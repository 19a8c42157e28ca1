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
    origin = _whole(model, role, config, vocabulary)
    with together():
        if model.keep_layers is not None or model.num_layers is not None:
            origin = _shallower(origin, _kept(model, role, origin.architecture.num_layers))
        architecture = origin.architecture
        if architecture.vocab_size < vocabulary.size:
            raise ConfigError(
                f"{role}.architecture.vocab_size is {architecture.vocab_size}, but the tokenizer "
                f"has {vocabulary.size} tokens; set it to {vocabulary.size} or more"
            )
        shape = ArchitectureConfig.model_validate(architecture.as_dict())
        problems = check_architecture(shape, role, config.parallel, config.data.sequence_length)
        if problems:
            raise ConfigError("\n".join(problems))
    return origin


def _whole(model: ModelConfig, role: str, config: JobConfig, vocabulary: Vocabulary) -> Origin:
    if model.hf is not None:
        return _from_hugging_face(Path(model.hf).expanduser())
    with together():
        if model.checkpoint is not None:
            return _from_checkpoint(model, config, vocabulary)
        if model.architecture is not None:
            return Origin(_described(model.architecture, config, vocabulary))
        raise ConfigError(
            f"{role} has no source; give {role}.hf, {role}.architecture or {role}.checkpoint"
        )


def _from_hugging_face(folder: Path) -> Origin:
    """Read config.json and every file's header on one rank; all others take its word."""
    said: list[tuple[str, dict[str, object]] | None] = [None]
    with together():
        if dist.get_rank() == 0:
            described = describe(folder)
            HuggingFaceWeights(folder, described).check()
            said = [(described.family.model_type, described.architecture.as_dict())]
    dist.broadcast_object_list(said, src=0)
    assert said[0] is not None
    model_type, fields = said[0]
    described = ModelDescription(
        family_named(model_type, where=str(folder)), Architecture.from_dict(fields)
    )
    return Origin(described.architecture, lambda: HuggingFaceWeights(folder, described))


def _from_checkpoint(model: ModelConfig, config: JobConfig, vocabulary: Vocabulary) -> Origin:
    assert model.checkpoint is not None
    folder = resolve_checkpoint(model.checkpoint)
    description = Description.read(folder)
    saved = saved_architecture(description, folder)
    wanted = saved
    if model.architecture is not None:
        wanted = _described(model.architecture, config, vocabulary)
    check_same_model(description, wanted, vocabulary.identity, folder)
    return Origin(wanted, lambda: CheckpointWeights(folder, saved))


def _described(
    described: ArchitectureConfig, config: JobConfig, vocabulary: Vocabulary
) -> Architecture:
    fields = described.model_dump()
    moe = fields["moe"]
    if moe is not None:
        moe["ffn_hidden_size"] = moe["ffn_hidden_size"] or described.ffn_hidden_size
    heads = described.num_attention_heads
    defaults = {
        "num_kv_heads": heads,
        "head_size": described.hidden_size // heads,
        "vocab_size": vocabulary.size,
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
