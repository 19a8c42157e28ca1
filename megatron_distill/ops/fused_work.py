"""What the chunked executor is to find: everything of an objective but the student's tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.classes import Model
from megatron_distill.ops.divergence import WeightedDivergence
from megatron_distill.ops.kept_plan import KeptPlan
from megatron_distill.ops.logits import GivenLogits, LinearHead, Rows
from megatron_distill.ops.partition import Partition
from megatron_distill.ops.sweep import Sweep
from megatron_distill.ops.vocab import VocabShard

__all__ = ["FusedLinear"]


@dataclass(frozen=True)
class FusedLinear:
    """Everything about the objective but the student's two tensors.

    Attributes:
        teacher: logits over the same columns, or a head that makes them; None without a teacher.
        labels: ``[N]`` global ids.
        ce_weights: ``[N]``, mask and normalisation of the label loss.
        kd_weights: ``[N]``, mask and normalisation of the divergences.
        ce_coefficient: constant factor of the label loss.
        terms: the divergences between logits with their coefficients.
        kept: the divergences on kept ids.
        chunk_tokens: most tokens whose logits exist at once.
        shard: this rank's columns.
        group: the ranks that hold the other columns; None if there are no others.
        rows: ``[n]`` int64, the tokens with a weight in order; None to look for them, which waits
            for the device.
        partition: of the tokens, where each part is to have sums of its own.
        weight_gradient_sum: ``[V, H]`` fp32 (fp64), what the gradient on the weight is added to.
    """

    teacher: LinearHead | GivenLogits | None
    labels: Tensor
    ce_weights: Tensor
    kd_weights: Tensor
    ce_coefficient: float
    terms: tuple[WeightedDivergence, ...]
    kept: tuple[KeptPlan, ...]
    chunk_tokens: int
    shard: VocabShard
    group: dist.ProcessGroup | None
    rows: Tensor | None = None
    partition: Partition | None = None
    weight_gradient_sum: Tensor | None = None

    @property
    def counted_rows(self) -> Rows:
        """The tokens that take part."""
        if self.rows is not None:
            return Rows.of_indices(self.labels.shape[0], self.rows)
        if self.teacher is None and not self.kept:
            return Rows.of_weights(self.ce_weights)
        return Rows.of_weights(self.ce_weights, self.kd_weights)

    @property
    def models(self) -> tuple[Model, ...]:
        """Whose logits there are."""
        return ("student",) if self.teacher is None else ("student", "teacher")

    @property
    def sweep(self) -> Sweep:
        """What is measured of each chunk."""
        given = isinstance(self.teacher, GivenLogits)
        temperatures = tuple(plan.term.temperature for plan in self.kept if plan.needs_rest)
        return Sweep(self.models, self.terms, True, given, temperatures)

    @property
    def ranked(self) -> int | None:
        """Number of the first plan on kept ids that knows the teacher's most probable one."""
        return next((i for i, plan in enumerate(self.kept) if plan.has_mass), None)

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of the weighted sums that `fused_linear` returns, in order."""
        names = ["ce"]
        if self.teacher is not None:
            names += ["teacher_ce", "teacher_entropy"]
        if self.teacher is not None or self.kept:
            names.append("student_entropy")
        if self.teacher is not None or self.ranked is not None:
            names.append("top1_agreement")
        names += [term.key for term in self.terms]
        for plan in self.kept:
            names += [plan.key, *([plan.mass_key] if plan.has_mass else [])]
        return tuple(names)
