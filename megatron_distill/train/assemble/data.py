"""From a configuration to tokens: training stream, held-out batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_distill.config import DataConfig, RunConfig, with_steps
from megatron_distill.data.loader import StepLoader
from megatron_distill.data.samples import SampleSource
from megatron_distill.data.sources import (
    DataOptions,
    open_training,
    read_held_out,
    samples_per_epoch,
)
from megatron_distill.data.tokenizers.open import (
    Tokenizer,
)
from megatron_distill.errors import counted
from megatron_distill.log import get_logger
from megatron_distill.runtime.batch import StepBatches
from megatron_distill.runtime.collectives import on_first_rank
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.assemble.sources import data_options, source_names, source_specs
from megatron_distill.train.assemble.stored import Stored, stored_held_out, stored_source
from megatron_distill.train.source_metrics import LabelTotals

_LOGGER = get_logger(__name__)


def open_training_loader(
    config: RunConfig,
    tokenizer: Tokenizer | None,
    stored: Stored | None,
    *,
    groups: Groups,
    device: torch.device,
) -> StepLoader:
    """Open the training stream on the first rank and a loader on every rank.

    Without sources the stores provide the samples. Raises DataError on all ranks.
    """

    def opened() -> SampleSource | None:
        if stored is not None and not config.data.sources:
            return stored_source(config, stored)
        assert tokenizer is not None, "the first rank has the tokenizer of the sources"
        return open_training(
            source_specs(config.data.sources),
            tokenizer=tokenizer,
            options=data_options(config),
            seed=config.seed,
        )

    return open_loader(
        on_first_rank(opened, device=device),
        config.data,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        groups=groups,
        device=device,
        prefetch=2,
        sources=len(source_names(config, held_out=False)),
    )


def with_computed_steps(
    config: RunConfig, tokenizer: Tokenizer | None, stored: Stored | None, *, device: torch.device
) -> RunConfig:
    """Replace `train.epochs` by the number of steps; without it nothing is done.

    Raises DataError or ConfigError on all ranks: the samples cannot be counted, or the schedule
    does not fit the steps.

    Collective: world, one broadcast of a short object.
    """
    epochs = config.train.epochs
    if epochs is None:
        return config

    def counted_samples() -> int:
        if not config.data.sources:
            assert stored is not None, "a run without sources has a store"
            return stored.samples - config.validation.samples
        assert tokenizer is not None, "the first rank has the tokenizer of the sources"
        (spec,) = source_specs(config.data.sources)
        return samples_per_epoch(
            spec, tokenizer=tokenizer, options=data_options(config), seed=config.seed
        )

    said = [on_first_rank(counted_samples, device=device)]
    dist.broadcast_object_list(said, src=0)
    samples = said[0]
    assert samples is not None, "the first rank has counted"
    steps = math.ceil(epochs * samples / config.train.global_batch_size)
    resolved, warnings = with_steps(config, steps)
    _LOGGER.info(
        "%s of %s: %s",
        "1 epoch" if epochs == 1 else f"{epochs:g} epochs",
        counted(samples, "sample"),
        counted(steps, "step"),
    )
    if dist.get_rank() == 0:
        for warning in warnings:
            _LOGGER.warning("%s", warning)
    return resolved


def read_validation(
    config: RunConfig,
    tokenizer: Tokenizer | None,
    stored: Stored | None,
    *,
    groups: Groups,
    device: torch.device,
) -> list[StepBatches]:
    """Read the held-out samples once; they stay in memory as batches of the training's size.

    Raises DataError or StoreError on all ranks.
    """
    if config.validation.samples == 0:
        return []
    own = config.data.validation_sources
    options = data_options(config)

    def opened() -> SampleSource | None:
        if stored is not None and not config.data.sources:
            return stored_held_out(config, stored)
        assert tokenizer is not None, "the first rank has the tokenizer of the sources"
        return read_held_out(
            source_specs(own or config.data.sources),
            tokenizer=tokenizer,
            options=_whole(options) if own else options,
            samples=config.validation.samples,
        )

    steps = -(-config.validation.samples // config.train.global_batch_size)
    loader = open_loader(
        on_first_rank(opened, device=device),
        config.data,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        groups=groups,
        device=device,
        prefetch=0,
        sources=len(source_names(config, held_out=True)),
    )
    try:
        found = [loader.take(step) for step in range(1, steps + 1)]
    finally:
        loader.close()
    _warn_of_empty(config, found)
    return found


def _warn_of_empty(config: RunConfig, steps: Sequence[StepBatches]) -> None:
    """Name the sources whose share of the held-out samples has no labels to measure."""
    names = source_names(config, held_out=True)
    by_source = LabelTotals.of(steps, names if len(names) > 1 else ()).by_source
    empty = [name for name, counts in by_source.items() if not counts.ce and not counts.kd]
    if empty:
        _LOGGER.warning(
            "validation.samples=%d gives no held-out sample of %s; raise it, or the weight of "
            "the source",
            config.validation.samples,
            ", ".join(empty),
        )


def _whole(options: DataOptions) -> DataOptions:
    return replace(options, validation_fraction=1.0)


def open_loader(
    source: SampleSource | None,
    data: DataConfig,
    *,
    global_batch_size: int,
    micro_batch_size: int,
    groups: Groups,
    device: torch.device,
    prefetch: int,
    sources: int = 1,
) -> StepLoader:
    """Open a loader on every rank for a source that exists on the first rank."""
    return StepLoader(
        source,
        sequence_length=data.sequence_length,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=groups.data.rank(),
        data_parallel_size=groups.data.size(),
        context_parallel_rank=groups.context.rank(),
        context_parallel_size=groups.context.size(),
        isolate_documents=data.isolate_documents,
        device=device,
        group=groups.world,
        prefetch=prefetch,
        sources=sources,
    )
