"""Losses between tokenizers from hidden states: sums, memory, and the agreement with logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_distill.ops.aligned.columns import CommonColumns
from megatron_distill.ops.aligned.executor import (
    AlignedLinear,
    LabelLoss,
    WeightedTerm,
    aligned_divergence,
    aligned_linear,
)
from megatron_distill.ops.aligned.likelihood import LikelihoodTerm
from megatron_distill.ops.aligned.merged_vocabulary import CommonTerm
from megatron_distill.ops.aligned.tile import AlignedTerm
from megatron_distill.ops.divergences import WeightedDivergence, divergence_named
from megatron_distill.ops.fused_linear import Partition
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.signals import DenseLogits, HiddenState
from tests.reference.cross_tokenizer import AlignedProblem
from tests.reference.distillation import row_error
from tests.reference.tracing import traced
from tests.support.aligned_losses import aligned_rows

KL = WeightedDivergence(divergence_named("forward_kl"), 1.0, 1.0)


def terms_for(problem: AlignedProblem) -> tuple[AlignedTerm, ...]:
    shards = [VocabShard(len(one), 0, len(one)) for one in (problem.weight, problem.teacher_weight)]
    columns = CommonColumns.of(*problem.ids, shards[:1], shards[1:], 0)
    return (
        LikelihoodTerm("likelihood", divergence_named("reverse_kl")),
        CommonTerm("common", columns, KL),
        CommonTerm("top_k", columns, KL, 4),
    )


def work_for(problem: AlignedProblem, tile_tokens: int = 6) -> AlignedLinear:
    label_weights = (torch.arange(len(problem.hidden)) % 3).to(problem.hidden.dtype) / 10
    rows = aligned_rows(problem, label_weights, tile_tokens=tile_tokens)
    weights = torch.linspace(0, 1, problem.at.count)
    terms = [WeightedTerm(term, 1.0 + i, weights) for i, term in enumerate(terms_for(problem))]
    return AlignedLinear(rows, tuple(terms), LabelLoss(label_weights, 0.5))


def from_logits(problem: AlignedProblem, student: HiddenState, work: AlignedLinear) -> Tensor:
    """The same total from the losses per chunk on the student's logits."""
    logits = student.outputs(lambda values: values, student.width) * student.logit_scale
    if student.logit_softcap is not None:
        logits = student.logit_softcap * torch.tanh(logits / student.logit_softcap)
    labels = work.rows.student_labels.unsqueeze(1)
    log_probs = logits.log_softmax(1).gather(1, labels).squeeze(1)
    total = -(work.label_loss.weights * log_probs).sum() * work.label_loss.coefficient
    for one in work.terms:
        values = aligned_divergence(DenseLogits(logits), work.rows, one.term)
        total = total + one.coefficient * (values * one.weights).sum()
    return total


@pytest.mark.parametrize(
    ("tile_tokens", "rule"),
    [(1, (3.0, 0.5)), (6, (None, 1.0)), (6, (3.0, 0.5)), (100, (None, 1.0))],
)
def test_total_and_gradients_equal_those_from_logits(
    tile_tokens: int, rule: tuple[float | None, float]
) -> None:
    problem = AlignedProblem.random(dtype=torch.float64)
    work = work_for(problem, tile_tokens)
    leaves = [problem.hidden, problem.weight, torch.randn(len(problem.weight)).double()]
    found, expected = [], []
    for results, function in (
        (found, lambda student: aligned_linear(student, work)[0]),
        (expected, lambda student: from_logits(problem, student, work)),
    ):
        hidden, weight, bias = (leaf.clone().requires_grad_() for leaf in leaves)
        total = function(HiddenState(hidden, weight, *rule, bias))
        results += [total.detach(), *torch.autograd.grad(total * 2, (hidden, weight, bias))]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


