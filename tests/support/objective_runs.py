"""Running the fused objective on a problem, for the tests of its values and of its laws."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_distill.losses import Term, fused_linear_objective
from megatron_distill.ops import VocabShard, vocab_parallel_topk
from megatron_distill.ops.fused_linear import Partition
from megatron_distill.signals import HiddenState, Recorded, Signal
from tests.reference.distillation import Problem, cross_entropy, entropy

Rule = tuple[float | None, float]
Result = tuple[Tensor, dict[str, Tensor], Tensor, Tensor]
# On the top-k of a live teacher, or on a store's records of it.
KEPT = (
    Term("forward_kl", 0.6, top_k=8),
    Term("reverse_kl", 0.3, 2.0, top_k=5),
    Term("js_divergence", 0.8, top_k=8, support="renormalized"),
)


def run(
    problem: Problem,
    terms: Sequence[Term] = (Term(),),
    *,
    signal: Signal | None = None,
    chunk_tokens: int = 8,
    upstream: float = 1.0,
    ce_coefficient: float = 1.0,
    student_rule: Rule = (None, 1.0),
    teacher_rule: Rule = (None, 1.0),
    shard: VocabShard | None = None,
    rows: Tensor | None = None,
    partition: Partition | None = None,
) -> Result:
    """Total, report, and the gradients on hidden states and weight."""
    hidden = problem.hidden_NH.detach().requires_grad_()
    weight = problem.weight_GH.detach().requires_grad_()
    if signal is None:
        signal = HiddenState(problem.teacher_hidden, problem.teacher_weight, *teacher_rule)
    total, report = objective(
        problem,
        hidden,
        weight,
        signal,
        terms=terms,
        chunk_tokens=chunk_tokens,
        shard=shard,
        ce_coefficient=ce_coefficient,
        student_softcap=student_rule[0],
        student_scale=student_rule[1],
        rows=rows,
        partition=partition,
    )
    hidden_gradient, weight_gradient = torch.autograd.grad(total * upstream, (hidden, weight))
    return total.detach(), report, hidden_gradient, weight_gradient


def objective(
    problem: Problem,
    hidden: Tensor,
    weight: Tensor,
    signal: Signal | None = None,
    *,
    terms: Sequence[Term] = (Term(),),
    chunk_tokens: int | None = 8,
    is_taught: bool = True,
    **given: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Total and report of a problem, with its own teacher if none else is given.

    `is_taught`: False is without a teacher.
    """
    if signal is None and is_taught:
        signal = HiddenState(problem.teacher_hidden, problem.teacher_weight)
    return fused_linear_objective(
        hidden,
        weight,
        signal,
        problem.labels_N,
        ce_weights=problem.ce_weights_N,
        kd_weights=problem.kd_weights_N,
        terms=terms,
        chunk_tokens=chunk_tokens,
        **given,
    )


def assert_same(ours: Result, other: Result, tolerance: float = 1e-6) -> None:
    assert float((ours[0] - other[0]).abs()) <= tolerance * float(other[0].abs())
    for left, right in zip(ours[2:], other[2:], strict=True):
        assert float((left - right).abs().max()) <= tolerance * float(right.abs().max())


def recorded(problem: Problem, terms: Sequence[Term]) -> Recorded:
    """The store's records of the problem's teacher for these terms, scalars included."""
    logits = problem.teacher_hidden @ problem.teacher_weight.t()
    kept = (
        vocab_parallel_topk(logits, term.top_k or 1, temperature=term.temperature) for term in terms
    )
    double = logits.double()
    label = -cross_entropy(double, problem.labels_N)
    return Recorded(tuple(kept), entropy(double).float(), label.float())
