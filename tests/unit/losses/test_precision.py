"""Every divergence in fp32 against float64, on many rows of models that know nothing of each other:
from nearly uniform ones, whose distance is small, to such that are nearly sure of one token."""

from __future__ import annotations

import pytest
import torch

from megatron_distill.signals import DenseLogits
from tests.reference import divergences as oracles
from tests.reference.distillation import row_error
from tests.reference.logits import logit_pair
from tests.support.divergence_runs import NAMES, assert_six_digits, differentiated, solved

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


@pytest.mark.parametrize(
    ("spread", "temperature"), [(1.0, 4.0), (2.0, 4.0), (2.0, 1.0), (2.0, 0.5), (4.0, 0.5)]
)
@pytest.mark.parametrize(("name", "given"), CASES)
def test_values_and_gradients_of_many_rows(
    name: str, given: dict[str, float], spread: float, temperature: float
) -> None:
    student, teacher = logit_pair(ROWS, COLUMNS, seed=11, spread=spread)
    assert_six_digits(name, student, teacher, temperature, given)


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
    expected = differentiated(
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
        assert float(((alone[0] - expected[0][row]).abs() / expected[0][row]).max()) < 1e-6
    assert row_error(found[1], expected[1]) < 1e-6
