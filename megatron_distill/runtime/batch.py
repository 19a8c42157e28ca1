"""Micro-batches, the models' inputs: tokens, labels, masks, positions and documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from megatron_distill.runtime.segments import Segments, pieces_of


def zigzag_index(
    sequence_length: int, *, rank: int, size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Global positions of context-parallel rank `rank` of `size`.

    The sequence is cut into `2 * size` chunks, and rank r takes chunks r and `2 * size - 1 - r`.
    Every rank then has the same share of the causal triangle.

    Returns: int64 [sequence_length / size], ascending, made on the device without a sync.
    """
    pieces = pieces_of(sequence_length, rank=rank, size=size)
    return torch.cat([torch.arange(piece.start, piece.stop, device=device) for piece in pieces])


class PreparedTensors(Protocol):
    """Tensors that are made of a batch before its step, and go to the device with it."""

    def to(self, device: torch.device | str) -> PreparedTensors:
        """The same with every tensor on a device; the host does not wait for pinned memory."""
        ...

    def pinned(self) -> PreparedTensors:
        """The same in pinned host memory."""
        ...


@dataclass(frozen=True)
class Batch:
    """One micro-batch: b sequences, with s of the S positions on this rank.

    labels_bs[i, j] is the token that follows tokens_bs[i, j]. The masks mark the trained labels; a
    masked-out label is still a valid token id. Two positions may attend to each other (causally)
    only if they are in one run of equal document_ids_bS; -1 marks padding.
    """

    tokens_bs: Tensor  # int64
    labels_bs: Tensor  # int64
    ce_mask_bs: Tensor  # bool: the label counts for cross-entropy
    kd_mask_bs: Tensor  # bool: the position counts for distillation
    position_ids_bs: Tensor  # int64, restarting with each document if isolate_documents
    document_ids_bS: Tensor  # int64, the whole sequence; all 0 if not isolate_documents
    sequence_index_s: Tensor  # int64, global index of each local position
    sample_ids_b: Tensor  # int64
    isolate_documents: bool
    # int64, ascending indices into the flattened [b * s] where a mask is true; None: not computed.
    # Computed on the host, they spare the objective a device sync to count them.
    trained_rows_n: Tensor | None = None
    sources_b: Tensor | None = None  # int64, index of the blended source; None: there is one
    label_weights_bs: Tensor | None = None  # fp32, of the trained labels; None: every weight is one
    copied_from: Batch | None = None  # the same batch on the host
    # The documents' cumulative lengths, for attention; None: read from document_ids_bS on the host.
    documents: Segments | None = None
    # A teacher with a tokenizer of its own: the same texts in its tokens, and for each position on
    # both sides the chunk of its label, int64, numbered over the micro-batch, -1 for none.
    teacher: Batch | None = None
    chunks_bs: Tensor | None = None
    chunk_count: int = 0
    # Of a teacher's side: the record of a store and the position in it that predict each label,
    # int32 [b, s, 2] in host memory, -1 for none; None: records are not found by documents.
    record_places_bs2: Tensor | None = None
    # With two tokenizers the same of the student's labels, in k stores of teachers with the
    # student's tokenizer: int32 [b, s, k, 2] in host memory.
    student_places_bsk2: Tensor | None = None
    # The rows of chunks, for the loss between two tokenizers.
    planned: PreparedTensors | None = None
    # The teacher's side of all context ranks, in host memory; None: `teacher` is all of it.
    whole_teacher: Batch | None = None
    # For each teacher with its own layout: micro-batches, of any replica, that this rank's part of
    # it runs before the student's step from this micro-batch on.
    units: tuple[tuple[Batch, ...], ...] = ()
    # With several teachers the number of each sample's, -1 for none, and those of this micro-batch
    # on all data-parallel ranks; in host memory.
    teacher_numbers: tuple[int, ...] = ()
    teachers_of_all: tuple[int, ...] = ()
    # The number of each sample in its source, in host memory; see `Sample`.
    numbers_in_source: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        shape = self.tokens_bs.shape
        for field in (self.labels_bs, self.ce_mask_bs, self.kd_mask_bs, self.position_ids_bs):
            assert field.shape == shape, (field.shape, shape)
        assert self.sequence_index_s.shape == shape[1:], (self.sequence_index_s.shape, shape)
        assert self.document_ids_bS.shape[0] == shape[0] == self.sample_ids_b.shape[0]
        if self.documents is None:
            object.__setattr__(self, "documents", Segments.of_documents(self.document_ids_bS))
        assert self.segments.queries == shape[1], (self.segments, shape)
        assert len(self.segments.bounds) == shape[0], (self.segments, shape)

    @classmethod
    def untrained(cls, tokens_bs: Tensor, *, last_position: int | None = None) -> Batch:
        """Rows of one document each without trained labels; host tensors.

        `last_position`: taken beyond it too, where a model has learned positions.
        """
        rows, length = tokens_bs.shape
        nothing_trained = torch.zeros_like(tokens_bs, dtype=torch.bool)
        index_s = torch.arange(length)
        positions_s = index_s if last_position is None else index_s.clamp(max=last_position)
        return cls(
            tokens_bs=tokens_bs,
            labels_bs=tokens_bs,
            ce_mask_bs=nothing_trained,
            kd_mask_bs=nothing_trained,
            position_ids_bs=positions_s.expand(rows, -1),
            document_ids_bS=torch.zeros_like(tokens_bs),
            sequence_index_s=index_s,
            sample_ids_b=torch.arange(rows),
            isolate_documents=False,
            documents=Segments.whole(rows, length),
        )

    @property
    def segments(self) -> Segments:
        """The documents' cumulative lengths, with this rank's part of the sequence."""
        assert self.documents is not None
        return self.documents

    def context_shard(self, rank: int, size: int) -> Batch:
        """The shard of context-parallel rank `rank` of `size`: zigzag chunks of this batch.

        Every [b, s] field is cut to the positions `zigzag_index(S, rank, size)`. document_ids_bS
        and the per-sample fields are unchanged. Must be called on a whole batch (s == S).
        """
        sequence_length = self.document_ids_bS.shape[1]
        assert self.tokens_bs.shape[1] == sequence_length, "the batch is sharded already"
        assert self.trained_rows_n is None, "rows are looked for after sharding"
        if size == 1:
            return self
        device, weights_bs = self.tokens_bs.device, self.label_weights_bs
        places_bs2, student_places = self.record_places_bs2, self.student_places_bsk2
        index = zigzag_index(sequence_length, rank=rank, size=size, device=device)
        return replace(
            self,
            tokens_bs=self.tokens_bs[:, index],
            labels_bs=self.labels_bs[:, index],
            ce_mask_bs=self.ce_mask_bs[:, index],
            kd_mask_bs=self.kd_mask_bs[:, index],
            position_ids_bs=self.position_ids_bs[:, index],
            sequence_index_s=self.sequence_index_s[index],
            label_weights_bs=None if weights_bs is None else weights_bs[:, index],
            documents=self.segments.sharded(rank, size),
            teacher=None if self.teacher is None else self.teacher.context_shard(rank, size),
            chunks_bs=None if self.chunks_bs is None else self.chunks_bs[:, index],
            record_places_bs2=None if places_bs2 is None else places_bs2[:, index],
            student_places_bsk2=None if student_places is None else student_places[:, index],
            whole_teacher=self.teacher,
        )

    @property
    def ce_weights_bs(self) -> Tensor:
        """The cross-entropy mask, times the label weights if there are any."""
        return _weighted(self.ce_mask_bs, self.label_weights_bs)

    @property
    def kd_weights_bs(self) -> Tensor:
        """The distillation mask, times the label weights if there are any."""
        return _weighted(self.kd_mask_bs, self.label_weights_bs)

    def with_trained_rows(self) -> Batch:
        """The same batch with `trained_rows_n` of both sides; on a CPU batch, after sharding."""
        is_trained_bs = self.ce_mask_bs | self.kd_mask_bs
        return replace(
            self,
            trained_rows_n=is_trained_bs.reshape(-1).nonzero().squeeze(1),
            teacher=None if self.teacher is None else self.teacher.with_trained_rows(),
        )

    @property
    def on_host(self) -> Batch:
        """The batch that this one was copied from, or itself; reading it needs no device sync."""
        return self if self.copied_from is None else self.copied_from

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with every tensor on `device`; from pinned memory, the host does not wait.

        Not for copies to the host, which could be read before they are there.
        """

        held = {name: getattr(self, name) for name in _TENSORS}
        moved: dict[str, Any] = {
            name: tensor.to(device, non_blocking=True)
            for name, tensor in held.items()
            if tensor is not None
        }
        return replace(
            self,
            **moved,
            copied_from=self.on_host,
            documents=self.segments.to(device),
            teacher=None if self.teacher is None else self.teacher.to(device),
            planned=None if self.planned is None else self.planned.to(device),
            units=tuple(tuple(unit.to(device) for unit in own) for own in self.units),
        )

    def copied_to(self, device: torch.device) -> Batch:
        """`to`, and for a GPU from pinned memory: the host does not wait."""
        return (self.pinned() if device.type == "cuda" else self).to(device)

    def pinned(self) -> Batch:
        """The same batch in pinned host memory, from which copies do not block."""
        held = {name: getattr(self, name) for name in _TENSORS}
        moved: dict[str, Any] = {
            name: tensor.pin_memory() for name, tensor in held.items() if tensor is not None
        }
        return replace(
            self,
            **moved,
            teacher=None if self.teacher is None else self.teacher.pinned(),
            planned=None if self.planned is None else self.planned.pinned(),
            units=tuple(tuple(unit.pinned() for unit in own) for own in self.units),
        )


_TENSORS: Final = (
    "tokens_bs",
    "labels_bs",
    "ce_mask_bs",
    "kd_mask_bs",
    "position_ids_bs",
    "document_ids_bS",
    "sequence_index_s",
    "sample_ids_b",
    "trained_rows_n",
    "sources_b",
    "label_weights_bs",
    "chunks_bs",
)


def _weighted(mask_bs: Tensor, weights_bs: Tensor | None) -> Tensor:
    return mask_bs if weights_bs is None else mask_bs * weights_bs


@dataclass(frozen=True)
class LabelCounts:
    """Numbers of labels that cross-entropy and distillation train; sums of weights if given."""

    ce: float
    kd: float
    chunks: float = 0  # that both tokenizers share, and those of one token on each side
    pairs: float = 0
    chunk_labels: float = 0  # labels of the student in these chunks
    chunk_ends: float = 0  # chunks whose last token is an input of both models


@dataclass(frozen=True)
class StepBatches:
    """The micro-batches of one optimizer step on this data-parallel and context-parallel rank.

    The counts are over the whole global batch (all data-parallel and context-parallel ranks, all
    micro-batches) and equal on every rank. They are the denominators of the objective. With label
    weights they are sums of weights. by_source splits them by source; it is empty with one source.
    coverage: with two tokenizers shares of the global batch's samples for the log, on rank 0 alone.
    """

    micro_batches: tuple[Batch, ...]
    ce_tokens: float
    kd_tokens: float
    positions: int  # global_batch_size * S
    chunks: float = 0  # see `LabelCounts`
    pairs: float = 0
    chunk_labels: float = 0
    chunk_ends: float = 0
    by_source: tuple[LabelCounts, ...] = ()
    coverage: Mapping[str, float] | None = None

    @property
    def counts(self) -> LabelCounts:
        """The counts of the global batch."""
        return LabelCounts(
            self.ce_tokens,
            self.kd_tokens,
            *(self.chunks, self.pairs, self.chunk_labels, self.chunk_ends),
        )