def test_sums_are_split_by_part() -> None:
    problem = AlignedProblem.random()
    work = work_for(problem)
    student = HiddenState(problem.hidden, problem.weight)
    _, sums = aligned_linear(student, work)
    chunk_parts = torch.arange(problem.at.count) % 2
    row_parts = torch.arange(len(problem.hidden)) % 2
    split = replace(work, chunk_parts=Partition(chunk_parts, 3), row_parts=Partition(row_parts, 3))
    _, by_part = aligned_linear(student, split)
    assert by_part.shape == (4, 4)
    torch.testing.assert_close(by_part[:, 0], sums)
    torch.testing.assert_close(by_part[:, 1:].sum(1), sums)
    assert not by_part[:, 3].any()
    # A part's sum is that of its weights alone.
    alone = replace(
        work,
        terms=tuple(replace(one, weights=one.weights * (chunk_parts == 1)) for one in work.terms),
    )
    torch.testing.assert_close(aligned_linear(student, alone)[1][1:], by_part[1:, 2])


def test_weight_gradient_is_added_to_a_given_sum() -> None:
    problem = AlignedProblem.random()
    hidden, weight = problem.hidden.requires_grad_(), problem.weight.requires_grad_()
    total, _ = aligned_linear(HiddenState(hidden, weight), work_for(problem))
    expected, answer = torch.autograd.grad(total, (weight, hidden))
    given = torch.ones_like(weight)
    work = replace(work_for(problem), weight_gradient_sum=given)
    total, _ = aligned_linear(HiddenState(hidden, weight), work)
    total.backward(retain_graph=True)
    assert weight.grad is None
    torch.testing.assert_close(given - 1, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad, answer)
    with pytest.raises(RuntimeError, match="weight_gradient_sum already"):
        (total * 2).backward()


def test_rows_without_weight_may_hold_anything() -> None:
    """Rows in no chunk without a label, and chunks of weight zero."""
    problem = AlignedProblem.random()
    work = work_for(problem)
    idle = (problem.at.student_chunks == 0) | (problem.at.student_chunks == -1)
    label_weights = work.label_loss.weights.masked_fill(idle, 0.0)
    work = replace(work, label_loss=LabelLoss(label_weights, 0.5))
    results = []
    for value in (0.0, torch.nan):
        hidden = problem.hidden.masked_fill(idle.unsqueeze(1), value).requires_grad_()
        total, _ = aligned_linear(HiddenState(hidden, problem.weight), work)
        total.backward()
        results.append((total.detach(), hidden.grad))
    assert bool(results[0][0].isfinite())
    for zero, nan in zip(*results, strict=True):
        torch.testing.assert_close(nan, zero, rtol=1e-5, atol=1e-8)
    assert not results[1][1][idle].any()


def test_memory_depends_on_the_tile_not_on_the_number_of_chunks() -> None:
    peaks = []
    for chunks in (10, 40):
        problem = AlignedProblem.random(chunks, sizes=(800, 600), common_tokens=400)
        work = work_for(problem, tile_tokens=16)
        leaves = problem.hidden.requires_grad_(), problem.weight.requires_grad_()
        work = replace(work, weight_gradient_sum=torch.zeros_like(problem.weight))
        trace = traced(
            lambda one=work, both=leaves: aligned_linear(HiddenState(*both), one)[0].backward(),
            problem.teacher_hidden,
            problem.teacher_weight,
        )
        peaks.append(trace.peak_bytes)
    # Four times the rows: only gradients and numbers per row grow.
    assert peaks[1] < 1.25 * peaks[0]


def test_gradient_in_bf16_is_that_of_its_logits() -> None:
    problem = AlignedProblem.random(dtype=torch.bfloat16)
    found, exact = [], []
    for results, dtype in ((found, torch.bfloat16), (exact, torch.float64)):
        for term in terms_for(problem):
            student, teacher = problem.logits
            leaf = student.to(dtype).requires_grad_()
            rows = replace(work_for(problem).rows, teacher=DenseLogits(teacher.to(dtype)))
            values = aligned_divergence(DenseLogits(leaf), rows, term)
            results.append((values.detach().double(), *torch.autograd.grad(values.sum(), leaf)))
    for (values, gradient), (oracle, answer) in zip(found, exact, strict=True):
        torch.testing.assert_close(values, oracle, rtol=1e-6, atol=0)
        assert row_error(gradient, answer) < 2**-8
