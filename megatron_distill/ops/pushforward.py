"""The one gradient identity: from slopes on probabilities to gradients on logits.

With ``q = softmax(z / T)`` and a loss ``sum_i l(p_i, q_i)`` of slope ``s = dl/dq``,

    dL/dz_j = (1/T) q_j (s_j - sum_i q_i s_i) = (1/T) (q_j sum_i pull_i - pull_j),   pull = -q s.

Cross-entropy is the same with a one-hot pull. Ratios p/q are never formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distill.ops.divergence import WeightedDivergence
from megatron_distill.ops.statistics import Sweep
from megatron_distill.ops.vocab import VocabShard

__all__ = ["SoftmaxWeights", "push_forward_", "softmax_weights"]


@dataclass(frozen=True)
class SoftmaxWeights:
    """How the terms at one temperature weigh the tokens in the gradient, ``[N, 1]`` each.

    Attributes:
        temperature: of the student's softmax.
        student: weight of the student's probabilities: the pulls' totals.
        pulls: each divergence and the weight of its pull.
        label: column of each label on this shard and the weight there (zero elsewhere), or None.
        sparse: whether a weight may be zero.
    """

    temperature: float
    student: Tensor
    pulls: tuple[tuple[WeightedDivergence, Tensor], ...]
    label: tuple[Tensor, Tensor] | None
    sparse: bool

    def rows(self, rows: slice) -> SoftmaxWeights:
        """The weights of some tokens."""
        label = None if self.label is None else (self.label[0][rows], self.label[1][rows])
        pulls = tuple((term, weight[rows]) for term, weight in self.pulls)
        return SoftmaxWeights(self.temperature, self.student[rows], pulls, label, self.sparse)


def softmax_weights(
    sweep: Sweep,
    divergence_weights: Tensor,
    label_weights: Tensor | None,
    labels: Tensor | None,
    shard: VocabShard,
) -> tuple[SoftmaxWeights, ...]:
    """Weights for each temperature that has a gradient.

    Shapes: all ``[N]``; labels are global ids, given if the label weights are.
    """
    weights: list[SoftmaxWeights] = []
    for temperature in sweep.temperatures:
        label: tuple[Tensor, Tensor] | None = None
        student = torch.zeros_like(divergence_weights).unsqueeze(1)
        if temperature == 1.0 and label_weights is not None and labels is not None:
            student = label_weights.unsqueeze(1)
            owned = torch.where(shard.owns(labels), label_weights, 0.0)
            label = shard.local(labels).unsqueeze(1), owned.unsqueeze(1)
        pulls: list[tuple[WeightedDivergence, Tensor]] = []
        for term in sweep.terms:
            if term.temperature == temperature:
                weight = (divergence_weights * (term.coefficient / temperature)).unsqueeze(1)
                pulls.append((term, weight))
                student = student + weight * term.divergence.pull_total
        if pulls or label is not None:
            sparse = _may_be_zero(student, *(weight for _, weight in pulls))
            weights.append(SoftmaxWeights(temperature, student, tuple(pulls), label, sparse))
    return tuple(weights)


def push_forward_(
    student: Tensor,
    student_weight: Tensor,
    student_factor: Tensor,
    pulls: Sequence[tuple[Tensor, Tensor, Tensor]],
    *,
    sparse: bool,
) -> Tensor:
    """Overwrite ``student`` with ``weight * factor * student`` minus the same of each pull.

    Shapes: exponentials ``[N, V]``, weights and factors (what makes exponentials probabilities)
    ``[N, 1]``. The pulls are overwritten as well.

    If ``sparse``, a row of weight zero counts as zero whatever stands in it. Equal rows with equal
    weights give exactly zero: the products are rounded before they are subtracted, which a fused
    multiply-add would not do.
    """
    _scale_rows_(student, student_weight, student_factor, sparse)
    for pull, weight, factor in pulls:
        student.sub_(_scale_rows_(pull, weight, factor, sparse))
    return student


def _scale_rows_(values: Tensor, weight: Tensor, factor: Tensor, sparse: bool) -> Tensor:
    values.mul_(weight * factor)
    if not sparse:
        return values
    # Zero times NaN is NaN.
    unused = weight == 0
    if values.device.type != "cpu":
        return values.masked_fill_(unused, 0.0)
    return values.index_fill_(0, unused.squeeze(1).nonzero().squeeze(1), 0.0)


def _may_be_zero(*weights: Tensor) -> bool:
    """Whether a weight is zero; a GPU is not asked, since the answer would be waited for."""
    return any(weight.device.type != "cpu" or bool((weight == 0).any()) for weight in weights)
