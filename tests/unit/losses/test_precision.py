"""Every divergence in fp32 against float64, per token, on the whole vocabulary and on a live
teacher's top-k.

Models that know nothing of each other: from nearly uniform ones, whose distance is small, to such
that are nearly sure of one token. Students near their teachers, where values are of second order:
noise from 0.1 down to 0.001, spreads from 1 to 4, temperatures from 0.5 to 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import Term
from megatron_distill.signals import DenseLogits
from tests.reference import divergences as oracles
from tests.reference.distillation import Problem, row_error
from tests.reference.logits import logit_pair, neighbours
from tests.support.divergence_runs import (
    NAMES,
    SUPPORTS,
    assert_six_digits,
    differentiated,
    expected,
    signal_of,
    solved,
)
from tests.support.objective_runs import run

ROWS, COLUMNS = 300, 2003
CASES: list[tuple[str, dict[str, float]]] = [
    *((name, {}) for name in NAMES),
    ("js_divergence", {"beta": 0.1}),
    ("js_divergence", {"beta": 0.9}),
    ("skewed_forward_kl", {"skew_lambda": 0.5}),
    ("skewed_forward_kl", {"skew_lambda": 0.9}),
    ("skewed_reverse_kl", {"skew_lambda": 0.5}),
    ("skewed_reverse_kl", {"skew_lambda": 0.9}),
]


@pytest.mark.parametrize(("name", "given"), CASES)
def test_values_and_gradients_of_many_rows(name: str, given: dict[str, float]) -> None:
    for spread, temperature in ((1.0, 4.0), (2.0, 4.0), (2.0, 1.0), (2.0, 0.5), (4.0, 0.5)):
        student, teacher = logit_pair(ROWS, COLUMNS, seed=11, spread=spread)
        assert_six_digits(name, student, teacher, temperature, given)


def near_pairs() -> Iterator[tuple[Tensor, Tensor, float]]:
    """Logits of students near their teachers, and a temperature."""
    for spread, temperature in ((1.0, 1.0), (4.0, 1.0), (2.0, 4.0), (2.0, 0.5)):
        for noise in (0.1, 0.01, 0.001):
            yield *neighbours(64, COLUMNS, noise, spread=spread), temperature
    student, teacher = neighbours(64, COLUMNS, 0.01, spread=2.0)
    yield student + 40.0, teacher, 1.0
    # Rows near and far side by side.
    student[::3] = student[::3].flip(1)
    yield student, teacher, 1.0
    # Half of the vocabulary has next to nothing of the probability and differs by whole logits.
    student, teacher = neighbours(64, COLUMNS, 0.01, spread=1.0)
    for logits in (student, teacher):
        logits[:, 1000:] = (40.0 * logits[:, 1000:] - 30.0).clamp(max=-12.0)
    yield student, teacher, 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "given"), CASES)
def test_a_student_near_its_teacher(name: str, given: dict[str, float]) -> None:
    for student, teacher, temperature in near_pairs():
        assert_six_digits(name, student, teacher, temperature, given)


SUPPORTED = [("renormalized", 0.001), ("tail", 0.1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "given", "support", "noise"),
    [(*case, *SUPPORTED[number % 2]) for number, case in enumerate(CASES)],
)
def test_the_top_k_of_a_live_teacher(
    name: str, given: dict[str, float], support: str, noise: float
) -> None:
    student, teacher = neighbours(64, COLUMNS, noise, spread=2.0)
    ones = torch.ones(64)
    terms: dict[str, Any] = {"divergence": name, "top_k": 32, "support": support, **given}
    found = solved(student, DenseLogits(teacher), ones, **terms)
    kept = oracles.topk(teacher.double(), 32, 1.0)
    expected = differentiated(
        student, lambda leaf: oracles.on_top_k(name, leaf, *kept, support, 1.0, **given), ones
    )
    # The teacher's log-probs are fp32, so that a store replays the loss; log ratios are of the size
    # of the noise.
    bound = (2e-6 if name == "total_variation" else 5e-7) / noise
    assert float(((found[0] - expected[0]).abs() / expected[0]).max()) < bound
    # The slope of total variation jumps where a log ratio is smaller than what is known of it.
    if name != "total_variation":
        assert row_error(found[1], expected[1]) < bound


@pytest.mark.parametrize("beta", [0.1, 0.3, 0.5, 0.9])
def test_jsd_of_models_that_are_apart_in_one_token_alone(beta: float) -> None:
    # From a divergence beside which the rounding of log(m/q) would count to one beside which it
    # would not, with every other token's probability nearly the same under both models.
    tops = torch.logspace(-4, -0.1, 60, dtype=torch.float64)
    teacher, _ = logit_pair(1, COLUMNS, seed=3, spread=0.01)
    teacher = teacher.repeat(len(tops), 1)
    student = teacher.clone()
    student[:, 7] += ((COLUMNS - 1) * tops / (1 - tops)).log().float()
    teacher[:, 7] -= 3.0
    ones = torch.ones(len(tops))
    found = solved(student, DenseLogits(teacher), ones, divergence="js_divergence", beta=beta)
    answer = differentiated(
        student, lambda leaf: oracles.dense("js_divergence", leaf, teacher, 1.0, beta=beta), ones
    )
    for row in (slice(None), *(slice(at, at + 1) for at in range(0, len(tops), 7))):
        alone = solved(
            student[row],
            DenseLogits(teacher[row]),
            ones[row],
            divergence="js_divergence",
            beta=beta,
        )
        assert float(((alone[0] - answer[0][row]).abs() / answer[0][row]).max()) < 1e-6
    assert row_error(found[1], answer[1]) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_defect_13_bf16_logits_do_not_make_bf16_probabilities(name: str) -> None:
    # TRL took log-probabilities in bf16, and their difference is what a divergence is.
    student, teacher = logit_pair(8, 1000, dtype=torch.bfloat16)
    close = (teacher.float() + 0.3 * student.float()).bfloat16()
    for support, temperature, logits in product(SUPPORTS, (1.0, 2.0), (student, close)):
        given = {"divergence": name, "support": support, "temperature": temperature}
        signal = signal_of(support, teacher, temperature=temperature)
        found, _ = solved(logits, signal, torch.ones(8), **given)
        value, _ = expected(logits, signal, torch.ones(8), **given)  # type: ignore[arg-type]
        # A raw sum has terms of both signs, and may be anything, zero included.
        least = 0.1 if support == "raw" else 0.0
        assert found.dtype is torch.float32
        assert float(((found - value).abs() / value.abs().clamp(min=least)).max()) < 1e-5
    # The same formula on log-probabilities in bf16 is wrong by a hundred times that bound.
    log_p, log_q = (logits.log_softmax(1).double() for logits in (teacher, close))
    rounded = oracles.ORACLES[name](log_p, log_q)
    exact = oracles.dense(name, close, teacher, 1.0)
    assert float((rounded / exact - 1).abs().max()) > 1e-3


def test_defect_13_in_the_fused_objective() -> None:
    # The products are bf16, and so are the logits, as the oracle is given them.
    problem = Problem.random(8, 6, 1000, dtype=torch.bfloat16)
    problem = problem.with_weights(torch.zeros(8), torch.full((8,), 1 / 8))
    student = problem.hidden_NH @ problem.weight_GH.t()
    teacher = problem.teacher_hidden @ problem.teacher_weight.t()
    terms = [Term(name) for name in NAMES]
    for signal in (None, DenseLogits(teacher)):
        report = run(problem, terms, signal=signal)[1]
        for name in NAMES:
            value = oracles.dense(name, student, teacher, 1.0).mean()
            assert float(report[name]) == pytest.approx(float(value), rel=1e-6), name
