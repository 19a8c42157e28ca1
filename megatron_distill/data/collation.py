"""From the samples of a global batch to one rank's micro-batches: masks, positions, counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_distill.data.samples import (
    CE_TRAINED,
    KD_TRAINED,
    NO_CHUNK,
    PADDING_DOCUMENT,
    WEIGHT_UNITS,
    Sample,
    TeacherTokens,
)
from megatron_distill.runtime.batch import Batch, LabelCounts
from megatron_distill.runtime.segments import Segments

_FLAG_BITS = 8  # two of masks and six of the weight
_MASK_BITS = 2


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one step as broadcast: G rows of S + 1 tokens.

    marks holds (document id + 1) << 8 | flags, so that 0 is padding. teacher is None where the
    teacher has the same tokenizer.
    """

    tokens_GS1: Tensor  # int32
    marks_GS1: Tensor  # int32
    sample_ids_G: Tensor  # int64
    sources_G: Tensor  # int32
    teacher_numbers_G: Tensor  # int32, -1 where there are not several teachers
    numbers_in_source_G: Tensor  # int64
    teacher: TeacherRows | None = None


@dataclass(frozen=True)
class TeacherRows:
    """The samples of one step in the tokens of a teacher with a tokenizer of its own.

    Marks as in `GlobalBatch`, with the distillation flag where a label is in a chunk. Chunks are
    numbered in each sample, -1 for none. Both kinds of places are as in `TeacherTokens`.
    """

    tokens_GU1: Tensor  # int32
    marks_GU1: Tensor  # int32
    chunks_GU1: Tensor  # int32
    student_chunks_GS1: Tensor  # int32
    places_GU12: Tensor | None = None  # int32
    student_places_GS1k2: Tensor | None = None  # int32


@dataclass(frozen=True)
class BatchLayout:
    """Assignment of the rows of a global batch to data-parallel ranks and micro-batches.

    Row r belongs to micro-batch r // (micro * size) and, within it, to data-parallel rank
    (r % (micro * size)) // micro.
    """

    global_batch_size: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        assert 0 <= self.data_parallel_rank < self.data_parallel_size
        assert self.global_batch_size % (self.micro_batch_size * self.data_parallel_size) == 0

    @property
    def micro_batches(self) -> int:
        """Micro-batches per rank and step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    def rows(self, micro_batch: int) -> slice:
        """Rows of this rank's micro-batch."""
        first = micro_batch * self.data_parallel_size + self.data_parallel_rank
        return slice(first * self.micro_batch_size, (first + 1) * self.micro_batch_size)

    def rows_of_all(self, micro_batch: int) -> slice:
        """Rows of this micro-batch of all data-parallel ranks."""
        width = self.micro_batch_size * self.data_parallel_size
        return slice(micro_batch * width, (micro_batch + 1) * width)


@dataclass(frozen=True)
class UnitRows:
    """The micro-batches of any replica that a teacher with its own layout runs on this rank.

    `units[i]` are numbers of units; the teacher runs them before the student's micro-batch i. Unit
    g has the rows from `g * micro_batch_size` on; the teacher's context ranks share its positions.
    They are in the student's tokens, or in those of a teacher with a tokenizer of its own.
    `has_trained_rows`: as in `Batch.with_trained_rows`, where the teacher's head runs on them.
    """

    units: tuple[tuple[int, ...], ...]
    context_rank: int
    context_size: int
    has_own_tokens: bool = False
    has_trained_rows: bool = False

    def batches(
        self,
        batch: GlobalBatch,
        micro_batch_number: int,
        *,
        micro_batch_size: int,
        isolate_documents: bool,
    ) -> tuple[Batch, ...]:
        """Return the units of a micro-batch, sharded over the teacher's context ranks."""
        found = []
        for unit in self.units[micro_batch_number]:
            rows = slice(unit * micro_batch_size, (unit + 1) * micro_batch_size)
            whole = micro_batch(batch, rows, isolate_documents=isolate_documents)
            own = whole.teacher if self.has_own_tokens else replace(whole, teacher=None)
            assert own is not None, "samples have the teacher's tokens"
            shard = own.context_shard(self.context_rank, self.context_size)
            found.append(shard.with_trained_rows() if self.has_trained_rows else shard)
        return tuple(found)


