"""The balanced total and its gradient, against the formula by autograd in float64."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from itertools import product

import pytest
import torch

from megatron_distill.losses import (
    BalanceScales,
    BalanceState,
    LossWeights,
    RatioBalance,
    RawLosses,
    scaled_weights,
)
from megatron_distill.ops.factors import Factor, is_zero
from tests.reference.balancing import balanced_total

TERM_WEIGHTS = (0.3, 2.0)


@pytest.mark.parametrize(("alpha", "clamp"), [(1.0, None), (0.5, None), (1.0, 4.0)])
def test_features_are_scaled_to_divergences_and_both_to_the_task(
    alpha: float, clamp: float | None
) -> None:
    point = torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64, requires_grad=True)
    ce = point.square().sum() + 2.0
    terms = [point.exp().sum() * 0.05, (point[0] - point[1]).square()]
    features = [(point - 1).square().mean() * 90, point.cos().sum() + 4]
    own = LossWeights(0.8, TERM_WEIGHTS, (0.1, 1.5))
    expected = balanced_total(
        ce,
        terms,
        features,
        ce_weight=own.ce,
        term_weights=own.terms,
        feature_weights=own.features,
        alpha=alpha,
        clamp=clamp or math.inf,
    )
    (gradient,) = torch.autograd.grad(expected, point, retain_graph=True)

    raw = RawLosses(
        float(ce.detach()),
        tuple(float(loss.detach()) for loss in terms),
        tuple(float(loss.detach()) for loss in features),
    )
    scales = RatioBalance(clamp=clamp).scales(raw, own)
    weights = scaled_weights(own, alpha=alpha, scales=scales)
    ours = weights.ce * ce
    for weight, loss in zip((*weights.terms, *weights.features), (*terms, *features), strict=True):
        ours = ours + weight * loss
    (found,) = torch.autograd.grad(ours, point)
    assert float(ours.detach()) == pytest.approx(float(expected.detach()), rel=1e-13)
    assert float((found - gradient).abs().max()) < 1e-12 * float(gradient.abs().max())
    assert scales.feature != 1.0
    assert scales.feature >= 1 / (clamp or math.inf)


def test_weights_within_divergences_and_within_features_stay_multipliers() -> None:
    raw = RawLosses(2.0, (0.5, 0.25), (8.0, 4.0))
    weights = LossWeights(1.0, (1.0, 3.0), (1.0, 2.0))
    scales = RatioBalance().scales(raw, weights)
    scaled = scaled_weights(weights, alpha=0.5, scales=scales)
    # KD = 0.5 + 0.75, F = 8 + 8, s_f = 1.25 / 16, kd = 2.5, s_k = 0.8.
    assert scales == BalanceScales(feature=1.25 / 16, kd=0.8)
    assert scaled.terms == pytest.approx((0.4, 1.2))
    assert scaled.features == pytest.approx((0.4 * 1.25 / 16, 0.8 * 1.25 / 16))
    assert scaled.ce == 1.0


def test_one_scale_of_the_global_batch_is_not_a_mean_of_micro_batches() -> None:
    """Losses of two micro-batches with the same number of tokens: CE 2 and 1, KD 0.5 and 1."""
    own, balance = LossWeights(1.0, (1.0,)), RatioBalance()
    both = balance.scales(RawLosses((2.0 + 1.0) / 2, ((0.5 + 1.0) / 2,)), own)
    each = [balance.scales(RawLosses(ce, (kd,)), own).kd for ce, kd in ((2.0, 0.5), (1.0, 1.0))]
    assert both.kd == pytest.approx(2.0, rel=1e-7)
    assert each == pytest.approx([4.0, 1.0], rel=1e-7)


def test_a_size_of_zero_scales_nothing() -> None:
    own = LossWeights(1.0, (1.0,), (1.0,))
    balance = RatioBalance()
    # Student equal to teacher: nothing that could be infinite, and the features go on alone.
    assert balance.scales(RawLosses(2.0, (0.0,), (0.0,)), own) == BalanceScales(1.0, 1.0)
    assert balance.scales(RawLosses(2.0, (0.0,), (4.0,)), own) == BalanceScales(1.0, 0.5)
    assert balance.scales(RawLosses(2.0, (0.5,), (0.0,)), own) == BalanceScales(1.0, 4.0)
    # No token has a label: distillation is not scaled to nothing.
    assert balance.scales(RawLosses(0.0, (0.5,), (0.0,)), own) == BalanceScales(1.0, 1.0)


@pytest.mark.parametrize("tiny", [5e-324, 1e-300, 1e-30, 1e-12, 1e-9])
def test_a_tiny_loss_is_held_by_epsilon_and_clamp(tiny: float) -> None:
    own = LossWeights(1.0, (1.0,))
    raw = RawLosses(2.0, (tiny,))
    assert RatioBalance().scales(raw, own).kd == 2.0 / 1e-8
    assert RatioBalance(epsilon=1e-3).scales(raw, own).kd == 2.0 / 1e-3
    assert RatioBalance(clamp=50.0).scales(raw, own).kd == 50.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_non_finite_losses_give_finite_weights(wrong: float) -> None:
    own = LossWeights(1.0, (1.0,), (1.0,))
    sizes = (2.0, 0.5, 4.0)
    for place in range(3):
        ce, term, feature = (wrong if place == one else sizes[one] for one in range(3))
        raw = RawLosses(ce, (term,), (feature,))
        assert not raw.is_finite
        assert RatioBalance().scales(raw, own) == BalanceScales(1.0, 1.0)


def test_the_clamp_holds_on_both_sides() -> None:
    own = LossWeights(1.0, (1.0,))
    for ce, kd in product((1e-3, 1.0, 1e3), repeat=2):
        scale = RatioBalance(clamp=10.0).scales(RawLosses(ce, (kd,)), own).kd
        assert scale == pytest.approx(min(max(ce / kd, 0.1), 10.0))


def test_the_running_mean_is_the_weighted_mean_of_all_steps() -> None:
    decay = 0.9
    state = BalanceState()
    assert state.mean(decay=decay) is None
    seen: list[float] = []
    for step in range(12):
        value = 1.0 + 0.7 * math.sin(step)
        seen.append(value)
        raw = RawLosses(value, (2 * value,), (3 * value,))
        state = state.updated(raw, measure="magnitude", decay=decay)
        shares = [decay ** (len(seen) - 1 - index) for index in range(len(seen))]
        expected = sum(map(float.__mul__, shares, seen)) / sum(shares)
        mean = state.mean(decay=decay)
        assert mean.ce == pytest.approx(expected, rel=1e-12)
        assert mean.terms == pytest.approx((2 * expected,), rel=1e-12)
        assert mean.features == pytest.approx((3 * expected,), rel=1e-12)


def test_without_decay_the_mean_is_the_last_step_to_the_bit() -> None:
    state = BalanceState()
    for value in (0.1, 1e30, 1 / 3):
        raw = RawLosses(value, (value / 7,))
        state = state.updated(raw, measure="magnitude", decay=0.0)
        assert state.mean(decay=0.0) == raw


def test_a_step_that_is_not_finite_leaves_the_mean_alone() -> None:
    state = BalanceState().updated(RawLosses(1.0, (2.0,)), measure="magnitude", decay=0.5)
    for wrong in (RawLosses(math.nan, (1.0,)), RawLosses(1.0, (math.inf,))):
        assert state.updated(wrong, measure="magnitude", decay=0.5) is state


def test_a_state_survives_a_file_to_the_bit() -> None:
    state = BalanceState()
    assert BalanceState.from_dict(json.loads(json.dumps(state.as_dict()))) == state
    for value in (1 / 3, 2 / 7):
        state = state.updated(RawLosses(value, (value,)), measure="magnitude", decay=0.99)
    assert BalanceState.from_dict(json.loads(json.dumps(state.as_dict()))) == state
    with pytest.raises(KeyError):
        BalanceState.from_dict({"count": 3})


def test_a_state_belongs_to_its_losses() -> None:
    state = BalanceState().updated(RawLosses(1.0, (2.0,)), measure="magnitude", decay=0.5)
    assert state.fits("magnitude", terms=1, features=0)
    assert not state.fits("gradient_norm", terms=1, features=0)
    assert not state.fits("magnitude", terms=2, features=0)
    assert not state.fits("magnitude", terms=1, features=1)
    assert BalanceState().fits("gradient_norm", terms=5, features=3)


def test_weights_and_losses_are_as_many() -> None:
    with pytest.raises(ValueError, match="zip"):
        RatioBalance().scales(RawLosses(1.0, (1.0, 2.0)), LossWeights(1.0, (1.0,)))


def on_device(raw: RawLosses) -> RawLosses:
    """The same losses as scalars of a device."""
    return raw.replaced([torch.tensor(size, dtype=torch.float64) for size in raw.sizes])


def numbers(factors: Sequence[Factor]) -> list[float]:
    return [float(one) for one in factors]


@pytest.mark.parametrize("clamp", [None, 4.0])
def test_scalars_of_the_device_have_the_bits_of_the_host(clamp: float | None) -> None:
    own, ratios = LossWeights(0.8, (0.3, 0.0), (0.1, 1.5)), RatioBalance(clamp=clamp)
    state, rng = BalanceState(), random.Random(3)
    sizes = [[rng.lognormvariate(0, 3) for _ in range(5)] for _ in range(40)]
    sizes += [[one if place else wrong for place, one in enumerate(sizes[0])]
              for wrong in (0.0, math.nan, math.inf)]  # fmt: skip
    sizes += [[2.0, 0.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 1.0, 0.0], [2.0, 1e-300, 0.0, 1.0, 3.0]]
    for ce, *others in sizes:
        raw = RawLosses(ce, tuple(others[:2]), tuple(others[2:]))
        after = state.updated(raw, measure="magnitude", decay=0.7)
        mean = after.mean(decay=0.7) if raw.is_finite else raw
        ahead = state.advanced(on_device(raw), measure="magnitude", decay=0.7).mean(decay=0.7)
        expected, found = ratios.scales(mean, own), ratios.scales(ahead, own)
        assert (found.feature, found.kd) == (expected.feature, expected.kd)
        assert isinstance(found.kd, torch.Tensor)
        weights, wanted = (
            scaled_weights(own, alpha=0.6, scales=scales) for scales in (found, expected)
        )
        assert numbers(weights.terms) == numbers(wanted.terms)
        assert numbers(weights.features) == numbers(wanted.features)
        assert weights.terms[1] == 0.0
        assert not isinstance(weights.terms[1], torch.Tensor)  # so that it is left out
        without = scaled_weights(own, alpha=0.0, scales=found)
        assert all(map(is_zero, (*without.terms, *without.features)))
        state = after


def test_losses_of_the_device_without_features_or_divergences_scale_nothing() -> None:
    ratios = RatioBalance()
    assert ratios.scales(on_device(RawLosses(2.0, (0.5,))), LossWeights(1.0, (1.0,))).feature == 1.0
    alone = ratios.scales(on_device(RawLosses(2.0, (), (4.0,))), LossWeights(1.0, (), (1.0,)))
    assert (alone.feature, float(alone.kd)) == (1.0, 0.5)
