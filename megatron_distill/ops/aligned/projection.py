"""A divergence between chunk means on the teacher's most probable tokens and the rest.

The student's mean is projected on the teacher's vocabulary by the rows of a vocabulary map
(`ProjectedRows`). The classes are the k most probable teacher ids of the chunk's mean to which a
student token projects, and one of all further ids. Both means are arithmetic, so that it is a
divergence; the rows and their use are those of X-Token (arXiv 2605.21699).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.aligned.chunk_means import (
    STEEPEST,
    SolvedMeans,
    agreeing,
    relative_to_top_,
)
from megatron_distill.ops.aligned.projected_rows import ProjectedRows
from megatron_distill.ops.aligned.tile import Tile
from megatron_distill.ops.divergences import Divergence
from megatron_distill.ops.row_math import descending, row_sums
from megatron_distill.ops.topk import gather_ranks, largest
from megatron_distill.ops.topk_divergence import OnClasses
from megatron_distill.ops.vocab import VocabShard

__all__ = ["PROJECTION_TOP_K", "ProjectionTerm", "largest_ids"]

PROJECTION_TOP_K = 64


def largest_ids(
    values: Tensor,
    k: int,
    *,
    columns: Tensor,
    shard: VocabShard,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Global ids ``[c, k]`` of the largest of all ranks' values, among given local columns.

    Shapes: values ``[c, V]`` above -1, columns ``[u]`` int64; all ranks have k columns together.
    Equal values go to the lowest id.

    Collective: over ``group`` one all-gather of ``8 k`` bytes per row.
    """
    if len(columns) < values.shape[1]:
        values = values.index_select(1, columns)
    found, places = largest(values, min(k, len(columns)))
    ids = columns[places] + shard.start
    missing = (0, k - found.shape[1])
    pad = torch.nn.functional.pad
    local = torch.cat([pad(found, missing, value=-torch.inf), pad(ids, missing).to(found.dtype)], 1)
    gathered = gather_ranks(local, group).transpose(0, 1)
    _, order = descending(gathered[:, :, :k].flatten(1))
    return gathered[:, :, k:].flatten(1).gather(1, order[:, :k]).long()


@dataclass(frozen=True)
class ProjectionTerm:
    """Divergence of projected chunk means; defined on every chunk.

    Teacher ids to which no student token projects, and student tokens without a row, are in the
    class of all further ids.

    Attributes:
        key: name in reports.
        rows: the map's rows of this rank.
        divergence: an f-divergence.
        temperature: of both softmaxes.
        top_k: number of teacher ids.
    """

    key: str
    rows: ProjectedRows
    divergence: Divergence
    temperature: float = 1.0
    top_k: int = PROJECTION_TOP_K

    def __post_init__(self) -> None:
        if self.divergence.head_mass is not None:
            raise ValueError(f"{self.divergence.name} is not an f-divergence")

    def solve(self, tile: Tile, *, with_gradient: bool) -> SolvedMeans:
        """See `AlignedTerm`.

        Collective: over the group one all-gather of 16 bytes per row of each model. Of ``8 k`` and
        of ``4 k + 8`` bytes per chunk; for the gradient 8 bytes per chunk and per student row.
        """
        side, rows = tile.student, self.rows
        means = side.mean_probabilities(self.temperature)
        of_teacher = tile.with_teacher.mean_probabilities(self.temperature)
        shard, k = rows.teacher_shard, min(self.top_k, rows.reached_count)
        ids = largest_ids(of_teacher, k, columns=rows.reached, shard=shard, group=side.group)
        projected, rest = self._project(means, ids)
        teacher, teacher_rest = _taken(of_teacher, shard, ids)
        local = torch.cat([projected, rest, teacher, teacher_rest], 1)
        gathered = gather_ranks(local, side.group).double().sum(0).to(means.dtype)
        q, p = gathered[:, : k + 1], gathered[:, k + 1 :]
        tiny = torch.finfo(means.dtype).tiny
        q, p = agreeing(q, p).clamp(min=tiny).double(), p.clamp(min=tiny).double()
        log_q, log_p = q.log(), p.log()
        every = torch.ones_like(ids, dtype=torch.bool)
        on_classes = OnClasses(self.divergence, "tail")
        found = on_classes(log_p[:, :k], log_p[:, k], every, log_q[:, :k], log_q[:, k])
        values, mass = found.value.clamp(min=0.0), p[:, :k].sum(1)
        if not with_gradient:
            return SolvedMeans.of(values, side, self.temperature, None, mass)
        of_ids = (found.inside / q[:, :k]).clamp_(-STEEPEST, STEEPEST).to(means.dtype)
        slopes = self._slopes(ids, of_ids, found.slope.to(means.dtype).unsqueeze(1), means)
        relative_to_top_(slopes, means, side.group)
        return SolvedMeans.of(values, side, self.temperature, slopes, mass)

    def _project(self, means: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of the projected means at the ids ``[c, k]``, and at all further ids
        ``[c, 1]``."""
        rows = self.rows
        at_ids = means.new_empty(ids.shape)
        rest = means.new_empty(len(means), 1)
        for block in rows.blocks(len(means)):
            projected = rows.to_teacher.times(means[block])
            torch.gather(projected, 1, ids[block], out=at_ids[block])
            further = projected.scatter(1, ids[block], 0.0)
            lost = means[block] * rows.holes.to(means.dtype)
            rest[block, 0] = (row_sums(further) + row_sums(lost)).to(rest.dtype)
        return at_ids, rest

    def _slopes(self, ids: Tensor, of_ids: Tensor, of_rest: Tensor, means: Tensor) -> Tensor:
        """Slopes ``[c, V]`` on the student's means from those at the ids and the rest."""
        rows, slopes = self.rows, torch.empty_like(means)
        size = rows.teacher_shard.size
        for block in rows.blocks(len(means)):
            classes = of_rest[block].repeat(1, size).scatter_(1, ids[block], of_ids[block])
            lost = of_rest[block] * rows.holes.to(means.dtype)
            slopes[block] = rows.to_student.times(classes).add_(lost)
        return slopes


def _taken(means: Tensor, shard: VocabShard, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Means ``[c, V]`` at the ids ``[c, k]``, zero where another rank owns them, and the sum of
    this rank's further ones ``[c, 1]``. Sets the means at the ids to zero."""
    if not means.shape[1]:
        return means.new_zeros(ids.shape), means.new_zeros(len(ids), 1)
    columns = shard.local(ids)
    found = means.gather(1, columns).masked_fill_(~shard.owns(ids), 0.0)
    # Each is subtracted from itself, which is zero exactly; columns of other ranks lose nothing.
    means.scatter_add_(1, columns, -found)
    return found, row_sums(means).to(means.dtype).unsqueeze(1)