def pack_samples(samples: Sequence[Sample]) -> GlobalBatch:
    """Stack samples into the tensors that are broadcast."""
    teachers = [sample.teacher for sample in samples if sample.teacher is not None]
    assert len(teachers) in (0, len(samples)), "a batch is of one or of two tokenizers"
    return GlobalBatch(
        tokens_GS1=_stacked([sample.tokens_S1 for sample in samples]),
        marks_GS1=_marks(
            [sample.document_ids_S1 for sample in samples], [sample.flags_S1 for sample in samples]
        ),
        sample_ids_G=torch.tensor([sample.sample_id for sample in samples], dtype=torch.int64),
        sources_G=torch.tensor([sample.source for sample in samples], dtype=torch.int32),
        teacher_numbers_G=torch.tensor(
            [sample.teacher_number for sample in samples], dtype=torch.int32
        ),
        numbers_in_source_G=torch.tensor(
            [sample.number_in_source for sample in samples], dtype=torch.int64
        ),
        teacher=_teacher_rows(teachers) if teachers else None,
    )


def _teacher_rows(teachers: Sequence[TeacherTokens]) -> TeacherRows:
    chunks = [one.chunks_U1 for one in teachers]
    flags = [np.where(row != NO_CHUNK, KD_TRAINED, 0) for row in chunks]
    places = [one.places_U12 for one in teachers if one.places_U12 is not None]
    student_places = [
        one.student_places_S1k2 for one in teachers if one.student_places_S1k2 is not None
    ]
    return TeacherRows(
        tokens_GU1=_stacked([one.tokens_U1 for one in teachers]),
        marks_GU1=_marks([one.document_ids_U1 for one in teachers], flags),
        chunks_GU1=_stacked(chunks),
        student_chunks_GS1=_stacked([one.student_chunks_S1 for one in teachers]),
        places_GU12=_stacked(places) if places else None,
        student_places_GS1k2=_stacked(student_places) if student_places else None,
    )


def _stacked(rows: Sequence[NDArray[np.int32]]) -> Tensor:
    return torch.from_numpy(np.stack(rows))


def _marks(documents: Sequence[NDArray[np.int32]], flags: Sequence[NDArray[Any]]) -> Tensor:
    numbers = np.stack(documents).astype(np.int32) - PADDING_DOCUMENT
    return torch.from_numpy(numbers << _FLAG_BITS | np.stack(flags).astype(np.int32))


def unpack_samples(batch: GlobalBatch, rows: slice) -> list[Sample]:
    """Samples from the tensors: the inverse of `pack_samples` for some rows."""
    tokens, marks = batch.tokens_GS1[rows].numpy(), batch.marks_GS1[rows].numpy()
    documents = (marks >> _FLAG_BITS) + PADDING_DOCUMENT
    flags = (marks & (1 << _FLAG_BITS) - 1).astype(np.uint8)
    sample_ids, sources = batch.sample_ids_G[rows].tolist(), batch.sources_G[rows].tolist()
    teachers = _unpack_teachers(batch.teacher, rows, count=len(sample_ids))
    numbers = batch.teacher_numbers_G[rows].tolist()
    in_source = batch.numbers_in_source_G[rows].tolist()
    columns = (tokens, documents, flags, sample_ids, sources, teachers, numbers, in_source)
    return [Sample(*parts) for parts in zip(*columns, strict=True)]


def _unpack_teachers(
    teacher: TeacherRows | None, rows: slice, *, count: int
) -> Sequence[TeacherTokens | None]:
    if teacher is None:
        return [None] * count
    columns = (
        teacher.tokens_GU1[rows].numpy(),
        (teacher.marks_GU1[rows].numpy() >> _FLAG_BITS) + PADDING_DOCUMENT,
        teacher.chunks_GU1[rows].numpy(),
        teacher.student_chunks_GS1[rows].numpy(),
        *(
            [None] * count if one is None else one[rows].numpy()
            for one in (teacher.places_GU12, teacher.student_places_GS1k2)
        ),
    )
    return [TeacherTokens(*parts) for parts in zip(*columns, strict=True)]


