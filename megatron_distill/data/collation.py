"""From the samples of a global batch to one rank's micro-batches: masks, positions, counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_distill.data.samples import (
    CE_TRAINED,
    KD_TRAINED,
    PADDING_DOCUMENT,
    WEIGHT_UNITS,
    Sample,
)
from megatron_distill.runtime.batch import Batch, LabelCounts
from megatron_distill.runtime.segments import Segments

_FLAG_BITS = 8  # two of masks and six of the weight
_MASK_BITS = 2


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one step as broadcast: G rows of S + 1 tokens.

    marks holds (document id + 1) << 8 | flags, so that 0 is padding.
    """

    tokens_GS1: Tensor  # int32
    marks_GS1: Tensor  # int32
    sample_ids_G: Tensor  # int64
    sources_G: Tensor  # int32


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


def pack_samples(samples: Sequence[Sample]) -> GlobalBatch:
    """Stack samples into the tensors that are broadcast."""
    documents = np.stack([sample.document_ids_S1 for sample in samples]).astype(np.int32)
    flags = np.stack([sample.flags_S1 for sample in samples]).astype(np.int32)
    return GlobalBatch(
        tokens_GS1=torch.from_numpy(np.stack([sample.tokens_S1 for sample in samples])),
        marks_GS1=torch.from_numpy(documents - PADDING_DOCUMENT << _FLAG_BITS | flags),
        sample_ids_G=torch.tensor([sample.sample_id for sample in samples], dtype=torch.int64),
        sources_G=torch.tensor([sample.source for sample in samples], dtype=torch.int32),
    )


def unpack_samples(batch: GlobalBatch, rows: slice) -> list[Sample]:
    """Samples from the tensors: the inverse of `pack_samples` for some rows."""
    tokens, marks = batch.tokens_GS1[rows].numpy(), batch.marks_GS1[rows].numpy()
    documents = (marks >> _FLAG_BITS) + PADDING_DOCUMENT
    flags = (marks & (1 << _FLAG_BITS) - 1).astype(np.uint8)
    sample_ids, sources = batch.sample_ids_G[rows].tolist(), batch.sources_G[rows].tolist()
    columns = (tokens, documents, flags, sample_ids, sources)
    return [Sample(*parts) for parts in zip(*columns, strict=True)]


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

    Multiples of 1/64; integers if every weight is one. With one source it is the whole batch's.
    """
    masks = label_masks(batch.marks_GS1, isolate_documents=isolate_documents)
    units = label_units(batch.marks_GS1)
    ids_G = batch.sources_G if sources > 1 else torch.zeros_like(batch.sources_G)
    ce, kd = (
        torch.zeros(sources, dtype=torch.int64).index_add_(0, ids_G, rows.sum(1))
        for rows in (mask if units is None else mask * units for mask in masks)
    )
    if units is None:
        return tuple(map(LabelCounts, ce.tolist(), kd.tolist()))
    return tuple(map(LabelCounts, (ce / WEIGHT_UNITS).tolist(), (kd / WEIGHT_UNITS).tolist()))


def document_positions(document_ids_bS: Tensor) -> Tensor:
    """Position of each token inside its document's segment of the sample: int64, from 0."""
    index = torch.arange(document_ids_bS.shape[1], device=document_ids_bS.device)
    begins = torch.ones_like(document_ids_bS, dtype=torch.bool)
    begins[:, 1:] = document_ids_bS[:, 1:] != document_ids_bS[:, :-1]
    starts = torch.where(begins, index, 0).cummax(dim=1).values
    return index - starts


def micro_batch(batch: GlobalBatch, rows: slice, *, isolate_documents: bool) -> Batch:
    """Rows of the global batch as a micro-batch that is not yet context-sharded."""
    tokens, marks = batch.tokens_GS1[rows].long(), batch.marks_GS1[rows]
    ce_mask, kd_mask = label_masks(marks, isolate_documents=isolate_documents)
    units = label_units(marks)
    index = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    if isolate_documents:
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
        isolate_documents=isolate_documents,
        label_weights_bs=None if units is None else units / WEIGHT_UNITS,
        documents=Segments.of_documents(documents),
    )
