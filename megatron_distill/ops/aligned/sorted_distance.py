"""The distance between two vocabularies' sorted probabilities, which needs no common token.

The largest k of each side are compared rank by rank: ``sum_r |q_(r) - p_(r)|``, the shorter side
continued with zeros. A rank of a vocabulary shard sends its own k largest probabilities. All ranks
choose the same k of them (universal logit distillation, Boizard et al., arXiv 2402.12030).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.aligned.chunk_means import SolvedMeans, agreeing, relative_to_top_
from megatron_distill.ops.aligned.tile import Tile
from megatron_distill.ops.row_math import descending
from megatron_distill.ops.topk import gather_ranks, largest

__all__ = ["Candidates", "UldTerm", "sorted_distance"]

# Stands for a missing candidate; below every probability.
_MISSING = -1.0


class Candidates(NamedTuple):
    """The k largest probabilities of a shard's columns, ``[c, k]`` descending, and their columns.

    Where the shard has fewer columns, values are -1 and columns zero.
    """

    values: Tensor
    columns: Tensor

    @classmethod
    def of(cls, probabilities: Tensor, k: int) -> Candidates:
        """From ``[c, V]``; equal ones in the order of columns."""
        values, columns = largest(probabilities, min(k, probabilities.shape[1]))
        missing = (0, k - values.shape[1])
        pad = torch.nn.functional.pad
        return cls(pad(values, missing, value=_MISSING), pad(columns, missing))


class SortedDistance(NamedTuple):
    """Distances ``[c]`` fp64, and the slope ``[c, k]`` on each of this rank's candidates."""

    values: Tensor
    slopes: Tensor


def sorted_distance(
    student: Tensor, teacher: Tensor, group: dist.ProcessGroup | None
) -> SortedDistance:
    """From the candidates ``[ranks, c, k]`` of all ranks of the group; no collective.

    The slope is the sign of the difference at the candidate's place among the student's k, and zero
    beyond. Equal candidates take places in the order of their ids.
    """
    k = student.shape[2]
    joined = student.transpose(0, 1).flatten(1)
    ordered, order = descending(joined)
    others, _ = descending(teacher.transpose(0, 1).flatten(1))
    ours, theirs = ordered[:, :k].clamp(min=0.0), others[:, :k].clamp(min=0.0)
    gaps = agreeing(ours, theirs) - theirs
    signs = torch.zeros_like(joined)
    signs[:, :k] = gaps.sign()
    slopes = torch.empty_like(signs).scatter_(1, order, signs)
    rank = 0 if group is None else dist.get_rank(group)
    own = slice(rank * k, (rank + 1) * k)
    is_missing = joined[:, own] == _MISSING
    return SortedDistance(
        gaps.abs().sum(1, dtype=torch.float64), slopes[:, own].masked_fill(is_missing, 0.0)
    )


@dataclass(frozen=True)
class UldTerm:
    """Sorted distance between the chunk means of both whole vocabularies; defined on every chunk.

    Attributes:
        key: name in reports.
        temperature: of both softmaxes.
        uncommon_top_k: number of probabilities compared on each side.
    """

    key: str
    temperature: float = 1.0
    uncommon_top_k: int = 256

    def solve(self, tile: Tile, *, with_gradient: bool) -> SolvedMeans:
        """See `AlignedTerm`.

        Collective: over the group one all-gather of 16 bytes per row of each model. One of ``8 k``
        bytes per chunk, and for the gradient 8 bytes per chunk and per student row.
        """
        side, teacher, temperature = tile.student, tile.with_teacher, self.temperature
        k = min(self.uncommon_top_k, max(side.shard.size, teacher.shard.size))
        theirs = Candidates.of(teacher.mean_probabilities(temperature), k)
        means = side.mean_probabilities(temperature)
        ours = Candidates.of(means, k)
        gathered = gather_ranks(torch.stack([ours.values, theirs.values]), side.group)
        found = sorted_distance(gathered[:, 0], gathered[:, 1], side.group)
        slopes = None
        if with_gradient:
            slopes = torch.zeros_like(means)
            if means.shape[1]:
                slopes.scatter_add_(1, ours.columns, found.slopes)
            relative_to_top_(slopes, means, side.group)
        return SolvedMeans.of(found.values, side, temperature, slopes)
