"""The fused objective with several terms of every kind against float64: live teachers, given top-k
and samples, chunks, masked tokens, soft-capped and scaled logits, what is reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import Term
from megatron_distill.signals import DenseLogits, HiddenState, Sampled, TopK
from tests.reference import divergences as oracles
from tests.reference.distillation import Problem, capped, cross_entropy, entropy, row_error
from tests.support.divergence_runs import value_of
from tests.support.objective_runs import Rule, run

BETWEEN = [
    Term("js_divergence", 0.7, 2.0, scale_by_temperature_squared=True),
    Term("skewed_reverse_kl", 1.3, parameters={"skew_lambda": 0.4}),
    Term("adaptive_kl", 0.4, 0.5),
    Term("forward_kl", 0.5, 2.0),
]
KEPT = [
    Term("forward_kl", 0.6, top_k=8),
    Term("reverse_kl", 0.3, 2.0, top_k=5),
    Term("js_divergence", 0.8, top_k=8, support="renormalized"),
    Term("total_variation", 0.2, 2.0, top_k=3, support="raw"),
]
GIVEN = [
    Term("forward_kl", 0.6),
    Term("skewed_forward_kl", 0.3, support="renormalized"),
    Term("squared_hellinger", 2.0, support="raw"),
]
PLAIN: Rule = (None, 1.0)


def expected(
    problem: Problem, terms: Sequence[Term], student_rule: Rule, teacher_rule: Rule
) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
    hidden = problem.hidden_NH.double().requires_grad_()
    weight = problem.weight_GH.double().requires_grad_()
    student = capped(hidden @ weight.t(), *student_rule)
    teacher = capped(
        problem.teacher_hidden.double() @ problem.teacher_weight.double().t(), *teacher_rule
    )
    ce_weights, kd_weights = problem.ce_weights_N.double(), problem.kd_weights_N.double()
    ce = (ce_weights * cross_entropy(student, problem.labels_N)).sum()
    values = {term.name: (kd_weights * value_of(term, student, teacher)).sum() for term in terms}
    kd = sum((term.weight * values[term.name] for term in terms), torch.zeros(()).double())
    gradients = torch.autograd.grad(ce + kd, (hidden, weight))
    report = {
        "ce": ce,
        "kd": kd,
        **values,
        "student_entropy": (kd_weights * entropy(student)).sum(),
        "teacher_entropy": (kd_weights * entropy(teacher)).sum(),
        "top1_agreement": (kd_weights * (student.argmax(1) == teacher.argmax(1))).sum(),
    }
    kept = [term for term in terms if term.top_k is not None]
    if kept:
        first = kept[0]
        assert first.top_k is not None
        log_probs = oracles.topk(teacher, first.top_k, first.temperature)[1]
        report["topk_mass"] = (kd_weights * log_probs.exp().sum(1)).sum()
    return (ce + kd).detach(), report, *gradients


def assert_close(ours: Any, oracle: Any, *, without: Sequence[str] = ()) -> None:
    torch.testing.assert_close(ours[0].double(), oracle[0], rtol=2e-6, atol=0)
    for name, value in oracle[1].items():
        if name not in without:
            torch.testing.assert_close(ours[1][name].double(), value, rtol=4e-6, atol=1e-7)
    assert row_error(ours[2], oracle[2]) < 4e-6
    assert row_error(ours[3], oracle[3]) < 4e-6


CAPS: tuple[Rule, Rule] = ((4.0, 1.5), (6.0, 0.5))


@pytest.mark.parametrize(
    ("terms", "chunk_tokens", "rules"),
    [
        (BETWEEN, 3, CAPS), (BETWEEN, 8, (PLAIN, PLAIN)), (KEPT, 8, (PLAIN, PLAIN)),
        (KEPT, 1024, CAPS), ([*BETWEEN, *KEPT], 3, CAPS), (KEPT[2:3], 3, CAPS),
        (BETWEEN[:1], 1024, CAPS),
    ],
)  # fmt: skip
def test_live_teacher(terms: list[Term], chunk_tokens: int, rules: tuple[Rule, Rule]) -> None:
    problem = Problem.random(vocab=157)
    signal = HiddenState(problem.teacher_hidden, problem.teacher_weight, *rules[1])
    ours = run(problem, terms, signal=signal, chunk_tokens=chunk_tokens, student_rule=rules[0])
    assert_close(ours, expected(problem, terms, *rules))


def test_teacher_as_logits_equals_teacher_as_hidden_state() -> None:
    problem = Problem.random(vocab=157)
    logits = problem.teacher_hidden @ problem.teacher_weight.t()
    terms = [*BETWEEN, *KEPT]
    assert_close(
        run(problem, terms, signal=DenseLogits(logits), chunk_tokens=8),
        expected(problem, terms, PLAIN, PLAIN),
    )


@pytest.mark.parametrize("chunk_tokens", [4, 1024])
def test_given_top_k(chunk_tokens: int) -> None:
    problem = Problem.random(vocab=157)
    teacher = problem.teacher_hidden.double() @ problem.teacher_weight.double().t()
    ids, log_probs, log_tail = oracles.topk(teacher, 6, 1.0)
    signal = TopK(ids, log_probs.float(), log_tail.float())
    ours = run(problem, GIVEN, signal=signal, chunk_tokens=chunk_tokens)
    online = [Term(term.divergence, term.weight, top_k=6, support=term.support) for term in GIVEN]
    oracle = expected(problem, online, PLAIN, PLAIN)
    for given, live in zip(GIVEN, online, strict=True):
        oracle[1][given.name] = oracle[1].pop(live.name)
    assert "teacher_ce" not in ours[1]
    assert_close(ours, oracle, without=["teacher_entropy"])


def test_given_samples() -> None:
    problem = Problem.random(vocab=157)
    teacher = (problem.teacher_hidden @ problem.teacher_weight.t()).softmax(1)
    generator = torch.Generator().manual_seed(3)
    ids = torch.multinomial(teacher, 20, replacement=True, generator=generator)
    ours = run(problem, [Term()], signal=Sampled(ids, torch.ones_like(ids)), chunk_tokens=8)
    hidden = problem.hidden_NH.double().requires_grad_()
    weight = problem.weight_GH.double().requires_grad_()
    log_q = (hidden @ weight.t()).log_softmax(1)
    drawn = -log_q.gather(1, ids).mean(1)
    ce = (
        problem.ce_weights_N.double() * cross_entropy(hidden @ weight.t(), problem.labels_N)
    ).sum()
    kd = (problem.kd_weights_N.double() * drawn).sum()
    gradients = torch.autograd.grad(ce + kd, (hidden, weight))
    torch.testing.assert_close(ours[0].double(), (ce + kd).detach(), rtol=1e-6, atol=0)
    assert row_error(ours[2], gradients[0]) < 2e-6
    assert row_error(ours[3], gradients[1]) < 2e-6
    assert "topk_mass" not in ours[1]


def test_combinations_that_are_not_defined() -> None:
    problem = Problem.random(vocab=50)
    teacher = problem.teacher_hidden @ problem.teacher_weight.t()
    ids, log_probs, log_tail = oracles.topk(teacher, 6, 1.0)
    signal = TopK(ids, log_probs.float(), log_tail.float())
    with pytest.raises(ValueError, match="has top_k 4, but the signal has only 6 ids"):
        run(problem, [Term(top_k=4)], signal=signal, chunk_tokens=8)
    with pytest.raises(ValueError, match="k is 51; it must be between 1 and the vocabulary of 50"):
        run(problem, [Term(top_k=51)])
    with pytest.raises(ValueError, match="reverse_kl is not defined on sampled ids"):
        run(
            problem, [Term("reverse_kl")], signal=Sampled(ids, torch.ones_like(ids)), chunk_tokens=8
        )
