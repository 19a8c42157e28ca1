"""Divergence per token from logits: oracle, gradcheck, padding, masks, degenerate rows, large
vocabularies, unmodified inputs, bounded memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
from tests.reference.tracing import traced

TEMPERATURES = [0.5, 1.0, 2.0, 4.0]


def logit_pair(
    tokens: int, vocab: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, tokens, vocab, generator=generator, dtype=torch.float64) * 2
    return student.to(dtype), teacher.to(dtype)


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


@pytest.mark.parametrize("vocab", [151_936, 262_144])
def test_vocabularies_beyond_17_bits(vocab: int) -> None:
    student, teacher = logit_pair(3, vocab)
    upstream = torch.ones(3)
    value, gradient = value_and_gradient(student, teacher, upstream)
    expected, expected_gradient = oracle(student, teacher, upstream)
    assert float((value / expected - 1).abs().max()) < 1e-6
    assert row_error(gradient, expected_gradient) < 1e-6


def test_student_and_teacher_of_different_dtypes() -> None:
    student, teacher = logit_pair(9, 300)
    upstream = torch.ones(9)
    for ours, other in ((student, teacher.bfloat16()), (student.bfloat16(), teacher)):
        value, gradient = value_and_gradient(ours, other, upstream)
        expected, expected_gradient = oracle(ours, other, upstream)
        assert float((value / expected - 1).abs().max()) < 1e-6
        assert row_error(gradient, expected_gradient) < GRADIENT_TOLERANCE[ours.dtype]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_gradcheck_through_the_public_entry(temperature: float) -> None:
    student, teacher = logit_pair(4, 11, dtype=torch.float64)
    # T^2 on the loss but not on the gradient is a defect that only shows at T != 1.
    assert torch.autograd.gradcheck(
        lambda logits: token_divergence(
            logits,
            DenseLogits(teacher),
            divergence="forward_kl",
            temperature=temperature,
            scale_by_temperature_squared=True,
            shard=VocabShard(9, 0, 11),
        ),
        student.requires_grad_(),
    )


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


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 400),
    temperature=st.sampled_from(TEMPERATURES),
    spread=st.sampled_from([0.01, 1.0, 20.0]),
)
def test_never_negative_and_gradient_rows_sum_to_zero(
    seed: int, vocab: int, temperature: float, spread: float
) -> None:
    student, teacher = (logits * spread for logits in logit_pair(4, vocab, seed))
    value, gradient = value_and_gradient(student, teacher, torch.ones(4), temperature)
    # Rounding of the difference of two logits, which the caller's logits have had as well.
    largest = float(torch.maximum(student.abs(), teacher.abs()).max()) / temperature
    assert float(value.min()) > -2e-7 * (1 + largest)
    assert float(gradient.sum(1).abs().max()) < 2e-6 / temperature


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), temperature=st.sampled_from(TEMPERATURES))
def test_equal_models_have_exactly_zero_loss_and_gradient(seed: int, temperature: float) -> None:
    logits, _ = logit_pair(6, 200, seed)
    for dtype in (torch.float32, torch.bfloat16):
        student = (logits * 10).to(dtype)
        value, gradient = value_and_gradient(student, student.clone(), torch.ones(6), temperature)
        assert not value.any()
        assert not gradient.any()


def test_one_hot_teacher_is_cross_entropy() -> None:
    student, _ = logit_pair(6, 40)
    labels = torch.randint(40, (6,), generator=torch.Generator().manual_seed(3))
    teacher = torch.full((6, 40), -torch.inf).scatter_(1, labels[:, None], 0.0)
    value, gradient = value_and_gradient(student, teacher, torch.ones(6))
    leaf = student.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(leaf, labels, reduction="none")
    (expected_gradient,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-6, atol=0)
    assert row_error(gradient, expected_gradient) < 1e-6


def test_upstream_gradient_applies_to_each_token() -> None:
    student, teacher = logit_pair(8, 60)
    upstream = torch.randn(8, generator=torch.Generator().manual_seed(4))
    _, ones = value_and_gradient(student, teacher, torch.ones(8))
    _, weighted = value_and_gradient(student, teacher, upstream)
    torch.testing.assert_close(weighted, ones * upstream[:, None], rtol=1e-6, atol=1e-9)


def test_expanded_upstream_gradient_of_a_sum() -> None:
    student, teacher = logit_pair(8, 60)
    leaf = student.requires_grad_()
    token_divergence(leaf, DenseLogits(teacher), divergence="forward_kl").sum().backward()
    _, ones = value_and_gradient(student, teacher, torch.ones(8))
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, ones)


def test_masked_tokens_change_nothing_even_if_they_are_not_finite() -> None:
    student, teacher = logit_pair(6, 50)
    mask = torch.tensor([True, False, True, False, True, True])

    def masked(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        leaf = student.detach().clone().requires_grad_()
        value = token_divergence(leaf, DenseLogits(teacher), divergence="forward_kl")
        total = torch.where(mask, value, 0.0).sum()
        (gradient,) = torch.autograd.grad(total, leaf)
        return total.detach(), gradient

    clean = masked(student, teacher)
    student[1], teacher[3] = torch.nan, torch.nan
    student[3], teacher[1] = torch.inf, -torch.inf
    dirty = masked(student, teacher)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert not dirty[1][~mask].any()


@pytest.mark.parametrize("padding", [torch.nan, torch.inf, 1e4, 0.0])
def test_padded_columns_never_carry_probability(padding: float) -> None:
    student, teacher = logit_pair(5, 64)
    student[:, 50:], teacher[:, 50:] = padding, padding
    upstream = torch.ones(5)
    value, gradient = value_and_gradient(student, teacher, upstream, shard=VocabShard(50, 0, 64))
    expected, expected_gradient = oracle(student[:, :50], teacher[:, :50], upstream)
    assert float((value / expected - 1).abs().max()) < 1e-6
    assert row_error(gradient[:, :50], expected_gradient) < 1e-6
    assert not gradient[:, 50:].any()


def test_teacher_with_another_padding() -> None:
    student, teacher = logit_pair(5, 64)
    whole, _ = value_and_gradient(student, teacher, torch.ones(5), shard=VocabShard(50, 0, 64))
    short, _ = value_and_gradient(
        student, teacher[:, :53], torch.ones(5), shard=VocabShard(50, 0, 64)
    )
    assert torch.equal(whole, short)
    with pytest.raises(ValueError, match="teacher has 49 vocabulary columns; .* has 50"):
        value_and_gradient(student, teacher[:, :49], torch.ones(5), shard=VocabShard(50, 0, 64))


def test_ids_forbidden_to_both_models_count_for_nothing() -> None:
    student, teacher = logit_pair(5, 40)
    student[:, 7:20], teacher[:, 7:20] = -torch.inf, -torch.inf
    upstream = torch.ones(5)
    value, gradient = value_and_gradient(student, teacher, upstream)
    rest = [*range(7), *range(20, 40)]
    expected, expected_gradient = oracle(student[:, rest], teacher[:, rest], upstream)
    assert float((value / expected - 1).abs().max()) < 1e-6
    assert row_error(gradient[:, rest], expected_gradient) < 1e-6
    assert not gradient[:, 7:20].any()


def test_point_masses_that_agree_and_disagree() -> None:
    student, teacher = torch.zeros(2, 30), torch.zeros(2, 30)
    student[:, 3] = 300.0  # every other probability underflows
    teacher[0, 3] = 300.0
    teacher[1, 8] = 300.0
    value, gradient = value_and_gradient(student, teacher, torch.ones(2))
    assert value.tolist() == [0.0, 300.0]
    assert not gradient[0].any()
    assert gradient[1, [3, 8]].tolist() == [1.0, -1.0]


def test_student_without_probability_where_the_teacher_has_some() -> None:
    student, teacher = logit_pair(2, 10)
    student[0, 4] = -torch.inf
    value, gradient = value_and_gradient(student, teacher, torch.ones(2))
    assert float(value[0]) > 1e30
    assert torch.isfinite(gradient).all()
    assert float(gradient[0, 4]) == pytest.approx(-float(teacher[0].softmax(0)[4]), rel=1e-5)


def test_no_tokens() -> None:
    value, gradient = value_and_gradient(*logit_pair(0, 10), torch.ones(0))
    assert value.shape == (0,)
    assert gradient.shape == (0, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_not_modified_and_calls_repeat_exactly(dtype: torch.dtype) -> None:
    student, teacher = logit_pair(7, 90, dtype=dtype)
    before = student.clone(), teacher.clone()
    first = value_and_gradient(student, teacher, torch.ones(7))
    second = value_and_gradient(student, teacher, torch.ones(7))
    assert torch.equal(student, before[0])
    assert torch.equal(teacher, before[1])
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


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
    with pytest.raises(TypeError, match="takes DenseLogits, TopK or Sampled, not HiddenState"):
        token_divergence(
            student,
            HiddenState(torch.zeros(4, 2), torch.zeros(10, 2)),  # type: ignore[arg-type]
            divergence="forward_kl",
        )
    with pytest.raises(ValueError, match="teacher_logits has 3 rows for 4 tokens"):
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
