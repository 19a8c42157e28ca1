"""The rows of both models of a micro-batch, planned while the step before runs.

All rows of a chunk must be on one rank. Under context parallelism the hidden states of both models
are gathered over the context group. Each rank takes chunks of which it has a part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_distill.data.samples import NO_TEACHER
from megatron_distill.ops.aligned.plan import TilePlan
from megatron_distill.runtime.batch import Batch, zigzag_index

__all__ = ["ChunkEnds", "ChunkPlanner", "ChunkRows"]


@dataclass(frozen=True)
class ChunkEnds:
    """The positions of this context rank's student at which a counted chunk ends.

    Attributes:
        teacher_rows_sb: int64 ``[s, b]``, the row of the teacher's last token of the chunk, 0 for
            none. Rows are those of ``[S_t, b]``, the positions of one context rank after another's.
        weights_sb: fp32 ``[s, b]``, of the chunk's labels, zero for none.
    """

    teacher_rows_sb: Tensor
    weights_sb: Tensor

    def to(self, device: torch.device | str) -> ChunkEnds:
        """The same ends on a device."""
        return ChunkEnds(
            self.teacher_rows_sb.to(device, non_blocking=True),
            self.weights_sb.to(device, non_blocking=True),
        )

    def pinned(self) -> ChunkEnds:
        """The same ends in pinned host memory."""
        return ChunkEnds(self.teacher_rows_sb.pin_memory(), self.weights_sb.pin_memory())


@dataclass(frozen=True)
class ChunkRows:
    """The rows of both models that a rank's loss may use, and their tiles; a `Planned`.

    Under context parallelism they are those of all context ranks, one rank's after the other's. The
    chunks of the plan are those of which this rank has a part.

    Attributes:
        student_labels: int64 ``[N]``, ids that the student's rows predict.
        teacher_labels: int64 ``[M]``, ids of the teacher's tokenizer.
        ce_weights: fp32 ``[N]``, zero in the parts of other ranks.
        row_sources: int64 ``[N]``, index of the blended source.
        chunk_sources: int64 ``[C]`` likewise.
        chunk_teachers: int64 ``[C]``, number of the sample's teacher among several, or -1.
        chunk_weights: fp32 ``[C]``, of the chunk's labels.
        plan: order and tiles of the rows.
        ends: of the chunks, for losses between layers; None without these.
    """

    student_labels: Tensor
    teacher_labels: Tensor
    ce_weights: Tensor
    row_sources: Tensor
    chunk_sources: Tensor
    chunk_teachers: Tensor
    chunk_weights: Tensor
    plan: TilePlan
    ends: ChunkEnds | None = None

    def to(self, device: torch.device | str) -> ChunkRows:
        """The same rows with every tensor on a device."""
        moved = {name: value.to(device, non_blocking=True) for name, value in self._tensors()}
        ends = None if self.ends is None else self.ends.to(device)
        return replace(self, **moved, plan=self.plan.to(device), ends=ends)

    def pinned(self) -> ChunkRows:
        """The same rows in pinned host memory."""
        moved = {name: value.pin_memory() for name, value in self._tensors()}
        ends = None if self.ends is None else self.ends.pinned()
        return replace(self, **moved, plan=self.plan.pinned(), ends=ends)

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, value) for name, value in vars(self).items() if isinstance(value, Tensor)]


@dataclass(frozen=True)
class ChunkPlanner:
    """Plans the rows of a micro-batch for one rank.

    Attributes:
        tile_tokens: rows of each model whose losses are computed at once.
        band_tokens: rows of each model whose logits are formed at once. Both are the same on all
            ranks of a tensor-parallel group, which cut the same tiles.
        context_rank: this rank among the context-parallel ranks.
        context_size: their number.
        has_labels: whether the loss has the cross-entropy of the rows too.
        has_ends: whether losses between layers need the ends of the chunks.
    """

    tile_tokens: int
    band_tokens: int
    context_rank: int = 0
    context_size: int = 1
    has_labels: bool = True
    has_ends: bool = False

    def planned(self, whole: Batch) -> Batch:
        """This rank's shard of a whole micro-batch in host memory, with its rows."""
        return replace(
            whole.context_shard(self.context_rank, self.context_size), planned=self.rows(whole)
        )

    def rows(self, whole: Batch) -> ChunkRows:
        """The rows of a micro-batch before context sharding."""
        rank, size = self.context_rank, self.context_size
        teacher, chunks_bS = whole.teacher, whole.chunks_bs
        assert teacher is not None
        assert teacher.chunks_bs is not None
        assert chunks_bS is not None
        student_chunks, teacher_chunks = (
            _by_rank(one, size) for one in (chunks_bS, teacher.chunks_bs)
        )
        ranks = torch.arange(size).repeat_interleave(chunks_bS.shape[1] // size)
        ranks = ranks.expand_as(chunks_bS).reshape(-1)
        sources = torch.zeros_like(ranks)
        if whole.sources_b is not None:
            sources = whole.sources_b.unsqueeze(1).expand_as(chunks_bS).reshape(-1)
        teachers = torch.full_like(ranks, NO_TEACHER)
        if whole.teacher_numbers:
            numbers_b = torch.tensor(whole.teacher_numbers)
            teachers = numbers_b.unsqueeze(1).expand_as(chunks_bS).reshape(-1)
        count = whole.chunk_count
        chunk_weights = torch.ones(count)
        if whole.label_weights_bs is not None:
            chunk_weights = _per_chunk(
                student_chunks, _by_rank(whole.label_weights_bs, size), count
            )
        is_owned = _per_chunk(student_chunks, ranks, count) == rank
        ce_weights = _by_rank(whole.ce_weights_bs, size).float()
        ce_weights = torch.where((ranks == rank) & self.has_labels, ce_weights, 0.0)
        return ChunkRows(
            student_labels=_by_rank(whole.labels_bs, size),
            teacher_labels=_by_rank(teacher.labels_bs, size),
            ce_weights=ce_weights,
            row_sources=sources,
            chunk_sources=_per_chunk(student_chunks, sources, count),
            chunk_teachers=_per_chunk(student_chunks, teachers, count, least=NO_TEACHER),
            chunk_weights=chunk_weights,
            plan=TilePlan.of_chunks(
                _owned(student_chunks, is_owned),
                _owned(teacher_chunks, is_owned),
                count,
                tile_tokens=self.tile_tokens,
                band_tokens=self.band_tokens,
                has_label=ce_weights != 0,
            ),
            ends=self._ends(whole, chunk_weights) if self.has_ends else None,
        )

    def _ends(self, whole: Batch, chunk_weights_C: Tensor) -> ChunkEnds:
        """Where the chunks end whose last token both models read, on this context rank.

        The last row of a chunk predicts its last token. So that token is the input at the next
        position, unless the sequence ends before it.
        """
        teacher, chunks_bS, size = whole.teacher, whole.chunks_bs, self.context_size
        assert teacher is not None
        assert teacher.chunks_bs is not None
        assert chunks_bS is not None
        count, (batch, length) = whole.chunk_count, chunks_bS.shape
        own_C, teacher_C = (_last_rows(one, count) + 1 for one in (chunks_bS, teacher.chunks_bs))
        samples_bS = torch.arange(batch).unsqueeze(1).expand_as(chunks_bS)
        samples_C = _per_chunk(chunks_bS, samples_bS, count)
        teacher_length = teacher.chunks_bs.shape[1]
        is_read = (own_C > 0) & (own_C < length) & (teacher_C > 0) & (teacher_C < teacher_length)
        place_S = torch.full((length,), -1)
        index_s = zigzag_index(length, rank=self.context_rank, size=size)
        place_S[index_s] = torch.arange(len(index_s))
        local_C = place_S[own_C.clamp(max=length - 1)]
        chosen = (is_read & (local_C >= 0)).nonzero().squeeze(1)
        ranks = range(size)
        order = torch.cat([zigzag_index(teacher_length, rank=rank, size=size) for rank in ranks])
        teacher_place = order.argsort()
        at = local_C[chosen], samples_C[chosen]
        rows_sb = torch.zeros(len(index_s), batch, dtype=torch.int64)
        rows_sb[at] = teacher_place[teacher_C[chosen]] * batch + samples_C[chosen]
        weights_sb = torch.zeros(len(index_s), batch)
        weights_sb[at] = chunk_weights_C[chosen]
        return ChunkEnds(rows_sb, weights_sb)


def _last_rows(chunks_bS: Tensor, count: int) -> Tensor:
    """The last position of each chunk's rows, -1 for a chunk without any: int64 ``[C]``."""
    positions_bS = torch.arange(chunks_bS.shape[1]).expand_as(chunks_bS)
    return _per_chunk(chunks_bS, positions_bS, count, least=-1)


def _by_rank(values_bS: Tensor, size: int) -> Tensor:
    """``[b * S]``: in each sequence the positions of one context rank after those of another."""
    if size == 1:
        return values_bS.reshape(-1)
    length = values_bS.shape[1]
    order = torch.cat([zigzag_index(length, rank=rank, size=size) for rank in range(size)])
    return values_bS[:, order].reshape(-1)


def _per_chunk(chunks: Tensor, values: Tensor, count: int, *, least: int = 0) -> Tensor:
    """The largest value among the rows of each chunk, at least `least`."""
    inside = chunks >= 0
    found = values.new_full((count,), least)
    return found.scatter_reduce_(0, chunks[inside], values[inside], "amax")


def _owned(chunks: Tensor, is_owned: Tensor) -> Tensor:
    if not len(is_owned):
        return chunks
    return chunks.where((chunks >= 0) & is_owned[chunks.clamp(min=0)], -1)
