"""Divergence per token from logits: mixed dtypes, slices, no tokens, bounded memory, misuse, graphs
used again. Its values are in test_divergences.py."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import token_divergence
from megatron_distill.ops import VocabShard
from megatron_distill.ops.chunk import Chunk
from megatron_distill.signals import DenseLogits, HiddenState
from tests.reference.distillation import GRADIENT_TOLERANCE, forward_kl, row_error
from tests.reference.logits import logit_pair
from tests.reference.tracing import traced
from tests.support.divergence_runs import (
    NAMES,
    PAIRWISE,
    REPRESENTATIVE,
    differentiated,
    signal_of,
    solved,
)


def value_and_gradient(
    student: Tensor, teacher: Tensor, upstream: Tensor, shard: VocabShard | None = None
) -> tuple[Tensor, Tensor]:
    return solved(student, DenseLogits(teacher), upstream, divergence="forward_kl", shard=shard)


def test_student_and_teacher_of_different_dtypes() -> None:
    student, teacher = logit_pair(9, 300)
    upstream = torch.ones(9)
    for ours, other in ((student, teacher.bfloat16()), (student.bfloat16(), teacher)):
        value, gradient = value_and_gradient(ours, other, upstream)
        expected, expected_gradient = differentiated(
            ours, partial(forward_kl, teacher_NG=other), upstream
        )
        assert float((value / expected - 1).abs().max()) < 1e-6
        assert row_error(gradient, expected_gradient) < GRADIENT_TOLERANCE[ours.dtype]


def test_expanded_upstream_gradient_of_a_sum() -> None:
    student, teacher = logit_pair(8, 60)
    leaf = student.requires_grad_()
    token_divergence(leaf, DenseLogits(teacher), divergence="forward_kl").sum().backward()
    _, ones = value_and_gradient(student, teacher, torch.ones(8))
    assert torch.equal(leaf.grad, ones)


def test_logits_that_are_a_slice_of_a_wider_tensor() -> None:
    student, teacher = logit_pair(7, 90)
    wide = torch.cat([student, teacher], 1)
    sliced = value_and_gradient(wide[:, :90], wide[:, 90:], torch.ones(7))
    whole = value_and_gradient(student, teacher, torch.ones(7))
    assert torch.equal(sliced[0], whole[0])
    assert torch.equal(sliced[1], whole[1])


def test_misuse_is_named() -> None:
    student, teacher = logit_pair(4, 10)
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
        value_and_gradient(student, teacher, torch.ones(4), VocabShard(9, 0, 12))
    with pytest.raises(ValueError, match="teacher has 9 vocabulary columns; .* has 10"):
        value_and_gradient(student, teacher[:, :9], torch.ones(4))
    with pytest.raises(ValueError, match=r"shard \[0, 10\) is part of a vocabulary of 20"):
        value_and_gradient(student, teacher, torch.ones(4), VocabShard(20, 0, 10))


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
    assert torch.equal(first, kept)
    (once,) = torch.autograd.grad(
        token_divergence(leaf, DenseLogits(teacher), divergence="js_divergence").sum(), leaf
    )
    torch.testing.assert_close(leaf.grad, kept + 2 * once, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("support", ["dense", "tail"])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_the_bf16_gradient_of_a_mean_is_formed_once(
    name: str, support: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    formed: list[str] = []

    def counting(method: str) -> None:
        original = getattr(Chunk, method)

        def call(*given: Any, **named: Any) -> Any:
            formed.append(method)
            return original(*given, **named)

        monkeypatch.setattr(Chunk, method, call)

    counting("process")  # writes the value and the gradient of its sum
    counting("write_gradient")
    student, teacher = logit_pair(5, 30, dtype=torch.bfloat16)
    leaf = student.requires_grad_()
    value = token_divergence(leaf, signal_of(support, teacher), divergence=name)
    assert formed == []
    value.mean().backward()
    assert formed == ["write_gradient"]
    assert leaf.grad is not None


def extra_bytes(
    name: str, support: str, tokens: int, vocab: int, dtype: torch.dtype = torch.float32
) -> int:
    """Most bytes alive beyond the inputs and the gradient."""
    student, teacher = (logits.repeat(tokens, 1) for logits in logit_pair(1, vocab, dtype=dtype))
    signal = signal_of(support, teacher)
    held = [value for value in vars(signal).values() if isinstance(value, Tensor)]
    run = partial(solved, student, signal, torch.linspace(0.5, 1.0, tokens), divergence=name)
    return traced(partial(run, support=support), student, *held).peak_bytes - student.nbytes


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("name", "support"), PAIRWISE)
def test_defect_01_no_accumulator_of_the_size_of_the_logits(
    name: str, support: str, dtype: torch.dtype, one_thread: None
) -> None:
    # Liger-Kernel's JSD kept its loss as [N, V] in a kernel whose point was to hold no logits.
    few, many = (extra_bytes(name, support, tokens, 32_768, dtype) for tokens in (16, 32))
    # Where the teacher's tail begins is found with 256 sums per token, and those up to each.
    bins = 16 * 2 * 256 * 8 if name == "adaptive_kl" else 0
    assert many - few < 0.02 * 16 * 32_768 * 4 + bins


def test_defect_01_nothing_grows_where_the_gradient_takes_the_place_of_the_logits(
    one_thread: None,
) -> None:
    def extra(name: str, tokens: int) -> int:
        student, teacher = (logits.repeat(tokens, 1) for logits in logit_pair(1, 30_000))
        leaf, weights = student.requires_grad_(), torch.linspace(0.5, 1.0, tokens)

        def step() -> None:
            value = token_divergence(
                leaf * 1, DenseLogits(teacher), divergence=name, overwrite_logits=True
            )
            (value * weights).sum().backward()

        # The layer's logits, and the gradient that it hands on in turn.
        return traced(step, student, teacher).peak_bytes - 2 * student.nbytes

    for name in NAMES:
        assert extra(name, 32) - extra(name, 16) < 0.02 * 16 * 30_000 * 4, name


@pytest.mark.parametrize(("name", "support"), PAIRWISE)
def test_defect_11_scratch_does_not_grow_with_the_vocabulary(
    name: str, support: str, one_thread: None
) -> None:
    # Liger-Kernel ran blocks of 65,536 columns with the warps meant for few; Fast-LLM held more
    # than fits for two softmaxes. Here a block is a megabyte per buffer, whatever the vocabulary.
    narrow, wide = (
        extra_bytes(name, support, tokens, vocab) for tokens, vocab in ((20, 32_768), (3, 262_144))
    )
    assert wide <= narrow * 1.05
    assert wide < 13 * 2**20


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_adaptive_kl_has_the_same_bits_again_and_in_any_split_of_the_tokens(device: str) -> None:
    tokens, vocab = 24, 1024  # whole vectors: torch rounds exp() in another way in the rest of one
    student, teacher = (one.to(device) for one in logit_pair(tokens, vocab))
    upstream = torch.linspace(0.5, 1.0, tokens, device=device)

    def by(rows: int) -> tuple[Tensor, Tensor]:
        parts = zip(*(one.split(rows) for one in (student, teacher, upstream)), strict=True)
        found = [
            solved(ours, DenseLogits(other), weights, divergence="adaptive_kl")
            for ours, other, weights in parts
        ]
        values, gradients = zip(*found, strict=True)
        return torch.cat(values), torch.cat(gradients)

    expected, before = by(tokens), torch.get_num_threads()
    # How a GPU divides the sum of a row depends on the number of rows.
    splits = (tokens, 7, 5) if device == "cpu" else (tokens, tokens, tokens)
    try:
        for rows, threads in zip(splits, (before, 1, 2), strict=True):
            torch.set_num_threads(threads)
            for found, other in zip(by(rows), expected, strict=True):
                assert torch.equal(found, other), (rows, threads)
    finally:
        torch.set_num_threads(before)
