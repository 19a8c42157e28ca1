"""Terms, their schedules, and the weights of tokens."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch

from megatron_distill.losses import ScheduleKind, Term, ValueSchedule, token_weights
from megatron_distill.losses.terms import check_distinct
from tests.reference.distillation import Problem, cross_entropy, solve
from tests.support.divergence_runs import term_of, value_of
from tests.support.objective_runs import objective, run


def test_temperature_squared_enters_coefficients_once() -> None:
    plain, scaled = (
        Term(weight=0.5, temperature=3.0, scale_by_temperature_squared=scale)
        for scale in (False, True)
    )
    assert plain.weighted.coefficient == 0.5
    assert scaled.weighted.coefficient == 4.5
    assert (plain.temperature_factor, scaled.temperature_factor) == (1.0, 9.0)


def test_names_tell_terms_apart_and_repetition_is_refused() -> None:
    terms = [
        Term(),
        Term(temperature=2.0),
        Term(temperature=0.5),
        Term(top_k=8),
        Term(top_k=8, support="raw"),
        Term("js_divergence"),
        Term("js_divergence", parameters={"beta": 0.2}),
    ]
    assert [term.name for term in terms] == [
        "forward_kl",
        "forward_kl_t2",
        "forward_kl_t0.5",
        "forward_kl_top8",
        "forward_kl_top8_raw",
        "js_divergence",
        "js_divergence_beta0.2",
    ]
    check_distinct(terms)
    with pytest.raises(ValueError, match="terms repeat forward_kl_t2; add their weights up"):
        check_distinct([*terms, Term(weight=3.0, temperature=2.0)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"divergence": "kl"}, "unknown divergence 'kl'"),
        ({"temperature": 0.0}, "temperature of forward_kl is 0.0"),
        ({"temperature": math.inf}, "temperature of forward_kl is inf"),
        ({"weight": math.nan}, "weight of forward_kl is nan"),
        ({"top_k": 0}, "top_k of forward_kl is 0"),
        ({"support": "ghost"}, "support of forward_kl is 'ghost'; known: tail, renorm"),
        ({"parameters": {"beta": 0.5}}, "forward_kl takes no parameter, not 'beta'"),
        (
            {"divergence": "adaptive_kl", "parameters": {"alpha": 0.5}},
            "adaptive_kl takes adaptive_alpha, not 'alpha'",
        ),
        (
            {"divergence": "skewed_reverse_kl", "parameters": {"skew_lambda": 1.0}},
            "skew_lambda is 1.0; it must be at least 0 and less than 1",
        ),
    ],
)
def test_impossible_terms_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Term(**values)


LINEAR = {0: 4.0, 10: 4.0, 11: 3.25, 12: 2.5, 13: 1.75, 14: 1.0, 15: 1.0, 10**9: 1.0}
# 1 + 3 (1 + cos(pi x)) / 2 at x = 1/4 and 3/4: cos = +-sqrt(1/2).
COSINE = LINEAR | {11: 3.560660171779821, 12: 2.5, 13: 1.4393398282201786}


@pytest.mark.parametrize(("kind", "expected"), [("linear", LINEAR), ("cosine", COSINE)])
def test_values_by_hand(kind: ScheduleKind, expected: dict[int, float]) -> None:
    schedule = ValueSchedule(4.0, 1.0, kind, steps=4, start_step=10)
    for step, value in expected.items():
        assert schedule.at(step) == pytest.approx(value, rel=1e-15), step
    upwards = ValueSchedule(1.0, 4.0, kind, steps=4, start_step=10)
    for step, value in expected.items():
        assert upwards.at(step) == pytest.approx(5.0 - value, rel=1e-15), step


def test_constant_jumps_once() -> None:
    schedule = ValueSchedule(4.0, 1.0, "constant", start_step=10)
    assert [schedule.at(step) for step in (0, 9, 10, 11)] == [4.0, 4.0, 1.0, 1.0]
    assert {ValueSchedule.unchanging(0.3).at(step) for step in (0, 1, 10**9)} == {0.3}


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_ends_are_exact(kind: ScheduleKind) -> None:
    schedule = ValueSchedule(0.1, 0.7, kind, steps=3)
    assert (schedule.at(0), schedule.at(3)) == (0.1, 0.7)


def test_steps_go_with_the_kind() -> None:
    with pytest.raises(ValueError, match="constant schedule cannot take 3 steps"):
        ValueSchedule(1.0, 2.0, "constant", steps=3)
    with pytest.raises(ValueError, match="linear schedule cannot take 0 steps"):
        ValueSchedule(1.0, 2.0, "linear")


def test_a_term_keeps_its_name_while_its_temperature_changes() -> None:
    names = {
        Term(temperature=temperature, temperatures=(4.0, 1.0), top_k=8).name
        for temperature in (4.0, 2.7, 1.0)
    }
    assert names == {"forward_kl_t4to1_top8"}


def test_terms_whose_temperatures_meet_add_up() -> None:
    problem = Problem.random(seed=2)
    terms = [Term(weight=0.3), Term(weight=2.0, temperature=1.0, temperatures=(4.0, 1.0))]
    total, report, hidden, weight = run(problem, terms)
    answer = solve(problem, [(2.3, 1.0)])
    assert float(total) == pytest.approx(float(answer.total), rel=1e-6)
    for ours, other in ((hidden, answer.hidden_gradient), (weight, answer.weight_gradient)):
        assert float((ours - other).abs().max()) < 2e-6 * float(other.abs().max())
    assert float(report["forward_kl"]) == float(report["forward_kl_t4to1"]) > 0
    assert float(report["kd"]) == pytest.approx(2.3 * float(report["forward_kl"]), rel=1e-6)


def test_weights_are_the_mask_over_the_global_count() -> None:
    mask = torch.tensor([True, False, True])
    weights = token_weights(mask, 8)
    assert weights.dtype is torch.float32
    assert weights.tolist() == [0.125, 0.0, 0.125]
    assert token_weights(torch.tensor([0.25, 1.0]), 1.25).tolist() == pytest.approx([0.2, 0.8])


def test_nothing_counts_anywhere() -> None:
    assert token_weights(torch.tensor([False, False]), 0).tolist() == [0.0, 0.0]


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="global token count is -1"):
        token_weights(torch.tensor([True]), -1)


@pytest.mark.parametrize(
    ("name", "support"),
    [("forward_kl", "dense"), ("js_divergence", "tail"), ("adaptive_kl", "renormalized")],
)
def test_defect_09_the_mean_is_taken_once_however_a_batch_is_split(name: str, support: str) -> None:
    # Torchtune normalised by the tokens of a micro-batch, and then again by those of the batch.
    problem = Problem.random(13, 6, 50)
    mask = problem.kd_weights_N != 0
    weights = token_weights(mask, int(mask.sum()))
    term = term_of(name, support)
    exact = problem.weight_GH.double().requires_grad_()
    student = problem.hidden_NH[mask].double() @ exact.t()
    teacher = (problem.teacher_hidden[mask] @ problem.teacher_weight.t()).double()
    labels = problem.labels_N[mask]
    loss = value_of(term, student, teacher).mean() + cross_entropy(student, labels).mean()
    (gradient,) = torch.autograd.grad(loss, exact)
    # Micro-batches of unequal mask; one of them is empty.
    for cuts in ((13,), (2, 11), (1, 8, 0, 4)):
        head = problem.weight_GH.detach().requires_grad_()
        total = torch.zeros(())
        for part in torch.arange(13).split(list(cuts)):
            given = (getattr(problem, field.name) for field in fields(problem))
            rows = [value[part] if len(value) == 13 else value for value in given]
            micro = Problem(*rows).with_weights(weights[part], weights[part])
            value, _ = objective(micro, micro.hidden_NH, head, terms=[term], chunk_tokens=4)
            value.backward()
            total += value.detach()
        assert float(total) == pytest.approx(float(loss.detach()), rel=1e-6)
        torch.testing.assert_close(head.grad.double(), gradient, rtol=1e-6, atol=2e-6)
