"""Every divergence in fp32 against float64 for a student near its teacher, where values are of
second order: logits of a standard deviation from 1 to 4, noise from 0.1 down to 0.001,
temperatures from 0.5 to 4, per token, on the whole vocabulary and on a live teacher's top-k.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_distill.signals import DenseLogits
from tests.reference import divergences as oracles
from tests.reference.distillation import row_error
from tests.reference.logits import neighbours
from tests.support.divergence_runs import NAMES, assert_six_digits, differentiated, solved

ROWS, COLUMNS = 64, 2003
CASES: list[tuple[str, dict[str, float]]] = [
    *((name, {}) for name in NAMES),
    ("js_divergence", {"beta": 0.1}),
    ("js_divergence", {"beta": 0.9}),
    ("skewed_forward_kl", {"skew_lambda": 0.9}),
    ("skewed_reverse_kl", {"skew_lambda": 0.9}),
]


@pytest.mark.parametrize(("name", "given"), CASES)
def test_a_student_near_its_teacher(name: str, given: dict[str, float]) -> None:
    for spread, temperature in ((1.0, 1.0), (4.0, 1.0), (2.0, 4.0), (2.0, 0.5)):
        for noise in (0.1, 0.01, 0.001):
            student, teacher = neighbours(ROWS, COLUMNS, noise, spread=spread)
            assert_six_digits(name, student, teacher, temperature, given)


@pytest.mark.parametrize(("name", "given"), CASES)
def test_rows_near_and_far_side_by_side(name: str, given: dict[str, float]) -> None:
    student, teacher = neighbours(ROWS, COLUMNS, 0.01, spread=2.0)
    student[::3] = student[::3].flip(1)
    assert_six_digits(name, student, teacher, 1.0, given)


@pytest.mark.parametrize(("name", "given"), CASES)
def test_models_alike_but_for_their_unlikely_tokens(name: str, given: dict[str, float]) -> None:
    # Half of the vocabulary has next to nothing of the probability and differs by whole logits.
    student, teacher = neighbours(ROWS, COLUMNS, 0.01, spread=1.0)
    student[:, 1000:] = 40.0 * student[:, 1000:] - 30.0
    teacher[:, 1000:] = 40.0 * teacher[:, 1000:] - 30.0
    student[:, 1000:].clamp_(max=-12.0)
    teacher[:, 1000:].clamp_(max=-12.0)
    assert_six_digits(name, student, teacher, 1.0, given)


def test_a_constant_between_the_models_logits_costs_no_digits() -> None:
    for name in NAMES:
        student, teacher = neighbours(ROWS, COLUMNS, 0.01, spread=2.0)
        assert_six_digits(name, student + 40.0, teacher, 1.0, {})


@pytest.mark.parametrize(("support", "noise"), [("renormalized", 0.001), ("tail", 0.1)])
@pytest.mark.parametrize(("name", "given"), CASES)
def test_the_top_k_of_a_live_teacher(
    name: str, given: dict[str, float], support: str, noise: float
) -> None:
    student, teacher = neighbours(ROWS, COLUMNS, noise, spread=2.0)
    ones = torch.ones(ROWS)
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
