"""Losses between hidden states, against their definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import FeatureLoss, FeaturePair, Projector, add_gradients, features
from tests.reference.features import distance, projected

CPU = torch.device("cpu")
LOSSES = ("mse", "cosine")


def states(tokens: int, size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, size, generator=generator, dtype=torch.float64).to(dtype)


def some_weights(tokens: int) -> Tensor:
    """Token weights of which some are zero."""
    weights = torch.rand(tokens, generator=torch.Generator().manual_seed(3)) / tokens
    weights[::3] = 0
    return weights


def made_projector(*sizes: int) -> Projector:
    projector = Projector(sizes, device=CPU)
    projector.initialise("p", seed=1)
    with torch.no_grad():
        for bias in projector.biases:
            bias += 0.1 * states(1, len(bias), 8)[0]
    for parameter in projector.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return projector


def defined(
    student: Tensor, teacher: Tensor, weights: Tensor, loss: str, maps: dict[str, Tensor]
) -> Tensor:
    """The sum over tokens, one after another, of those that count."""
    terms = [
        weight.double() * distance(projected(own, maps), other.double(), loss)
        for own, other, weight in zip(student, teacher, weights, strict=True)
        if weight
    ]
    return torch.stack(terms).sum()


@pytest.mark.parametrize(
    ("loss", "inner", "block"),
    [
        ("mse", None, 2**24), ("cosine", None, 40), ("mse", (), 40), ("cosine", (), 2**24),
        ("mse", (7,), 2**24), ("cosine", (7,), 40),
    ],
)  # fmt: skip
def test_value_and_gradients_are_those_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, loss: str, inner: tuple[int, ...] | None, block: int
) -> None:
    monkeypatch.setattr(features, "_BLOCK_NUMBERS", block)  # 40: three tokens at a time
    student, teacher = states(11, 6, 1), states(11, 6 if inner is None else 12, 2)
    projector = None if inner is None else made_projector(6, *inner, 12)
    work = FeatureLoss(loss, teacher, some_weights(11), projector)
    own = student.double().requires_grad_()
    maps = {} if projector is None else dict(projector.named_parameters())
    maps = {name: p.detach().double().requires_grad_() for name, p in maps.items()}
    expected = defined(own, teacher, some_weights(11), loss, maps)
    (2.5 * expected).backward()
    assert float(work.value(student)) == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(
        work.gradient(student, coefficient=2.5).double(), own.grad, atol=1e-7, rtol=1e-5
    )
    for name, parameter in projector.named_parameters() if projector else ():
        torch.testing.assert_close(parameter.grad.double(), maps[name].grad, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "rubbish"),
    [("mse", torch.nan), ("mse", 1e38), ("cosine", torch.nan), ("cosine", torch.inf)],
)
def test_values_of_masked_tokens_change_nothing(loss: str, rubbish: float) -> None:
    student, teacher, weights = states(9, 6, 1), states(9, 10, 2), some_weights(9)
    found = []
    for hold in (0.5, rubbish):
        student[weights == 0], teacher[weights == 0] = hold, hold
        projector = made_projector(6, 10)
        work = FeatureLoss(loss, teacher, weights, projector)
        gradient = work.gradient(student, coefficient=1.0)
        assert not gradient[weights == 0].any()
        gradients = [p.grad for p in projector.parameters() if p.grad is not None]
        found.append([work.value(student), gradient, *gradients])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("loss", LOSSES)
def test_equal_states_have_no_loss_and_no_gradient(loss: str) -> None:
    student = states(5, 8, 1)
    work = FeatureLoss(loss, student.clone(), torch.full((5,), 0.2), None)
    assert float(work.value(student)) == pytest.approx(0.0, abs=2e-7)
    assert work.gradient(student, coefficient=1.0).abs().max() < 1e-7


def test_a_state_of_zeros_has_a_finite_cosine() -> None:
    student, teacher = torch.zeros(2, 4), states(2, 4, 1)
    work = FeatureLoss("cosine", teacher, torch.tensor([0.5, 0.5]), None)
    assert float(work.value(student)) == pytest.approx(1.0)
    assert work.gradient(student, coefficient=1.0).isfinite().all()


@pytest.mark.parametrize("loss", LOSSES)
def test_half_precision_is_computed_with_in_fp32(loss: str) -> None:
    student, teacher = (states(40, 16, seed, torch.bfloat16) for seed in (1, 2))
    weights = some_weights(40)
    work = FeatureLoss(loss, teacher, weights, None)
    expected = defined(student.double(), teacher, weights, loss, {})
    assert float(work.value(student)) == pytest.approx(expected.item(), rel=1e-6)
    assert work.gradient(student, coefficient=1.0).dtype is torch.bfloat16


def test_without_a_counted_token_the_loss_is_zero() -> None:
    work = FeatureLoss("mse", states(3, 4, 1), torch.zeros(3), None)
    assert float(work.value(states(3, 4, 2))) == 0.0
    assert not work.gradient(states(3, 4, 2), coefficient=1.0).any()


def test_a_gradient_is_added_to_the_one_that_comes_back() -> None:
    hidden = states(3, 4, 1).requires_grad_()
    inner = hidden * 2
    other = states(2, 2, 2).requires_grad_()
    passed, second = add_gradients((inner, other), lambda one, two: (one + 1, 5 * two))
    assert torch.equal(passed, inner)
    ((3 * passed).sum() + second.sum()).backward()
    assert torch.equal(hidden.grad, 2 * (3 + (2 * hidden.detach() + 1)))
    assert torch.equal(other.grad, 1 + 5 * other.detach())


def test_projectors_depend_on_seed_and_name_alone_and_keep_the_scale() -> None:
    def drawn(name: str, seed: int) -> Projector:
        projector = Projector((256, 128), device=CPU)
        torch.rand(7)  # the global state of random numbers has no say
        projector.initialise(name, seed=seed)
        return projector

    before = torch.get_rng_state()
    Projector((4, 4), device=CPU).initialise("a", seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    first = drawn("1_2", 1)
    assert torch.equal(first.weights[0], drawn("1_2", 1).weights[0])
    assert not torch.equal(first.weights[0], drawn("1_2", 2).weights[0])
    assert not torch.equal(first.weights[0], drawn("1_3", 1).weights[0])
    assert float(first(states(500, 256, 1)).detach().std()) == pytest.approx(1.0, abs=0.02)


def test_pairs_are_named_by_loss_and_layers() -> None:
    assert FeaturePair(4, 10, "cosine", 0.5).name == "feature_cosine_4_10"


@pytest.mark.parametrize("noise", [0.1, 0.01, 0.001])
def test_states_of_nearly_one_direction_have_six_digits(noise: float) -> None:
    teacher = states(40, 256, 1)
    student = 0.7 * (teacher + noise * states(40, 256, 2))
    for row in range(40):
        own, other = student[row : row + 1], teacher[row : row + 1]
        found = FeatureLoss("cosine", other, torch.ones(1), None)
        leaf = own.double().requires_grad_()
        expected = distance(leaf[0], other[0].double(), "cosine")
        (gradient,) = torch.autograd.grad(expected, leaf)
        expected = expected.detach()
        value = float(found.value(own))
        assert value == pytest.approx(float(expected), rel=1e-6)
        error = (found.gradient(own, coefficient=1.0) - gradient).abs().amax()
        assert float(error) < 1e-6 * float(gradient.abs().amax())