def label_masks(marks: Tensor, *, isolate_documents: bool) -> tuple[Tensor, Tensor]:
    """Loss masks of cross-entropy and of distillation: two bool tensors [.., S].

    False where position or label is padding. With isolated documents also false at the last
    token of a document: the next token belongs to another document and cannot be predicted.
    """
    documents = marks >> _FLAG_BITS
    predicting, label = documents[..., :-1], documents[..., 1:]
    real = (predicting > 0) & (label > 0)
    if isolate_documents:
        real = real & (predicting == label)
    flags = marks[..., 1:]
    return real & (flags & CE_TRAINED > 0), real & (flags & KD_TRAINED > 0)


def label_units(marks: Tensor) -> Tensor | None:
    """Weights of the labels in units of 1/64: int32 [.., S]; None if every weight is one."""
    lacking = (marks[..., 1:] & (1 << _FLAG_BITS) - 1) >> _MASK_BITS
    return WEIGHT_UNITS - lacking if bool(lacking.any()) else None


def count_labels(
    batch: GlobalBatch, *, sources: int = 1, isolate_documents: bool
) -> tuple[LabelCounts, ...]:
    """Weighted number of labels per source that cross-entropy and distillation train.

    Of chunks likewise, whose labels have one weight. Multiples of 1/64; integers if every weight is
    one. With one source it is the whole batch's.
    """
    masks = label_masks(batch.marks_GS1, isolate_documents=isolate_documents)
    units = label_units(batch.marks_GS1)
    ids_G = batch.sources_G if sources > 1 else torch.zeros_like(batch.sources_G)

    def summed(counts_G: Tensor) -> Tensor:
        return torch.zeros(sources, dtype=torch.int64).index_add_(0, ids_G, counts_G)

    ce, kd = (summed((mask if units is None else mask * units).sum(1)) for mask in masks)
    of_chunks = (summed(counts) for counts in _count_chunks(batch, units))
    counts: tuple[Tensor, ...] = (ce, kd, *of_chunks)
    if units is not None:
        counts = tuple(one / WEIGHT_UNITS for one in counts)
    return tuple(map(LabelCounts, *(one.tolist() for one in counts)))


def _count_chunks(batch: GlobalBatch, units_GS: Tensor | None) -> tuple[Tensor, ...]:
    """Chunks, those of one token on each side, labels of the student in chunks, and chunk ends.

    A chunk has an end if its last token is an input of both models: a sample's last token is not.
    The numbers of each sample, or the sums of their weights in units: int64 [G].
    """
    teacher = batch.teacher
    if teacher is None:
        none = torch.zeros(len(batch.sources_G), dtype=torch.int64)
        return none, none, none, none
    sizes = [_chunk_sizes(teacher.student_chunks_GS1), _chunk_sizes(teacher.chunks_GU1)]
    width = min(size.shape[1] for size in sizes)
    student, other = (size[:, :width] for size in sizes)
    inside = teacher.student_chunks_GS1 != NO_CHUNK
    is_ended = torch.nn.functional.pad(student > 0, (1, 0))
    for numbers in (teacher.student_chunks_GS1, teacher.chunks_GU1):
        is_ended.scatter_(1, numbers[:, -1:].long() + 1, False)
    counted = [student > 0, (student == 1) & (other == 1), inside, is_ended[:, 1:]]
    if units_GS is not None:
        weights_GS1 = torch.nn.functional.pad(units_GS.long(), (1, 0))
        of_chunks = torch.zeros(len(student), width + 1, dtype=torch.int64)
        numbers = teacher.student_chunks_GS1.long() + 1
        of_chunks = of_chunks.scatter_reduce_(1, numbers, weights_GS1, "amax")[:, 1:]
        weights = (of_chunks, of_chunks, weights_GS1, of_chunks)
        counted = [one * weight for one, weight in zip(counted, weights, strict=True)]
    return tuple(one.long().sum(1) for one in counted)


