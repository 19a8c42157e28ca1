"""The projection of a student's distribution on the teacher's vocabulary, on one shard.

A vocabulary map has a sparse row of teacher ids and weights for each student token. A rank has the
rows of its own student columns. Its part of a projected distribution is over the teacher's whole
vocabulary. Parts of all ranks are summed at the few ids that a loss needs. A block of chunks is
projected at once, so that memory does not depend on the number of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import row_blocks

__all__ = ["ProjectedRows", "SparseMatrix"]


@dataclass(frozen=True)
class SparseMatrix:
    """A sparse matrix from S sources to G targets; E entries in the order of targets.

    Attributes:
        sources: ``[E]`` int64.
        targets: ``[E]`` int64, ascending.
        weights: ``[E]``.
        lengths: ``[G]`` int64, entries of each target.
    """

    sources: Tensor
    targets: Tensor
    weights: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, sources: Tensor, targets: Tensor, weights: Tensor, size: int) -> SparseMatrix:
        """From entries in any order."""
        order = targets.argsort(stable=True)
        lengths = torch.bincount(targets, minlength=size)
        return cls(sources[order], targets[order], weights[order], lengths)

    def times(self, values: Tensor) -> Tensor:
        """``[b, S]`` -> ``[b, G]``, with sums in the same order each time."""
        if values.device.type == "cpu":
            return self.by_adding(values)
        return self.by_segments(values)

    def by_adding(self, values: Tensor) -> Tensor:
        """`times` where entries are added one after the other; on a CPU it is the faster one."""
        parts = values.index_select(1, self.sources).mul_(self.weights.to(values.dtype))
        return values.new_zeros(len(values), len(self.lengths)).index_add_(1, self.targets, parts)

    def by_segments(self, values: Tensor) -> Tensor:
        """`times` where targets are summed in parallel, each in order."""
        parts = values.t().index_select(0, self.sources)
        parts.mul_(self.weights.to(values.dtype).unsqueeze(1))
        return torch.segment_reduce(
            parts, "sum", lengths=self.lengths, axis=0, unsafe=True, initial=0.0
        ).t()

    def to(self, device: torch.device) -> SparseMatrix:
        """The matrix with its tensors on a device."""
        return SparseMatrix(**{name: value.to(device) for name, value in vars(self).items()})


@dataclass(frozen=True)
class ProjectedRows:
    """Rows of a vocabulary map for this rank's student columns, over G teacher ids.

    Attributes:
        to_teacher: matrix from student columns to teacher ids.
        to_student: its transpose.
        holes: ``[V]``, one for student columns without a row, else zero.
        reached: local columns of the teacher to which a student token of any rank projects.
        reached_count: number of such teacher ids on all ranks.
        teacher_shard: this rank's columns of the teacher.
    """

    to_teacher: SparseMatrix
    to_student: SparseMatrix
    holes: Tensor
    reached: Tensor
    reached_count: int
    teacher_shard: VocabShard

    @classmethod
    def of(
        cls,
        offsets: Tensor,
        teacher_ids: Tensor,
        weights: Tensor,
        *,
        unreached_ids: Tensor,
        shards: tuple[VocabShard, VocabShard],
    ) -> ProjectedRows:
        """From the rows of this rank in CSR form; no collective.

        Shapes: offsets ``[V + 1]`` int64 for the columns of the student's shard, with or without
        padding. Teacher ids and weights ``[E]``; ``unreached_ids`` int64, the teacher ids in no row
        of any rank. Ids are in the numbering of the teacher's head. ``shards`` are this rank's of
        the student and the teacher.

        Raises:
            ValueError: offsets of a different shard, ids beyond the vocabulary, or no reached id.
        """
        student, teacher = shards
        if len(offsets) not in (student.real_width + 1, student.width + 1):
            raise ValueError(
                f"the map's offsets are for {len(offsets) - 1} student columns; the shard "
                f"[{student.start}, {student.stop}) has {student.real_width}"
            )
        offsets = offsets[: student.real_width + 1]
        lengths = offsets.diff()
        if int(lengths.sum()) != len(teacher_ids) or len(teacher_ids) != len(weights):
            raise ValueError(
                f"the map's offsets end at {int(lengths.sum())}, with {len(teacher_ids)} teacher "
                f"ids and {len(weights)} weights; the three must be equal"
            )
        if len(teacher_ids) and not (
            int(teacher_ids.min()) >= 0 and int(teacher_ids.max()) < teacher.size
        ):
            raise ValueError(
                f"the map has teacher ids from {int(teacher_ids.min())} to "
                f"{int(teacher_ids.max())}; the teacher's vocabulary has {teacher.size}"
            )
        columns = torch.arange(student.real_width).repeat_interleave(lengths.cpu())
        teacher_ids, weights = teacher_ids.cpu(), weights.cpu()
        is_reached = torch.ones(teacher.size, dtype=torch.bool)
        is_reached[unreached_ids.cpu()] = False
        count = int(is_reached.sum())
        if not count:
            raise ValueError("no student token projects to a token of the teacher")
        mine = is_reached[teacher.start : teacher.start + teacher.real_width]
        return cls(
            SparseMatrix.of(columns, teacher_ids, weights, teacher.size),
            SparseMatrix.of(teacher_ids, columns, weights, student.real_width),
            (lengths == 0).to(weights.dtype).cpu(),
            mine.nonzero().squeeze(1),
            count,
            teacher,
        )

    def blocks(self, chunks: int) -> Iterator[slice]:
        """Slices over the chunks of a tile, for which a dense ``[b, G]`` is small."""
        most = max(len(self.to_teacher.sources), self.teacher_shard.size, len(self.holes))
        return row_blocks(chunks, most, self.holes.device)

    def to(self, device: torch.device) -> ProjectedRows:
        """The rows with their tensors on a device."""
        return replace(
            self,
            to_teacher=self.to_teacher.to(device),
            to_student=self.to_student.to(device),
            holes=self.holes.to(device),
            reached=self.reached.to(device),
        )
