"""A divergence over common tokens and the rest, and the sorted distance of uncommon ones.

Both parts compare chunk means, so the loss is defined on chunks of any number of tokens. The
uncommon tokens of each vocabulary are one class of the divergence. The distance then compares the k
most probable of them (general online logit distillation, see docs/cross_tokenizer.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.aligned.chunk_means import (
    STEEPEST,
    SolvedMeans,
    agreeing,
    relative_to_top_,
)
from megatron_distill.ops.aligned.columns import CommonColumns
from megatron_distill.ops.aligned.sorted_distance import Candidates, sorted_distance
from megatron_distill.ops.aligned.tile import Tile
from megatron_distill.ops.divergences import Classes, Divergence
from megatron_distill.ops.row_math import row_sums
from megatron_distill.ops.topk import gather_ranks
from megatron_distill.ops.topk_divergence import values_and_slopes
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import row_blocks

__all__ = ["GoldColumns", "GoldTerm"]


@dataclass(frozen=True)
class GoldColumns:
    """Columns of common and uncommon tokens on this rank; those of gold's partition.

    Attributes:
        common: columns of common tokens; those of the teacher lie on the rank of the student's.
        teacher_rest: local columns of the teacher's uncommon tokens.
        uncommon: number of uncommon tokens of the vocabulary that has more.
    """

    common: CommonColumns
    teacher_rest: Tensor
    uncommon: int

    @classmethod
    def of(cls, columns: CommonColumns, shards: tuple[VocabShard, VocabShard]) -> GoldColumns:
        """From this rank's shards of the student and the teacher; no collective.

        Raises:
            ValueError: common tokens are on different ranks for both models.
        """
        if not columns.is_aligned:
            raise ValueError(
                "the teacher's common columns are not on the ranks of the student's: arrange them "
                "with TeacherLayout"
            )
        student, teacher = shards
        is_rest = torch.ones(teacher.real_width, dtype=torch.bool, device=columns.teacher.device)
        is_rest[columns.teacher] = False
        most = max(student.size, teacher.size) - columns.count
        return cls(columns, is_rest.nonzero().squeeze(1), most)

    def to(self, device: torch.device) -> GoldColumns:
        """The columns on a device."""
        return replace(
            self, common=self.common.to(device), teacher_rest=self.teacher_rest.to(device)
        )


@dataclass(frozen=True)
class GoldTerm:
    """Divergence over common tokens and the rest, plus the distance of uncommon tokens.

    Attributes:
        key: name in reports.
        columns: of common and uncommon tokens.
        divergence: an f-divergence.
        temperature: of both softmaxes.
        uncommon_top_k: number of sorted probabilities of uncommon tokens.
    """

    key: str
    columns: GoldColumns
    divergence: Divergence
    temperature: float = 1.0
    uncommon_top_k: int = 256

    def __post_init__(self) -> None:
        if self.divergence.head_mass is not None:
            raise ValueError(f"{self.divergence.name} is not an f-divergence")

    def solve(self, tile: Tile, *, with_gradient: bool) -> SolvedMeans:
        """See `AlignedTerm`.

        Collective: over the group one all-gather of 16 bytes per row of each model. Of
        ``8 k + 16`` and of 16 bytes per chunk; for the gradient 8 bytes per chunk and per student
        row.
        """
        side, columns = tile.student, self.columns.common
        k = min(self.uncommon_top_k, self.columns.uncommon)
        # The teacher's means are dropped before the student's are formed.
        of_teacher = tile.with_teacher.mean_probabilities(self.temperature)
        theirs = _Parts.of(of_teacher, columns.teacher, self.columns.teacher_rest, k)
        del of_teacher
        means = side.mean_probabilities(self.temperature)
        ours = _Parts.of(means, columns.student, columns.student_rest, k)
        sums = torch.stack([ours.sums, theirs.sums], 2).flatten(1).to(means.dtype)
        local = [ours.rest.values, theirs.rest.values, sums]
        gathered = gather_ranks(torch.cat(local, 1), side.group)
        distance = sorted_distance(gathered[:, :, :k], gathered[:, :, k : 2 * k], side.group)
        masses = gathered[:, :, 2 * k :].double().sum(0).to(means.dtype)
        found = self._over_classes(ours.common, theirs.common, masses, side.group)
        values = found.values.clamp(min=0.0) + distance.values
        if not with_gradient:
            return SolvedMeans.of(values, side, self.temperature, None)
        slopes = torch.empty_like(means).copy_(found.of_rest)
        slopes.index_copy_(1, columns.student, found.slopes)
        if len(columns.student_rest):
            slopes.scatter_add_(1, columns.student_rest[ours.rest.columns], distance.slopes)
        relative_to_top_(slopes, means, side.group)
        return SolvedMeans.of(values, side, self.temperature, slopes)

    def _over_classes(
        self, student: Tensor, teacher: Tensor, masses: Tensor, group: dist.ProcessGroup | None
    ) -> _GoldResult:
        """The divergence between means ``[c, P]`` of this rank's common tokens and the rest.

        ``masses [c, 4]`` are the means' sums over all common tokens of both models, and over all
        uncommon ones. Without a rest the means are divided by the former, in place.
        """
        has_rest = self.columns.common.has_rest
        if not has_rest:
            student.div_(masses[:, :1])
            teacher.div_(masses[:, 1:2])
        values, averages, slopes = _summed(self.divergence, student, teacher)
        values, averages = gather_ranks(torch.stack([values, averages]), group).sum(0).unbind()
        if has_rest:
            q, p = masses[:, 2:3], masses[:, 3:]
            of_rest = _summed(self.divergence, agreeing(q, p).double(), p.double())
            return _GoldResult(values + of_rest[0], slopes, of_rest[2])
        slopes.sub_(averages.unsqueeze(1)).div_(masses[:, :1])
        return _GoldResult(values, slopes, torch.zeros_like(masses[:, :1]))


class _Parts(NamedTuple):
    """Of chunk means ``[c, V]`` those of common tokens, and the largest of uncommon ones.

    Attributes:
        common: ``[c, P]``.
        rest: the k largest.
        sums: ``[c, 2]`` fp64, over this rank's common and uncommon tokens.
    """

    common: Tensor
    rest: Candidates
    sums: Tensor

    @classmethod
    def of(cls, means: Tensor, columns: Tensor, rest: Tensor, k: int) -> _Parts:
        """From local columns of common and of uncommon tokens."""
        common, further = means.index_select(1, columns), means.index_select(1, rest)
        sums = torch.stack([row_sums(common), row_sums(further)], 1)
        return cls(common, Candidates.of(further, k), sums)


class _GoldResult(NamedTuple):
    """Values ``[c]`` fp64, slopes ``[c, P]`` on common tokens and ``[c, 1]`` on uncommon ones."""

    values: Tensor
    slopes: Tensor
    of_rest: Tensor


def _summed(
    divergence: Divergence, student: Tensor, teacher: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums ``[c]`` fp64 of the divergence's summands over classes ``[c, P]``, of probabilities
    times slopes, and the slopes, which are written over the student's probabilities."""
    values, averages = torch.zeros(2, len(student), dtype=torch.float64, device=student.device)
    tiny = torch.finfo(student.dtype).tiny
    for block in row_blocks(len(student), student.shape[1], student.device):
        own = agreeing(student[block], teacher[block])
        q, p = own.clamp(min=tiny), teacher[block].clamp(min=tiny)
        classes = Classes(p, q, partial(_log_ratio, p, q), partial(_buffer, q))
        summands, q_times_slope, _ = values_and_slopes(divergence, classes, sums_to_one=True)
        values[block] = row_sums(summands)
        slopes = (q_times_slope / q).clamp_(-STEEPEST, STEEPEST)
        averages[block] = row_sums(own.mul_(slopes))
        student[block] = slopes
    return values, averages, student


def _log_ratio(teacher: Tensor, student: Tensor) -> Tensor:
    """``log(p/q)``; from the exact difference where both are close."""
    beyond = (teacher - student) / student
    return torch.where(beyond.abs() < 0.5, beyond.log1p(), teacher.log() - student.log())


def _buffer(like: Tensor, _name: str) -> Tensor:
    """Memory for a divergence's intermediate result."""
    return torch.empty_like(like)
