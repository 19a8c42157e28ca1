"""The output bias of a head in loss and gradient, against a head whose last feature is always one:
beside soft-caps and scales, over chunks, in bf16, on padded columns, wanted alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import Term
from megatron_distill.ops import VocabShard
from megatron_distill.signals import HiddenState
from tests.reference.distillation import Problem, row_error, solve
from tests.support.objective_runs import Rule, objective


def with_ones(problem: Problem) -> Problem:
    """The last feature of both hidden states is one: the last column of the weights is a bias."""
    student, teacher = problem.hidden_NH.clone(), problem.teacher_hidden.clone()
    student[:, -1] = teacher[:, -1] = 1
    return replace(problem, hidden_NH=student, teacher_hidden=teacher)


def run(
    problem: Problem, terms: list[Term], *, rules: tuple[Rule, Rule], chunk_tokens: int = 8
) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor, ...]]:
    hidden = problem.hidden_NH[:, :-1].clone().requires_grad_()
    weight = problem.weight_GH[:, :-1].clone().requires_grad_()
    bias = problem.weight_GH[:, -1].clone().requires_grad_()
    teacher = HiddenState(
        problem.teacher_hidden[:, :-1].contiguous(),
        problem.teacher_weight[:, :-1].contiguous(),
        *rules[1],
        problem.teacher_weight[:, -1].contiguous(),
    )
    total, report = objective(
        problem,
        hidden,
        weight,
        teacher,
        terms=terms,
        chunk_tokens=chunk_tokens,
        student_softcap=rules[0][0],
        student_scale=rules[0][1],
        student_bias=bias,
    )
    return total.detach(), report, torch.autograd.grad(total, (hidden, weight, bias))


def assert_gradients(found: tuple[Tensor, ...], expected: tuple[Tensor, Tensor], at: float) -> None:
    hidden, weight, bias = found
    assert row_error(hidden, expected[0][:, :-1]) < at
    scale = float(expected[1].abs().max())
    assert float((weight - expected[1][:, :-1]).abs().max()) < at * scale
    assert float((bias - expected[1][:, -1]).abs().max()) < at * scale


@pytest.mark.parametrize(
    ("chunk_tokens", "rules"),
    [(1024, ((None, 1.0), (None, 1.0))), (5, ((3.0, 0.5), (5.0, 1.5)))],
)
def test_value_report_and_gradients(rules: tuple[Rule, Rule], chunk_tokens: int) -> None:
    problem = with_ones(Problem.random(seed=2))
    total, report, found = run(
        problem, [Term(temperature=2.0)], rules=rules, chunk_tokens=chunk_tokens
    )
    answer = solve(problem, [(1.0, 2.0)], student_rule=rules[0], teacher_rule=rules[1])
    assert float(total) == pytest.approx(float(answer.total), rel=1e-6)
    for name, expected in answer.report.items():
        assert float(report[name]) == pytest.approx(float(expected), rel=1e-6), name
    assert_gradients(found, (answer.hidden_gradient, answer.weight_gradient), 2e-6)


def test_bf16_bias_is_summed_up_in_fp32() -> None:
    problem = with_ones(Problem.random(tokens=300, seed=3))
    narrow = Problem.random(tokens=300, seed=3, dtype=torch.bfloat16)
    _, _, found = run(
        with_ones(narrow), [Term()], rules=((None, 1.0), (None, 1.0)), chunk_tokens=16
    )
    answer = solve(problem)
    assert found[2].dtype == torch.bfloat16
    expected = answer.weight_gradient[:, -1]
    # Inputs and logits are rounded to bf16; 19 chunks of such sums would be off by more.
    assert float((found[2] - expected).abs().max()) < 2**-6 * float(expected.abs().max())


def test_padded_columns_have_no_bias() -> None:
    problem = with_ones(Problem.random(vocab=50))
    answer = solve(problem)
    bias = torch.full((56,), torch.nan)
    weight = torch.full((56, 11), torch.nan)
    bias[:50], weight[:50] = problem.weight_GH[:, -1], problem.weight_GH[:, :-1]
    bias.requires_grad_()
    shard = VocabShard(50, 0, 56)
    hidden = problem.hidden_NH[:, :-1]
    total, _ = objective(problem, hidden, weight, shard=shard, student_bias=bias)
    (gradient,) = torch.autograd.grad(total, bias)
    assert float(total.detach()) == pytest.approx(float(answer.total), rel=1e-6)
    expected = answer.weight_gradient[:, -1]
    assert float((gradient[:50] - expected).abs().max()) < 2e-6 * float(expected.abs().max())
    assert not gradient[50:].any()


def test_a_bias_that_does_not_fit_is_named() -> None:
    hidden, weight = torch.zeros(3, 4), torch.zeros(7, 4)
    for bias in (torch.zeros(8), torch.zeros(7, 1), torch.zeros(7, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"HiddenState.bias is torch.* 7 columns"):
            HiddenState(hidden, weight, bias=bias)
