"""The stored values of a teacher's distributions, from hidden states, on vocabulary shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_distill.data.samples import KD_TRAINED, NO_CHUNK, Sample
from megatron_distill.ops import LogitRule, VocabShard
from megatron_distill.ops.frozen_head import OutputChunk, output_chunks, row_statistics
from megatron_distill.ops.topk import gather_ranks
from megatron_distill.ops.workspace import chunk_tokens_for
from megatron_distill.runtime.batch import Batch, zigzag_index
from megatron_distill.runtime.host_copy import HostCopy
from megatron_distill.signals import HiddenState
from megatron_distill.store import (
    CaptureSettings,
    PositionScalars,
    SampleRecord,
    SampleTokens,
    SelectionPlace,
    StudentTokens,
    cut_to_mass,
)
from megatron_distill.store.records import Selection


@dataclass(frozen=True)
class CapturedPositions:
    """Stored values of positions: [N] of a rank, or [b, S] of whole sequences.

    integers [.., I] int32: the columns of the selection.
    floats [.., F] fp32: log-sum-exp at temperature one and at each further one, entropy, label's
    log-probability, and the columns of the selection.
    """

    integers: Tensor
    floats: Tensor

    def whole(self, batch: Batch, group: dist.ProcessGroup) -> CapturedPositions:
        """Return the values of whole sequences [b, S], the zig-zag of context ranks undone.

        Collective: `group`, two all-gathers of 4 bytes per number, where it has several ranks.
        """
        count, length = batch.tokens_bs.shape
        return CapturedPositions(
            *(
                _whole_sequences(values.view(count, length, -1), group)
                for values in (self.integers, self.floats)
            )
        )

    def begin_copy(self) -> Callable[[], CapturedPositions]:
        """Begin a copy to host memory; returns what waits for it, in any thread."""
        copies = HostCopy.begin(self.integers, self.floats)
        return lambda: CapturedPositions(*copies.read())


def _whole_sequences(values_bsC: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group.size()
    if size == 1:
        return values_bsC
    parts = gather_ranks(values_bsC, group)
    joined = torch.cat(parts.unbind(), dim=1)
    order = [
        zigzag_index(joined.shape[1], rank=rank, size=size, device=joined.device)
        for rank in range(size)
    ]
    whole = torch.empty_like(joined)
    whole[:, torch.cat(order)] = joined
    return whole


@dataclass(frozen=True)
class PositionCapture:
    """Turns a teacher's hidden states into stored values; logits exist for one token chunk only.

    Attributes:
        settings: of the capture.
        shard: this rank's columns.
        group: the ranks that hold the remaining columns.
        chunk_tokens: tokens whose logits exist at one time; None: the objective's default.
    """

    settings: CaptureSettings
    shard: VocabShard
    group: dist.ProcessGroup
    chunk_tokens: int | None = None

    @torch.no_grad()
    def __call__(self, state: HiddenState, batch: Batch) -> CapturedPositions:
        """Return the stored values of this rank's positions [N], in (b, s) order.

        A top-k's values are bitwise equal to the objective's selection from a live teacher, for the
        same micro-batch and layout.

        Collective: tensor group, per chunk those of `row_statistics` and of the selection.
        """
        assert batch.trained_rows_n is not None
        rule, host = state.rule, batch.on_host
        labels, device = batch.labels_bs.reshape(-1), state.hidden.device
        sample_ids: list[int] = host.sample_ids_b.tolist()
        place = SelectionPlace(rule, self.shard, self.group, sample_ids, host.sequence_index_s)
        selection = self.settings.kind.selection(self.settings, place)
        found: CapturedPositions | None = None
        for chunk in output_chunks(
            state,
            batch.trained_rows_n,
            chunk_tokens=self.chunk_tokens or chunk_tokens_for(self.shard.width, device),
            columns=self.shard.real_width,
        ):
            part = self._values(chunk, rule, labels[chunk.rows], selection)
            if found is None:
                found = CapturedPositions(
                    *(one.new_empty(len(labels), one.shape[1]) for one in vars(part).values())
                )
            found.integers[chunk.rows] = part.integers
            found.floats[chunk.rows] = part.floats
        assert found is not None, "a micro-batch has positions"
        return found

    def _values(
        self, chunk: OutputChunk, rule: LogitRule, labels: Tensor, selection: Selection
    ) -> CapturedPositions:
        statistics = row_statistics(
            chunk.raw,
            rule,
            self.shard,
            self.group,
            labels=labels,
            temperatures=self.settings.temperatures,
        )
        integers, floats = selection(chunk, statistics.log_sum_exp)
        scalars = [*statistics.log_sum_exp, statistics.entropy, statistics.label_log_prob]
        columns = torch.stack([row.float() for row in scalars], 1)
        return CapturedPositions(integers, torch.cat([columns, floats], 1))


def build_records(
    samples: Sequence[Sample], copied: Callable[[], CapturedPositions], settings: CaptureSettings
) -> Iterator[SampleRecord]:
    """Yield the records of a micro-batch's samples; rows without a sample have none.

    `copied` returns the positions of whole sequences, on the host; it is called with the first
    record, in the thread that writes.
    """
    found = copied()
    integers, floats = found.integers.numpy(), found.floats.numpy()
    for row, sample in enumerate(samples):
        if sample.sample_id < 0:
            continue
        record = _record(sample, integers[row], floats[row], settings)
        yield record if settings.top_p is None else cut_to_mass(record, settings.top_p)


def _record(
    sample: Sample,
    integers_SI: NDArray[np.int32],
    floats_SF: NDArray[np.float32],
    settings: CaptureSettings,
) -> SampleRecord:
    further = len(settings.temperatures)
    columns = np.ascontiguousarray(floats_SF[:, : 3 + further].T)
    sums, (entropy, label) = columns[: 1 + further], columns[1 + further :]
    entries = settings.kind.of_columns(
        integers_SI,
        floats_SF[:, 3 + further :],
        settings,
        log_sum_exp_TS=sums[1:] if further else None,
    )
    tokens = _tokens(sample)
    return SampleRecord(
        sample_id=sample.sample_id,
        tokens_S1=tokens.tokens_S1,
        document_ids_S1=tokens.document_ids_S1,
        flags_S1=tokens.flags_S1,
        entries=entries,
        scalars=PositionScalars(sums[0], entropy, label),
        student=tokens.student,
    )


def _tokens(sample: Sample) -> SampleTokens:
    """The tokens that the teacher reads, and the student's where they are another tokenizer's."""
    teacher = sample.teacher
    if teacher is None:
        return SampleTokens(sample.tokens_S1, sample.document_ids_S1, sample.flags_S1)
    flags_U1 = np.where(teacher.chunks_U1 != NO_CHUNK, KD_TRAINED, 0).astype(np.uint8)
    student = StudentTokens(
        sample.tokens_S1,
        sample.document_ids_S1,
        sample.flags_S1,
        teacher.student_chunks_S1,
        teacher.chunks_U1,
    )
    return SampleTokens(teacher.tokens_U1, teacher.document_ids_U1, flags_U1, student)
