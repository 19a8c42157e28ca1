"""From a configuration to tokens: training stream, held-out batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_distill.config import DataConfig, TrainConfig
from megatron_distill.data.aligned.coverage import StepCoverage, TokenBytes
from megatron_distill.data.aligned.rows import ChunkPlanner
from megatron_distill.data.collation import UnitRows
from megatron_distill.data.loader import StepLoader, open_loader
from megatron_distill.data.samples import NOT_JOINED, SampleSource
from megatron_distill.data.sources import (
    DataOptions,
    held_out_samples,
    open_training,
    samples_per_epoch,
)
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.runtime.collectives import on_first_rank
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.assemble.sources import source_names, source_specs
from megatron_distill.train.assemble.stores.teacher import SeveralStores, Stored


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
        teacher_length: of samples in a teacher's own tokens; None with one tokenizer.
        planner: of the rows of a loss between two tokenizers likewise.
        units: micro-batches that each teacher with its own layout runs on this rank in a step.
    """

    data: DataConfig
    options: DataOptions
    tokenizer: Tokenizer | None
    seed: int
    stored: Stored | SeveralStores | None = None
    held_out: int = 0
    teacher_length: int | None = None
    planner: ChunkPlanner | None = None
    units: tuple[UnitRows, ...] = ()

    def names(self, *, held_out: bool) -> tuple[str, ...]:
        """Return the names of the sources in the log."""
        stored_names = self.stored.names if self.stored is not None else ()
        return source_names(self.data, stored_names, held_out=held_out)

    def loader(
        self,
        train: TrainConfig,
        groups: Groups,
        device: torch.device,
        *,
        held_out: bool,
        exchange: dist.ProcessGroup | None = None,
    ) -> StepLoader:
        """Open the training stream, or the held-out samples, and a loader of it on every rank.

        The batches are exchanged in the group `exchange`, None: the world. Raises DataError or
        StoreError on all ranks.
        """
        opening = self.read_held_out if held_out else self.open_training
        stored = self.stored
        return open_loader(
            on_first_rank(opening, device=device),
            sequence_length=self.data.sequence_length,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            isolate_documents=self.data.isolate_documents,
            groups=groups,
            device=device,
            prefetch=0 if held_out else 2,
            sources=len(self.names(held_out=held_out)),
            teacher_length=self.teacher_length,
            planner=self.planner,
            coverage=None if held_out or self.planner is None else self._coverage(),
            exchange=exchange,
            units=self.units,
            joined=NOT_JOINED if stored is None or held_out else stored.joined_sides,
        )

    def open_training(self) -> SampleSource:
        """Open the training stream; raises DataError."""
        if not self.data.sources:
            return self._stores().open_training(self.seed, held_out=self.held_out)
        return open_training(
            source_specs(self.data.sources),
            tokenizer=self._tokenizer(),
            options=self.options,
            seed=self.seed,
        )

    def read_held_out(self) -> SampleSource:
        """Read the held-out samples; raises DataError or StoreError."""
        if not self.data.sources:
            return self._stores().read_held_out(self.held_out)
        own, options = self.data.validation_sources, self.options
        if options.teacher is not None:  # held-out documents have no records
            options = replace(options, teacher=replace(options.teacher, stores=()))
        return held_out_samples(
            source_specs(own or self.data.sources),
            tokenizer=self._tokenizer(),
            options=replace(options, validation_fraction=1.0) if own else options,
            samples=self.held_out,
        )

    @property
    def has_texts(self) -> bool:
        """Whether a source has documents of text, which their content identifies."""
        specs = source_specs(self.data.sources)
        return any(spec.kind.is_text and spec.conversation is None for spec in specs)

    def count_epoch(self) -> int:
        """Count the training samples of one epoch; raises DataError."""
        if not self.data.sources:
            return self._stores().samples - self.held_out
        (spec,) = source_specs(self.data.sources)
        return samples_per_epoch(
            spec, tokenizer=self._tokenizer(), options=self.options, seed=self.seed
        )

    def _coverage(self) -> StepCoverage | None:
        """Return what counts the chunks of a step's samples, on the first rank."""
        teacher = self.options.teacher
        if teacher is None or self.tokenizer is None:
            return None
        return StepCoverage(TokenBytes(self.tokenizer), TokenBytes(teacher.tokenizer))

    def _tokenizer(self) -> Tokenizer:
        assert self.tokenizer is not None, "the first rank has the tokenizer of the sources"
        return self.tokenizer

    def _stores(self) -> Stored:
        assert isinstance(self.stored, Stored), "a run without sources has a store"
        return self.stored
