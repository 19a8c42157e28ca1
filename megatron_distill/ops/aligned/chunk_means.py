"""Losses on chunk means: of each chunk the mean of the distributions that its rows predict.

With the student's mean ``a_j = (1/n) sum_t q_tj`` over the n rows of a chunk, and the slopes
``s_j = dD/da_j`` of its value, the gradient on the logits of row t is

    dD/dz_tj = q_tj (s_j - sum_i q_ti s_i) / (n T)

A constant added to all slopes of a chunk cancels. Slopes are therefore kept relative to that of a
probable token, so that the bracket does not subtract two large numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.aligned.tile import TileGradient, TileSide
from megatron_distill.ops.row_math import nearness, row_sums, row_top
from megatron_distill.ops.softmax_gradient import clear_rows_
from megatron_distill.ops.topk import gather_ranks

__all__ = ["STEEPEST", "SolvedMeans", "agreeing", "relative_to_top_"]

# Bound of slopes, so that fp32 holds them with weights.
STEEPEST = 1e32


def agreeing(student: Tensor, teacher: Tensor) -> Tensor:
    """The student's probabilities, replaced by the teacher's where both differ by rounding.

    The rounding of a logit is that of the logarithm, so the window is wider for small ones.
    """
    window = teacher.log().neg_().clamp_(min=1.0).mul_(teacher)
    window.mul_(nearness(student.dtype))
    return torch.where((student - teacher).abs() <= window, teacher, student)


def relative_to_top_(slopes: Tensor, means: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Subtract from slopes ``[c, V]`` of each chunk the one at the largest of its means.

    Collective: over ``group`` one all-gather of 8 bytes per chunk.
    """
    if means.shape[1]:
        largest, place = row_top(means)
        local = torch.stack([largest, slopes.gather(1, place.unsqueeze(1)).squeeze(1)], 1)
    else:
        local = means.new_full((len(means), 2), -1.0)
    gathered = gather_ranks(local, group)
    place = gathered[:, :, 0].argmax(0, keepdim=True)
    return slopes.sub_(gathered[:, :, 1].gather(0, place).squeeze(0).unsqueeze(1))


@dataclass(frozen=True)
class SolvedMeans:
    """See `SolvedTerm`.

    Attributes:
        values: ``[c]`` fp64.
        side: the student's rows.
        temperature: of the softmaxes in the means.
        slopes: ``[c, V]`` on the means, up to a constant of each chunk; None without a gradient.
        averages: ``[n]`` fp64, sum of each row's probabilities times the slopes of its chunk.
        mass: ``[c]`` fp64, the teacher's probability of its top-k; None without a top-k.
    """

    values: Tensor
    side: TileSide
    temperature: float
    slopes: Tensor | None
    averages: Tensor | None
    mass: Tensor | None = None

    @classmethod
    def of(
        cls,
        values: Tensor,
        side: TileSide,
        temperature: float,
        slopes: Tensor | None,
        mass: Tensor | None = None,
    ) -> SolvedMeans:
        """From values and slopes; slopes None if no gradient is wanted.

        Collective: with slopes one all-gather over the group of 8 bytes per student row.
        """
        if slopes is None:
            return cls(values, side, temperature, None, None, mass)
        averages = torch.zeros(len(side.raw), dtype=torch.float64, device=values.device)
        for block in side.blocks():
            product = side.probabilities(block, temperature)
            product.mul_(slopes.index_select(0, side.chunks[block]))
            averages[block] = row_sums(product)
        averages = gather_ranks(averages, side.group).sum(0)
        return cls(values, side, temperature, slopes, averages, mass)

    def add_gradient(self, weights: Tensor, gradient: TileGradient) -> None:
        """See `SolvedTerm`."""
        assert self.slopes is not None, "solved without a gradient"
        assert self.averages is not None
        side, out = self.side, gradient.logits
        of_chunks = (weights / (side.lengths * self.temperature)).to(out.dtype)
        factors = of_chunks.index_select(0, side.chunks).unsqueeze(1)
        averages = self.averages.to(out.dtype).unsqueeze(1)
        for block in side.blocks():
            bracket = self.slopes.index_select(0, side.chunks[block]).sub_(averages[block])
            part = side.probabilities(block, self.temperature).mul_(bracket).mul_(factors[block])
            out[block].add_(clear_rows_(part, factors[block] == 0))