def _chunk_sizes(chunks_GS1: Tensor) -> Tensor:
    """Number of tokens of each chunk [G, C]."""
    count = int(chunks_GS1.max()) + 1
    sizes = torch.zeros(len(chunks_GS1), count + 1, dtype=torch.int64)
    return sizes.scatter_add_(1, chunks_GS1.long() + 1, torch.ones_like(chunks_GS1).long())[:, 1:]


def document_positions(document_ids_bS: Tensor) -> Tensor:
    """Position of each token inside its document's segment of the sample: int64, from 0."""
    index = torch.arange(document_ids_bS.shape[1], device=document_ids_bS.device)
    begins = torch.ones_like(document_ids_bS, dtype=torch.bool)
    begins[:, 1:] = document_ids_bS[:, 1:] != document_ids_bS[:, :-1]
    starts = torch.where(begins, index, 0).cummax(dim=1).values
    return index - starts


def micro_batch(
    batch: GlobalBatch, rows: slice, *, isolate_documents: bool, unit_rows: slice | None = None
) -> Batch:
    """Rows of the global batch as a micro-batch that is not yet context-sharded.

    `unit_rows`: those of this micro-batch of all data-parallel ranks; None: `rows`.
    """
    found = _side(
        batch, batch.tokens_GS1[rows], batch.marks_GS1[rows], rows, is_isolated=isolate_documents
    )
    everywhere = batch.teacher_numbers_G[unit_rows or rows].tolist()
    found = replace(found, teachers_of_all=tuple(sorted(set(everywhere))))
    teacher = batch.teacher
    if teacher is None:
        return found
    own, other = teacher.student_chunks_GS1[rows].long(), teacher.chunks_GU1[rows].long()
    counts = own.amax(1) + 1
    first = (counts.cumsum(0) - counts).unsqueeze(1)
    side = _side(
        batch,
        teacher.tokens_GU1[rows],
        teacher.marks_GU1[rows],
        rows,
        is_isolated=isolate_documents,
    )
    return replace(
        found,
        chunks_bs=_numbered(own, first),
        student_places_bsk2=_of_labels(teacher.student_places_GS1k2, rows),
        teacher=replace(
            side,
            chunks_bs=_numbered(other, first),
            record_places_bs2=_of_labels(teacher.places_GU12, rows),
        ),
        chunk_count=int(counts.sum()),
    )


def _of_labels(places_GS1: Tensor | None, rows: slice) -> Tensor | None:
    """The places of each position's label, of some rows."""
    return None if places_GS1 is None else places_GS1[rows][:, 1:]


def _numbered(chunks_bS1: Tensor, first_b1: Tensor) -> Tensor:
    """The chunk of each position's label, numbered over the micro-batch; -1 for none."""
    return torch.where(chunks_bS1 == NO_CHUNK, NO_CHUNK, chunks_bS1 + first_b1)[:, 1:].contiguous()


def _side(
    batch: GlobalBatch, tokens_bS1: Tensor, marks_bS1: Tensor, rows: slice, *, is_isolated: bool
) -> Batch:
    """A micro-batch of one model's tokens."""
    tokens, marks = tokens_bS1.long(), marks_bS1
    ce_mask, kd_mask = label_masks(marks, isolate_documents=is_isolated)
    units = label_units(marks)
    index = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    if is_isolated:
        documents = (marks[:, :-1] >> _FLAG_BITS).long() + PADDING_DOCUMENT
        positions = document_positions(documents)
    else:
        documents = torch.zeros_like(tokens[:, :-1])
        positions = index.expand_as(documents).contiguous()
    return Batch(
        tokens_bs=tokens[:, :-1].contiguous(),
        labels_bs=tokens[:, 1:].contiguous(),
        ce_mask_bs=ce_mask,
        kd_mask_bs=kd_mask,
        position_ids_bs=positions,
        document_ids_bS=documents,
        sequence_index_s=index,
        sample_ids_b=batch.sample_ids_G[rows],
        sources_b=batch.sources_G[rows].long(),
        teacher_numbers=tuple(batch.teacher_numbers_G[rows].tolist()),
        numbers_in_source=tuple(batch.numbers_in_source_G[rows].tolist()),
        isolate_documents=is_isolated,
        label_weights_bs=None if units is None else units / WEIGHT_UNITS,
        documents=Segments.of_documents(documents),
    )
