"""Divergence per token from logits: oracle, dtypes, temperatures, upstream gradients, another
padding of the teacher, slices, no tokens, bounded memory, misuse, graphs used again."""

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import token_divergence
from megatron_distill.ops import VocabShard
from megatron_distill.signals import DenseLogits, HiddenState
from tests.reference.distillation import (
    GRADIENT_TOLERANCE,
    VALUE_TOLERANCE,
    forward_kl,
    row_error,
)
from tests.reference.logits import logit_pair
from tests.reference.tracing import traced

TEMPERATURES = [0.5, 1.0, 2.0, 4.0]


def value_and_gradient(
    student: Tensor,
    teacher: Tensor,
    upstream: Tensor,
    temperature: float = 1.0,
    *,
    scale_by_temperature_squared: bool = False,
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor]:
    leaf = student.detach().requires_grad_()
    value = token_divergence(
        leaf,
        DenseLogits(teacher),
        divergence="forward_kl",
        temperature=temperature,
        scale_by_temperature_squared=scale_by_temperature_squared,
        shard=shard,
    )
    (gradient,) = torch.autograd.grad(value, leaf, upstream.to(value.dtype))
    return value.detach(), gradient


def oracle(
    student: Tensor, teacher: Tensor, upstream: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    leaf = student.detach().double().requires_grad_()
    value = forward_kl(leaf, teacher, temperature)
    (gradient,) = torch.autograd.grad(value, leaf, upstream.double())
    return value.detach(), gradient


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_value_and_gradient_equal_the_oracle(dtype: torch.dtype, temperature: float) -> None:
    student, teacher = logit_pair(40, 1003, dtype=dtype)
    upstream = torch.rand(40, generator=torch.Generator().manual_seed(1))
    value, gradient = value_and_gradient(student, teacher, upstream, temperature)
    expected, expected_gradient = oracle(student, teacher, upstream, temperature)
    assert value.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert gradient.dtype is dtype
    assert float((value / expected - 1).abs().max()) < VALUE_TOLERANCE[dtype]
    assert row_error(gradient, expected_gradient) < GRADIENT_TOLERANCE[dtype]


def test_student_and_teacher_of_different_dtypes() -> None:
    student, teacher = logit_pair(9, 300)
    upstream = torch.ones(9)
    for ours, other in ((student, teacher.bfloat16()), (student.bfloat16(), teacher)):
        value, gradient = value_and_gradient(ours, other, upstream)
        expected, expected_gradient = oracle(ours, other, upstream)
        assert float((value / expected - 1).abs().max()) < 1e-6
        assert row_error(gradient, expected_gradient) < GRADIENT_TOLERANCE[ours.dtype]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_squared_scales_loss_and_gradient_alike(temperature: float) -> None:
    student, teacher = logit_pair(5, 50)
    upstream = torch.ones(5)
    plain = value_and_gradient(student, teacher, upstream, temperature)
    scaled = value_and_gradient(
        student, teacher, upstream, temperature, scale_by_temperature_squared=True
    )
    for ours, other in zip(scaled, plain, strict=True):
        torch.testing.assert_close(ours, other * temperature**2, rtol=1e-6, atol=0)


def test_expanded_upstream_gradient_of_a_sum() -> None:
    student, teacher = logit_pair(8, 60)
    leaf = student.requires_grad_()
    token_divergence(leaf, DenseLogits(teacher), divergence="forward_kl").sum().backward()
    _, ones = value_and_gradient(student, teacher, torch.ones(8))
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, ones)


def test_teacher_with_another_padding() -> None:
    student, teacher = logit_pair(5, 64)
    whole, _ = value_and_gradient(student, teacher, torch.ones(5), shard=VocabShard(50, 0, 64))
    short, _ = value_and_gradient(
        student, teacher[:, :53], torch.ones(5), shard=VocabShard(50, 0, 64)
    )
    assert torch.equal(whole, short)
    with pytest.raises(ValueError, match="teacher has 49 vocabulary columns; .* has 50"):
        value_and_gradient(student, teacher[:, :49], torch.ones(5), shard=VocabShard(50, 0, 64))


def test_no_tokens() -> None:
    value, gradient = value_and_gradient(*logit_pair(0, 10), torch.ones(0))
    assert value.shape == (0,)
    assert gradient.shape == (0, 10)


def test_logits_that_are_a_slice_of_a_wider_tensor() -> None:
    student, teacher = logit_pair(7, 90)
    wide = torch.cat([student, teacher], 1)
    sliced = value_and_gradient(wide[:, :90], wide[:, 90:], torch.ones(7))
    whole = value_and_gradient(student, teacher, torch.ones(7))
    assert torch.equal(sliced[0], whole[0])
    assert torch.equal(sliced[1], whole[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_above_the_gradient_does_not_grow_with_tokens(
    dtype: torch.dtype, one_thread: None
) -> None:
    def extra(tokens: int) -> int:
        student, teacher = logit_pair(tokens, 100_000, dtype=dtype)
        student.requires_grad_()

        def step() -> None:
            token_divergence(
                student, DenseLogits(teacher), divergence="forward_kl"
            ).sum().backward()

        return traced(step, student, teacher).peak_bytes - student.nbytes

    few, many = extra(16), extra(48)
    assert few < 2 * 16 * 100_000 * dtype.itemsize
    assert many - few < 0.01 * 32 * 100_000 * dtype.itemsize


def test_misuse_is_named() -> None:
    student, teacher = logit_pair(4, 10)
    with pytest.raises(ValueError, match="unknown divergence 'kl'"):
        token_divergence(student, DenseLogits(teacher), divergence="kl")
    with pytest.raises(
        TypeError, match=r"not Tensor; wrap the teacher's logits: DenseLogits\(logi"
    ):
        token_divergence(student, teacher, divergence="forward_kl")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes signals of logits or ids, not HiddenState"):
        token_divergence(
            student,
            HiddenState(torch.zeros(4, 2), torch.zeros(10, 2)),  # type: ignore[arg-type]
            divergence="forward_kl",
        )
    with pytest.raises(ValueError, match="teacher_signal has 3 rows for 4 tokens"):
        token_divergence(student, DenseLogits(teacher[:3]), divergence="forward_kl")
    with pytest.raises(ValueError, match="10 vocabulary columns on this rank, its shard .* has 12"):
        value_and_gradient(student, teacher, torch.ones(4), shard=VocabShard(9, 0, 12))
    with pytest.raises(ValueError, match=r"shard \[0, 10\) is part of a vocabulary of 20"):
        value_and_gradient(student, teacher, torch.ones(4), shard=VocabShard(20, 0, 10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_may_be_used_again(dtype: torch.dtype) -> None:
    student, teacher = logit_pair(5, 30, dtype=dtype)
    leaf = student.requires_grad_()
    value = token_divergence(leaf, DenseLogits(teacher), divergence="js_divergence")
    upstream = torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0])
    (first,) = torch.autograd.grad(value, leaf, upstream, retain_graph=True)
    kept = first.clone()
    value.backward(upstream, retain_graph=True)
    value.backward(torch.ones(5), retain_graph=True)
    value.backward(torch.ones(5))
    assert leaf.grad is not None
    assert torch.equal(first, kept)
    (once,) = torch.autograd.grad(
        token_divergence(leaf, DenseLogits(teacher), divergence="js_divergence").sum(), leaf
    )
    torch.testing.assert_close(leaf.grad, kept + 2 * once, rtol=1e-2, atol=1e-4)
