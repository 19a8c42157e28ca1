"""The softmax VJP of every loss: slopes on probabilities to gradients on logits.

With ``q = softmax(z / T)`` and a loss ``sum_i l(p_i, q_i)`` of slope ``s = dl/dq``,

    dL/dz_j = (1/T) q_j (s_j - sum_i q_i s_i)

A constant added to s cancels, so slopes are taken relative to that of the student's top token.
Where one token has nearly all of q the bracket is small, and must not be a difference of two
rounded numbers. Forward KL and cross-entropy give ``q`` less a distribution and need no slope.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_distill.ops.divergences import WeightedDivergence
from megatron_distill.ops.factors import scaled
from megatron_distill.ops.statistics import StatisticsSpec
from megatron_distill.ops.topk_divergence import SolvedIdTerm
from megatron_distill.ops.vocab import VocabShard

__all__ = [
    "NonlinearTerm",
    "TailWeight",
    "SoftmaxWeights",
    "clear_rows_",
    "difference_of_rows",
    "scale_rows_",
    "scale_softmax_",
    "softmax_weights",
]


@dataclass(frozen=True)
class NonlinearTerm:
    """A term with slopes.

    Attributes:
        term: the divergence with its coefficient.
        weight: ``[N, 1]`` per token; for a blend, the weight of its reverse KL.
        reference: ``[N, 1]`` the slope at the student's top token; None to read it from the block.
        average: ``[N, 1]`` ``sum q (s - reference)`` over the vocabulary; None to sum it over the
            block.
        is_one: whether the weight is known to be one everywhere.
    """

    term: WeightedDivergence
    weight: Tensor
    reference: Tensor | None = None
    average: Tensor | None = None
    is_one: bool = False


@dataclass(frozen=True)
class TailWeight:
    """A weight ``[N, 1]`` of the student's probabilities outside of the top-k ids.

    The top-k ids are ``columns [N, K]`` of this shard where ``topk_mask``.
    """

    weight: Tensor
    columns: Tensor
    topk_mask: Tensor

    def rows(self, rows: slice | Tensor, dtype: torch.dtype) -> TailWeight:
        """The weight and columns of some tokens."""
        return TailWeight(self.weight[rows].to(dtype), self.columns[rows], self.topk_mask[rows])

    def at_top_k(self, values: Tensor) -> Tensor:
        """``values [N, V]`` at the top-k ids, ``[N, K]``; zero where another rank owns the id."""
        return values.gather(1, self.columns).masked_fill_(~self.topk_mask, 0.0)


@dataclass(frozen=True)
class SoftmaxWeights:
    """How the terms at one temperature weigh the tokens in the gradient.

    Attributes:
        temperature: of the student's softmax.
        student: ``[N, 1]`` weight of the student's probabilities.
        teacher: ``[N, 1]`` weight of the teacher's probabilities, subtracted; None without forward
            KL.
        nonlinear: the terms with slopes.
        scatter: columns ``[N, K]`` of this shard and the gradients added there: labels, top-k ids.
        sparse: whether a weight may be zero.
        tail_weights: of the student's probabilities outside of top-k ids.
    """

    temperature: float
    student: Tensor
    teacher: Tensor | None
    nonlinear: tuple[NonlinearTerm, ...]
    scatter: tuple[tuple[Tensor, Tensor], ...]
    sparse: bool
    tail_weights: tuple[TailWeight, ...] = ()

    @property
    def unused(self) -> Tensor:
        """bool ``[N, 1]``, the tokens without weight in any term between logits or label loss."""
        unused = self.student == 0
        for nonlinear in self.nonlinear:
            unused = unused & (nonlinear.weight == 0)
        return unused

    def rows(self, rows: slice | Tensor, dtype: torch.dtype) -> SoftmaxWeights:
        """The weights of some tokens, in the dtype of their exponentials."""

        def selected(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows].to(dtype)

        return SoftmaxWeights(
            self.temperature,
            self.student[rows].to(dtype),
            selected(self.teacher),
            tuple(
                replace(
                    nonlinear,
                    weight=nonlinear.weight[rows].to(dtype),
                    reference=selected(nonlinear.reference),
                    average=selected(nonlinear.average),
                )
                for nonlinear in self.nonlinear
            ),
            tuple((columns[rows], values[rows].to(dtype)) for columns, values in self.scatter),
            self.sparse,
            tuple(tail.rows(rows, dtype) for tail in self.tail_weights),
        )

    def with_slopes(self, slopes: Mapping[str, tuple[Tensor, Tensor]]) -> SoftmaxWeights:
        """The same, with reference and average ``[N, 1]`` of each term by its key."""
        nonlinear = []
        for one in self.nonlinear:
            reference, average = slopes[one.term.key]
            nonlinear.append(replace(one, reference=reference, average=average))
        return replace(self, nonlinear=tuple(nonlinear))

    def blended(self, blends: Mapping[str, Tensor]) -> SoftmaxWeights:
        """The same, with weights of blends split by ``blends [N, 1]``, the share of forward KL."""
        if not blends:
            return self
        student, teacher, nonlinear = self.student, self.teacher, []
        for one in self.nonlinear:
            blend = blends.get(one.term.key)
            if blend is None:
                nonlinear.append(one)
                continue
            forward = _unless_zero(one.weight, blend)
            student = student + forward
            teacher = forward if teacher is None else teacher + forward
            weight = _unless_zero(one.weight, 1 - blend)
            nonlinear.append(replace(one, weight=weight, is_one=False))
        return replace(self, student=student, teacher=teacher, nonlinear=tuple(nonlinear))


def softmax_weights(
    spec: StatisticsSpec,
    divergence_weights: Tensor,
    label_weights: Tensor | None,
    labels: Tensor | None,
    shard: VocabShard,
    id_terms: Sequence[SolvedIdTerm] = (),
) -> tuple[SoftmaxWeights, ...]:
    """Weights for each temperature that has a gradient.

    Shapes: all ``[N]``. Labels are global ids, required with label weights.
    """
    temperatures = dict.fromkeys(
        (*spec.temperatures, *(one.term.term.temperature for one in id_terms)),
    )
    weights = []
    for temperature in temperatures:
        student = nothing = torch.zeros_like(divergence_weights).unsqueeze(1)
        teacher: Tensor | None = None
        nonlinear: list[NonlinearTerm] = []
        scatter: list[tuple[Tensor, Tensor]] = []
        used: list[Tensor] = []
        tail_weights: list[TailWeight] = []
        if temperature == 1.0 and label_weights is not None and labels is not None:
            student = label_weights.unsqueeze(1)
            owned = torch.where(shard.owns(labels), label_weights, 0.0)
            scatter.append((shard.local(labels).unsqueeze(1), -owned.unsqueeze(1)))
        for term in spec.terms:
            if term.temperature == temperature:
                weight = scaled(divergence_weights, term.coefficient / temperature).unsqueeze(1)
                used.append(weight)
                if term.divergence.is_linear:
                    student = student + weight
                    teacher = weight if teacher is None else teacher + weight
                else:
                    nonlinear.append(NonlinearTerm(term, weight, is_one=_is_one(weight)))
        for one in id_terms:
            if one.term.term.temperature == temperature:
                coefficient, solved = one.term.term.coefficient, one.gradient
                weight = scaled(divergence_weights, coefficient / temperature).unsqueeze(1)
                used.append(weight)
                reach = _unless_zero(weight, solved.slope.unsqueeze(1))
                if solved.topk_mask is None:
                    student = student + reach
                else:
                    tail_weights.append(TailWeight(reach, solved.columns, solved.topk_mask))
                scatter.append((solved.columns, _unless_zero(weight, solved.excess)))
        if used or scatter:
            if student is not nothing:
                used.append(student)
            sparse = _may_be_zero(*used)
            weights.append(
                SoftmaxWeights(
                    temperature,
                    student,
                    teacher,
                    tuple(nonlinear),
                    tuple(scatter),
                    sparse,
                    tuple(tail_weights),
                )
            )
    return tuple(weights)


def _unless_zero(weight: Tensor, values: Tensor) -> Tensor:
    """The product; zero for a token of weight zero, even if its values are not finite."""
    return torch.where(weight == 0, 0.0, weight * values.to(weight.dtype))


def scale_rows_(
    values: Tensor, weight: Tensor, *, sparse: bool, factor: Tensor | None = None
) -> Tensor:
    """Multiply rows ``[N, V]`` by weights and factors ``[N, 1]``, in place.

    If ``sparse``, a row of weight zero becomes zero even if it is not finite. The products are
    rounded before a subtraction, unlike in a fused multiply-add: equal rows with equal weights
    cancel exactly.
    """
    values.mul_(weight if factor is None else weight * factor)
    # Multiplying is not enough: zero times NaN is NaN.
    return clear_rows_(values, weight == 0) if sparse else values


def difference_of_rows(
    left: Tensor, left_factor: Tensor, right: Tensor, right_factor: Tensor, out: Tensor
) -> Tensor:
    """``left left_factor - right right_factor`` of ``[N, V]`` and ``[N, 1]`` into ``out``.

    May overwrite ``left`` and ``right``. In fp64 the products are rounded, see `scale_rows_`; fp32
    is for tokens with different models, and fuses the second product with the subtraction.
    """
    left.mul_(left_factor)
    if left.dtype == torch.float64:
        return torch.sub(left, right.mul_(right_factor), out=out)
    return torch.addcmul(left, right, right_factor, value=-1, out=out)


def clear_rows_(values: Tensor, unused: Tensor) -> Tensor:
    """Set rows of ``[N, V]`` to zero where ``unused [N, 1]``, even if they are not finite."""
    if values.device.type != "cpu":
        return values.masked_fill_(unused, 0.0)
    return values.index_fill_(0, unused.squeeze(1).nonzero().squeeze(1), 0.0)


def scale_softmax_(
    softmax: Tensor,
    weights: SoftmaxWeights,
    workspace: Callable[[str], Tensor],
    *,
    student: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """Multiply the student's softmax ``[N, V]`` by all its weights, in place.

    ``student`` replaces ``weights.student``; ``workspace`` returns a named buffer to overwrite.
    """
    base = weights.student if student is None else student
    sparse = weights.sparse
    if not weights.tail_weights:
        return scale_rows_(softmax, base, sparse=sparse, factor=factor)
    first, *further = weights.tail_weights
    added: Tensor | None = None
    for tail in further:
        part = workspace("tail" if added is None else "further tail").copy_(softmax)
        part.scatter_add_(1, tail.columns, tail.at_top_k(part).neg_())
        scale_rows_(part, tail.weight, sparse=True, factor=factor)
        added = part if added is None else added.add_(part)
    at_top_k = _unless_zero(base if factor is None else base * factor, first.at_top_k(softmax))
    scale_rows_(softmax, base + first.weight, sparse=True, factor=factor)
    # Subtract each top-k entry from itself: exactly zero, so a large tail weight leaves no rounding
    # residue.
    softmax.scatter_add_(1, first.columns, first.at_top_k(softmax).neg_())
    softmax.scatter_add_(1, first.columns, at_top_k)
    return softmax if added is None else softmax.add_(added)


def _is_one(weight: Tensor) -> bool:
    """Whether all are one; False on a GPU, where the test would synchronise the host."""
    return weight.device.type == "cpu" and bool((weight == 1).all())


def _may_be_zero(*weights: Tensor) -> bool:
    """Whether a weight is zero; True on a GPU, where the test would synchronise the host."""
    return any(weight.device.type != "cpu" or bool((weight == 0).any()) for weight in weights)
