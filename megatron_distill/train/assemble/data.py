"""From a configuration to tokens: training stream, held-out batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_distill.config import DataConfig, TrainConfig
from megatron_distill.data.loader import StepLoader
from megatron_distill.data.samples import SampleSource
from megatron_distill.data.sources import (
    DataOptions,
    open_training,
    read_held_out,
    samples_per_epoch,
)
from megatron_distill.data.stored import StoredSamples, held_out_numbers, read_held_out_numbers
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.log import get_logger
from megatron_distill.runtime.batch import StepBatches
from megatron_distill.runtime.collectives import on_first_rank
from megatron_distill.runtime.groups import Groups
from megatron_distill.store import StoreSet
from megatron_distill.train.assemble.sources import source_names, source_specs
from megatron_distill.train.assemble.stored import Stored
from megatron_distill.train.metrics import LabelTotals

_LOGGER = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunSamples:
    """The samples of a run: those of `data.sources`, or else those of its stores.

    Its opening, reading and counting need the first rank.

    Attributes:
        options: how sources are read.
        tokenizer: of the sources, on the first rank; None elsewhere.
        stored: the run's stores, if its teacher is stored.
        seed: of the training samples' order.
        held_out: number of held-out samples.
    """

    data: DataConfig
    options: DataOptions
    tokenizer: Tokenizer | None
    seed: int
    stored: Stored | None = None
    held_out: int = 0

    def names(self, *, held_out: bool) -> tuple[str, ...]:
        """Return the names of the sources in the log."""
        stored_names = self.stored.names if self.stored is not None else ()
        return source_names(self.data, stored_names, held_out=held_out)

    def open_training(self) -> SampleSource:
        """Open the training stream; raises DataError."""
        if not self.data.sources:
            stored, corpus = self._stores()
            numbers = held_out_numbers(stored.samples, self.held_out)
            return StoredSamples(corpus, stored.shares, seed=self.seed, held_out=numbers)
        return open_training(
            source_specs(self.data.sources),
            tokenizer=self._tokenizer(),
            options=self.options,
            seed=self.seed,
        )

    def read_held_out(self) -> SampleSource:
        """Read the held-out samples; raises DataError or StoreError."""
        if not self.data.sources:
            stored, corpus = self._stores()
            numbers = held_out_numbers(stored.samples, self.held_out)
            return read_held_out_numbers(corpus, stored.shares, numbers)
        own = self.data.validation_sources
        return read_held_out(
            source_specs(own or self.data.sources),
            tokenizer=self._tokenizer(),
            options=replace(self.options, validation_fraction=1.0) if own else self.options,
            samples=self.held_out,
        )

    def count_epoch(self) -> int:
        """Count the training samples of one epoch; raises DataError."""
        if not self.data.sources:
            return self._stores()[0].samples - self.held_out
        (spec,) = source_specs(self.data.sources)
        return samples_per_epoch(
            spec, tokenizer=self._tokenizer(), options=self.options, seed=self.seed
        )

    def _tokenizer(self) -> Tokenizer:
        assert self.tokenizer is not None, "the first rank has the tokenizer of the sources"
        return self.tokenizer

    def _stores(self) -> tuple[Stored, StoreSet]:
        assert self.stored is not None, "a run without sources has a store"
        assert self.stored.corpus is not None, "the first rank has the stores"
        return self.stored, self.stored.corpus


def open_training_loader(
    samples: RunSamples,
    train: TrainConfig,
    *,
    groups: Groups,
    device: torch.device,
    exchange: dist.ProcessGroup | None = None,
) -> StepLoader:
    """Open the training stream on the first rank and a loader on every rank.

    The batches are exchanged in the group `exchange`, None: the world.

    Raises DataError on all ranks.
    """
    return open_loader(
        on_first_rank(samples.open_training, device=device),
        samples.data,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        groups=groups,
        device=device,
        prefetch=2,
        sources=len(samples.names(held_out=False)),
        exchange=exchange,
    )


def read_validation(
    samples: RunSamples, train: TrainConfig, *, groups: Groups, device: torch.device
) -> list[StepBatches]:
    """Read the held-out samples once; they stay in memory as batches of the training's size.

    Raises DataError or StoreError on all ranks.
    """
    if samples.held_out == 0:
        return []
    names = samples.names(held_out=True)
    loader = open_loader(
        on_first_rank(samples.read_held_out, device=device),
        samples.data,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        groups=groups,
        device=device,
        prefetch=0,
        sources=len(names),
    )
    try:
        steps = -(-samples.held_out // train.global_batch_size)
        found = [loader.take(step) for step in range(1, steps + 1)]
    finally:
        loader.close()
    if len(names) > 1:
        _warn_of_empty(found, names, samples.held_out)
    return found


def _warn_of_empty(steps: Sequence[StepBatches], names: tuple[str, ...], held_out: int) -> None:
    """Name the sources whose share of the held-out samples has no labels to measure."""
    by_source = LabelTotals.of(steps, names).by_source
    empty = [name for name, counts in by_source.items() if not counts.ce and not counts.kd]
    if empty:
        _LOGGER.warning(
            "validation.samples=%d gives no held-out sample of %s; raise it, or the weight of "
            "the source",
            held_out,
            ", ".join(empty),
        )


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
    exchange: dist.ProcessGroup | None = None,
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
        group=exchange or groups.world,
        prefetch=prefetch,
        sources=sources,
    )
