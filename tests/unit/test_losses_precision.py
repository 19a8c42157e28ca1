"""Every divergence in fp32 against float64, on many rows of models that know nothing of each other:
from nearly uniform ones, whose distance is small, to such that are nearly sure of one token."""

from __future__ import annotations

import pytest
import torch

from megatron_distill.signals import DenseLogits
from tests.reference import divergences as oracles
from tests.reference.distillation import row_error
from tests.reference.logits import logit_pair
from tests.unit.divergence_runs import NAMES, differentiated, solved

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
    ones = torch.ones(ROWS)
    found = solved(
        student, DenseLogits(teacher), ones, divergence=name, temperature=temperature, **given
    )
    expected = differentiated(
        student, lambda leaf: oracles.dense(name, leaf, teacher, temperature, **given), ones
    )
    assert float(((found[0] - expected[0]).abs() / expected[0]).max()) < 1e-6
    assert row_error(found[1], expected[1]) < 1e-6
