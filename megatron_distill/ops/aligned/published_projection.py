"""The projection loss as published by X-Token (arXiv 2605.21699), number for number.

One set G of k teacher ids serves all rows of a call: those with the largest logit of any row. Per
chunk, with a the student's projected mean at G and l the teacher's log-softmax over G alone,

    L = mean of l over the teacher's rows (a geometric mean, not normalised again)
    Q = a / (sum a + eps),  eps = 1e-10
    forward: T^2 sum_G e^L (L - log(Q + eps)),  reverse: T^2 sum_G (Q + eps) (log(Q + eps) - L)

It is not a divergence: it may be negative, and equal models may have a loss. Teacher ids to which
no student token projects cost up to ``log(1 / eps)``. `ProjectionTerm` has neither defect.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.aligned.chunk_means import SolvedMeans, relative_to_top_
from megatron_distill.ops.aligned.executor import AlignedRows
from megatron_distill.ops.aligned.projected_rows import ProjectedRows
from megatron_distill.ops.aligned.projection import largest_ids
from megatron_distill.ops.aligned.tile import Tile, TileSide
from megatron_distill.ops.topk import gather_ranks
from megatron_distill.ops.workspace import accumulation_dtype, allocate_logits, row_blocks

__all__ = ["PUBLISHED_TOP_K", "PublishedDivergence", "PublishedProjectionTerm", "published_ids"]

PUBLISHED_TOP_K = 8192
PublishedDivergence = Literal["forward_kl", "reverse_kl"]
_EPSILON = 1e-10


def published_ids(rows: AlignedRows, top_k: int = PUBLISHED_TOP_K) -> Tensor:
    """The teacher ids ``[k]`` int64, ascending, with the largest logits over all rows of chunks.

    A separate pass over the teacher's rows, tile by tile: the set must be known before the first
    tile is solved. Equal logits go to the lowest id. Equal on all ranks.

    Collective: over the group one all-gather of ``8 k`` bytes.

    Raises:
        ValueError: there are no teacher logits.
    """
    teacher, plan, shard = rows.teacher, rows.plan, rows.teacher_shard
    if teacher is None:
        raise ValueError("the published projection needs the teacher's logits, and there are none")
    assert plan.teacher.indices is not None
    columns, device = shard.real_width, plan.teacher.indices.device
    dtype = accumulation_dtype(teacher.dtype)
    largest = torch.full((1, columns), torch.finfo(dtype).min, dtype=dtype, device=device)
    memory = None
    if teacher.formed is None:
        most = max((band.stop - band.start for band in plan.teacher_bands), default=1)
        memory = allocate_logits(most, columns, teacher.dtype, device)
    for band in plan.teacher_bands:
        count = band.stop - band.start
        if not count:
            continue
        out = None if memory is None else memory[:count]
        raw = teacher.outputs(partial(plan.teacher.take, chunk=band), columns, out)
        for block in row_blocks(count, columns, device):
            logits = teacher.rule.apply_(raw[block].to(dtype, copy=True))
            torch.maximum(largest, logits.amax(0, keepdim=True), out=largest)
    every = torch.arange(columns, device=device)
    ids = largest_ids(largest, min(top_k, shard.size), columns=every, shard=shard, group=rows.group)
    return ids.squeeze(0).sort().values


@dataclass(frozen=True)
class PublishedProjectionTerm:
    """The published loss on given ids; T^2 is part of it.

    Attributes:
        key: name in reports.
        rows: the map's rows of this rank.
        ids: ``[k]`` of `published_ids`.
        divergence: of the two published directions.
        temperature: T.
    """

    key: str
    rows: ProjectedRows
    ids: Tensor
    divergence: PublishedDivergence = "forward_kl"
    temperature: float = 1.0

    def solve(self, tile: Tile, *, with_gradient: bool) -> SolvedMeans:
        """See `AlignedTerm`; values may be negative.

        Collective: over the group one all-gather of 16 bytes per row of the student, and of 32 per
        row of the teacher. One all-reduce of ``8 k`` bytes per chunk; for the gradient all-gathers
        of 8 bytes per chunk and per student row.
        """
        side, teacher, temperature = tile.student, tile.with_teacher, self.temperature
        means = side.mean_probabilities(temperature)
        log_means, mass = self._log_means(teacher)
        both = torch.cat([self._project(means), log_means], 1)
        if side.group is not None:
            dist.all_reduce(both, group=side.group)
        k, size = len(self.ids), self.rows.teacher_shard.size
        values = torch.zeros(len(means), dtype=torch.float64, device=means.device)
        slopes = torch.empty_like(means)
        for block in self.rows.blocks(len(means)):
            value, slope = self._between(both[block, :k].double(), both[block, k:].double())
            values[block] = value
            if with_gradient:
                classes = means.new_zeros(len(value), size)
                classes.index_copy_(1, self.ids, slope.to(means.dtype))
                slopes[block] = self.rows.to_student.times(classes)
        if not with_gradient:
            return SolvedMeans.of(values, side, temperature, None, mass)
        relative_to_top_(slopes, means, side.group)
        return SolvedMeans.of(values, side, temperature, slopes, mass)

    def _project(self, means: Tensor) -> Tensor:
        """This rank's part of the projected means at the ids, ``[c, k]``."""
        found = means.new_empty(len(means), len(self.ids))
        for block in self.rows.blocks(len(means)):
            projected = self.rows.to_teacher.times(means[block])
            torch.index_select(projected, 1, self.ids, out=found[block])
        return found

    def _log_means(self, teacher: TileSide) -> tuple[Tensor, Tensor]:
        """Chunk means of the log-softmax over the ids, and of the teacher's probability of all ids.

        Shapes: ``[c, k]``, zero at ids of other ranks, and ``[c]`` fp64.

        Collective: over the group two all-gathers of 16 bytes per teacher row.
        """
        temperature, owned = self.temperature, teacher.shard.owns(self.ids)
        columns = teacher.shard.local(self.ids)
        lowest = torch.finfo(teacher.scratch.dtype).min / 4
        shape = (len(teacher.raw), len(self.ids))
        logits = teacher.raw.new_full(shape, lowest, dtype=teacher.scratch.dtype)
        if teacher.raw.shape[1]:
            for block in teacher.blocks():
                found = teacher.logits(block).index_select(1, columns)
                logits[block] = found.masked_fill_(~owned, lowest)
        peak = logits.amax(1)
        mass = ((logits - peak.unsqueeze(1)) / temperature).exp_().masked_fill_(~owned, 0.0)
        local = torch.stack([peak.double() / temperature, mass.sum(1, dtype=torch.float64)])
        gathered = gather_ranks(local, teacher.group)
        total = (gathered[:, 0] + gathered[:, 1].log()).logsumexp(0)
        masses = (total - teacher.log_normalizer(temperature)).exp()
        log_probs = (logits.double() / temperature - total.unsqueeze(1)).masked_fill_(~owned, 0.0)
        means = teacher.sum_rows(log_probs) / teacher.lengths.unsqueeze(1)
        return means.to(logits.dtype), teacher.sum_rows(masses) / teacher.lengths

    def _between(self, projected: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Values ``[b]`` and slopes ``[b, k]`` on the projected means, in fp64."""
        total = projected.sum(1, keepdim=True) + _EPSILON
        q = projected / total
        log_q = (q + _EPSILON).log()
        if self.divergence == "reverse_kl":
            value, slope = (q + _EPSILON) * (log_q - log_p), log_q - log_p + 1
        else:
            p = log_p.exp()
            value, slope = p * (log_p - log_q), -p / (q + _EPSILON)
        slope = (slope - (slope * q).sum(1, keepdim=True)) / total
        factor = self.temperature**2
        return value.sum(1) * factor, slope * factor
