"""The gradient identity against autograd; rows sum to zero; exact zeros; NaN in unused rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distill.ops import VocabShard
from megatron_distill.ops.divergence import WeightedDivergence, divergence_named
from megatron_distill.ops.pushforward import push_forward_, softmax_weights
from megatron_distill.ops.statistics import Sweep

KL = divergence_named("forward_kl")


def pushed(
    student: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Gradient of weights * KL through probabilities, as the executors apply the identity."""
    sweep = Sweep(("student", "teacher"), (WeightedDivergence(KL, temperature, 1.0),), full=False)
    (softmax,) = softmax_weights(sweep, weights, None, None, VocabShard(9, 0, 9))
    ones = torch.ones(len(weights), 1, dtype=student.dtype)
    q, p = (student / temperature).softmax(1), (teacher / temperature).softmax(1)
    pulls = [(p, weight, ones) for _, weight in softmax.pulls]
    return push_forward_(q, softmax.student, ones, pulls, sparse=softmax.sparse)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), temperature=st.sampled_from([0.5, 1.0, 2.0, 4.0]))
def test_identity_equals_autograd_and_rows_sum_to_zero(seed: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, 6, 9, generator=generator, dtype=torch.float64)
    weights = torch.rand(6, generator=generator, dtype=torch.float64)
    weights[2] = 0
    leaf = student.clone().requires_grad_()
    log_p = (teacher / temperature).log_softmax(1)
    value = log_p.exp() * (log_p - (leaf / temperature).log_softmax(1))
    (expected,) = torch.autograd.grad((weights * value.sum(1)).sum(), leaf)
    gradient = pushed(student, teacher, weights, temperature)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)
    assert float(gradient.sum(1).abs().max()) < 1e-15


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_models_have_exactly_no_gradient(dtype: torch.dtype) -> None:
    logits = torch.randn(64, 9, dtype=dtype, generator=torch.Generator().manual_seed(3))
    weights = torch.rand(64, dtype=dtype, generator=torch.Generator().manual_seed(4))
    assert not pushed(logits, logits.clone(), weights, 3.0).any()


def test_unused_rows_are_zero_even_if_nothing_in_them_is_finite() -> None:
    student, teacher = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(5))
    student[1], teacher[1], teacher[2] = torch.nan, torch.inf, torch.nan
    weights = torch.tensor([1.0, 0.0, 0.0, 2.0])
    gradient = pushed(student, teacher, weights, 1.0)
    assert not gradient[1:3].any()
    assert gradient[[0, 3]].any(1).all()


def test_temperatures_share_nothing_and_labels_belong_to_temperature_one() -> None:
    terms = tuple(WeightedDivergence(KL, value, 3.0) for value in (2.0, 1.0))
    sweep = Sweep(("student", "teacher"), terms, full=True)
    kd, ce = torch.tensor([1.0, 0.5]), torch.tensor([0.25, 4.0])
    labels = torch.tensor([4, 8])
    first, second = softmax_weights(sweep, kd, ce, labels, VocabShard(9, 4, 8))
    assert (first.temperature, second.temperature) == (1.0, 2.0)
    assert first.label is not None
    assert second.label is None
    assert first.label[0].squeeze(1).tolist()[0] == 0
    assert first.label[1].squeeze(1).tolist() == [0.25, 0.0]  # id 8 is on another shard
    assert first.student.squeeze(1).tolist() == [3.25, 5.5]
    assert second.student.squeeze(1).tolist() == [1.5, 0.75]
    assert [weight.squeeze(1).tolist() for _, weight in second.pulls] == [[1.5, 0.75]]
