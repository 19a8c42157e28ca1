"""A weight whose gradients are added up in a buffer of their own, as Megatron's main_grad: what is
in the buffer, what autograd still brings, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import Term
from megatron_distill.ops import VocabShard
from tests.reference.distillation import Problem, row_error, solve
from tests.support.objective_runs import objective, run

HELD = 0.25  # in the buffer before


def summed(
    problem: Problem, buffer: Tensor, *, chunk_tokens: int = 8, shard: VocabShard | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradients that autograd brings for the hidden states and the weight."""
    hidden = problem.hidden_NH.detach().requires_grad_()
    weight = problem.weight_GH.detach().requires_grad_()
    total, _ = objective(
        problem,
        hidden,
        weight,
        chunk_tokens=chunk_tokens,
        shard=shard,
        weight_gradient_sum=buffer,
    )
    total.backward()
    return hidden.grad, weight.grad


def buffer_of(weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(weight.shape, HELD, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "wide", "tolerance", "chunk_tokens"),
    [
        (torch.float32, torch.float32, 1e-6, 7),
        (torch.bfloat16, torch.float32, 2e-2, 7),
        (torch.float64, torch.float64, 1e-13, 1),
        (torch.float64, torch.float64, 1e-13, 1024),
    ],
)
def test_the_gradient_is_added_to_the_buffer(
    dtype: torch.dtype, wide: torch.dtype, tolerance: float, chunk_tokens: int
) -> None:
    problem = Problem.random(dtype=dtype)
    buffer = buffer_of(problem.weight_GH, wide)
    hidden, weight = summed(problem, buffer, chunk_tokens=chunk_tokens)
    answer = solve(problem, [(1.0, 1.0)])
    assert weight is None
    error = (buffer.double() - HELD - answer.weight_gradient).abs().max()
    # The sum with what it held is rounded as well.
    bound = tolerance * float(answer.weight_gradient.abs().max()) + HELD * torch.finfo(wide).eps
    assert float(error) < bound
    assert row_error(hidden, answer.hidden_gradient) < tolerance
    assert torch.equal(hidden, run(problem, chunk_tokens=chunk_tokens)[2])


def test_bf16_gradients_are_not_rounded_to_bf16_where_they_are_added_up() -> None:
    problem = Problem.random(100, 4, 16, dtype=torch.bfloat16)
    buffer = torch.zeros(16, 4)
    summed(problem, buffer, chunk_tokens=1)
    own = run(problem, chunk_tokens=1)[3]
    assert torch.equal(buffer.bfloat16(), own)
    assert not torch.equal(buffer, own.float())


def test_padded_columns_keep_their_values() -> None:
    problem = Problem.random(vocab=203)
    buffer = buffer_of(problem.weight_GH)
    summed(problem, buffer, shard=VocabShard(190, 0, 203))
    assert bool((buffer[:190] != HELD).any())
    assert bool((buffer[190:] == HELD).all())


@pytest.mark.parametrize("tokens", [0, 5])
def test_no_token_adds_nothing(tokens: int) -> None:
    problem = Problem.random(tokens).with_weights(torch.zeros(tokens), torch.zeros(tokens))
    buffer = buffer_of(problem.weight_GH)
    hidden, weight = summed(problem, buffer)
    assert weight is None
    assert not hidden.any()
    assert torch.equal(buffer, buffer_of(problem.weight_GH))


def test_a_weight_that_other_layers_share_still_gets_their_gradient() -> None:
    problem = Problem.random()
    weight = problem.weight_GH.detach().requires_grad_()
    buffer = torch.zeros_like(weight)
    total, _ = objective(problem, problem.hidden_NH, weight, weight_gradient_sum=buffer)
    (total + 3 * weight.sum()).backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 3))
    torch.testing.assert_close(buffer, run(problem)[3], rtol=0, atol=1e-6)


def test_the_bias_is_autograds_as_before() -> None:
    problem = Problem.random()
    biases, gradients = [], []
    for buffer in (None, torch.zeros_like(problem.weight_GH)):
        bias = torch.zeros(problem.weight_GH.shape[0], requires_grad=True)
        weight = problem.weight_GH.detach().requires_grad_()
        total, _ = objective(
            problem,
            problem.hidden_NH,
            weight,
            student_bias=bias,
            weight_gradient_sum=buffer,
        )
        total.backward()
        biases.append(bias.grad)
        gradients.append(weight.grad if buffer is None else buffer)
    assert torch.equal(biases[0], biases[1])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_without_a_gradient_the_buffer_is_left_alone(needs_gradient: bool) -> None:
    problem = Problem.random()
    hidden = problem.hidden_NH.detach().requires_grad_()
    weight = problem.weight_GH.detach().requires_grad_(needs_gradient)
    buffer = buffer_of(weight)
    with torch.set_grad_enabled(not needs_gradient):
        total, _ = objective(problem, hidden, weight, weight_gradient_sum=buffer)
    assert total.requires_grad is not needs_gradient
    if total.requires_grad:
        (2 * total).backward()
        assert hidden.grad is not None
    assert torch.equal(buffer, buffer_of(weight))


@pytest.mark.parametrize("factor", [0.0, 1.001, torch.nan])
def test_a_factor_that_the_buffer_does_not_know_is_refused(factor: float) -> None:
    problem = Problem.random()
    weight = problem.weight_GH.detach().requires_grad_()
    buffer = torch.zeros_like(weight)
    total, _ = objective(problem, problem.hidden_NH, weight, weight_gradient_sum=buffer)
    with pytest.raises(RuntimeError, match=f"weight_gradient_sum.* is {factor:g}, not 1"):
        (total * factor).backward()


@pytest.mark.parametrize("positions", [3, 2**20 - 1, 49_152])
def test_a_factor_and_its_inverse_are_one(positions: int) -> None:
    problem = Problem.random()
    weight = problem.weight_GH.detach().requires_grad_()
    buffer = torch.zeros_like(weight)
    total, _ = objective(problem, problem.hidden_NH, weight, weight_gradient_sum=buffer)
    (total * positions * (1 / positions)).backward()
    torch.testing.assert_close(buffer, run(problem)[3], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "buffer", "words"),
    [
        (torch.float32, torch.zeros(202, 12), r"\(202, 12\) .* \(203, 12\) of torch.float32"),
        (torch.bfloat16, torch.zeros(203, 12, dtype=torch.bfloat16), "bfloat16 .* torch.float32"),
        (torch.float64, torch.zeros(203, 12), "float32 .* torch.float64"),
        (torch.float32, torch.zeros(203, 12, device="meta"), "on meta; .* on cpu"),
        (torch.float32, torch.zeros(203, 12, requires_grad=True), "requires a gradient"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(
    dtype: torch.dtype, buffer: Tensor, words: str
) -> None:
    problem = Problem.random(dtype=dtype)
    with pytest.raises(ValueError, match=f"weight_gradient_sum .*{words}"):
        objective(
            problem,
            problem.hidden_NH,
            problem.weight_GH.requires_grad_(),
            terms=[Term()],
            weight_gradient_sum=buffer,
        )
