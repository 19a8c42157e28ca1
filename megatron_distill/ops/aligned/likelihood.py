"""The binary divergence between both models' probabilities of a chunk's text.

a and b are the log-probabilities of the chunk under student and teacher, each the sum over its
tokens. The classes are the text, ``e^(a/tau)`` and ``e^(b/tau)``, and all other texts (approximate
likelihood matching, Minixhofer et al., arXiv 2503.20083). It is defined on chunks of any number of
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distill.ops.aligned.tile import Tile, TileGradient, TileSide
from megatron_distill.ops.divergences import Divergence
from megatron_distill.ops.row_math import nearness
from megatron_distill.ops.topk_divergence import OnClasses

__all__ = ["LikelihoodTerm"]


@dataclass(frozen=True)
class LikelihoodTerm:
    """Likelihood of each chunk's text under both models.

    Attributes:
        key: name in reports.
        divergence: between the two distributions on two classes.
        tau: temperature of the chunk's probability; larger ones separate improbable texts.
        teacher_log_probs: ``[M]`` log-probabilities of the teacher's labels, if they are known
            without its logits.
    """

    key: str
    divergence: Divergence
    tau: float = 1.0
    teacher_log_probs: Tensor | None = None

    def solve(self, tile: Tile, *, with_gradient: bool) -> SolvedLikelihood:  # noqa: ARG002
        """See `AlignedTerm`.

        Collective: over the group one all-gather of 24 bytes per student row, and one per teacher
        row unless their log-probabilities are known.
        """
        student = tile.student
        log_q = student.sum_rows(student.label_statistics().log_prob)
        log_p = _same_where_close(self._teacher(tile), log_q, student) / self.tau
        log_q = log_q / self.tau
        log_rest = _log_rest(log_q)
        solved = OnClasses(self.divergence, "tail")(
            log_p.unsqueeze(1),
            _log_rest(log_p),
            torch.ones_like(log_p, dtype=torch.bool).unsqueeze(1),
            log_q.unsqueeze(1),
            log_rest,
        )
        # The gradient on the logit of either class is the slope on log q times the probability of
        # the opposite one. The smaller class is the one without cancellation.
        of_text = solved.inside.squeeze(1) / log_rest.exp()
        slopes = torch.where(log_q < log_rest, of_text, -solved.slope) / self.tau
        return SolvedLikelihood(solved.value.clamp(min=0.0), slopes, student)

    def _teacher(self, tile: Tile) -> Tensor:
        """Log-probability of each chunk's text under the teacher, ``[c]`` fp64."""
        if self.teacher_log_probs is None:
            teacher = tile.with_teacher
            return teacher.sum_rows(teacher.label_statistics().log_prob)
        values = self.teacher_log_probs.index_select(0, tile.teacher_rows).double()
        return torch.segment_reduce(
            values, "sum", lengths=tile.teacher_lengths, axis=0, unsafe=True
        )


@dataclass(frozen=True)
class SolvedLikelihood:
    """See `SolvedTerm`; slopes ``[c]`` are on the chunk's log-probability."""

    values: Tensor
    slopes: Tensor
    student: TileSide
    mass: None = None

    def add_gradient(self, weights: Tensor, gradient: TileGradient) -> None:
        """See `SolvedTerm`."""
        slopes = torch.where(weights == 0, 0.0, weights * self.slopes)
        gradient.add_label_slopes(slopes.index_select(0, self.student.chunks))


def _same_where_close(log_p: Tensor, log_q: Tensor, student: TileSide) -> Tensor:
    """The teacher's log-probabilities ``[c]``, or the student's where both differ by rounding.

    Ranks that share two vocabularies in different ways round the sums of equal models differently.
    The error of a row is that of its normaliser, and relative for probabilities near one.
    """
    window = torch.minimum(log_q.abs(), student.lengths.to(log_q.dtype))
    window.mul_(nearness(student.scratch.dtype))
    return torch.where((log_p - log_q).abs() <= window, log_q, log_p)


def _log_rest(log_prob: Tensor) -> Tensor:
    """Log of ``1 - e^log_prob``."""
    return torch.expm1(log_prob.clamp(max=0.0)).neg_().log_()
