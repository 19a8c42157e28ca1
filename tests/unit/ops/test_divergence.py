"""Formulas of divergences: anchors, the push-forward of top-k ids, the tail of adaptive KL."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_distill.ops import adaptive_kl
from megatron_distill.ops.adaptive_kl import TeacherBlock
from megatron_distill.ops.divergences import DIVERGENCES, Classes, divergence_named
from megatron_distill.ops.softmax_gradient import (
    SoftmaxWeights,
    TailWeight,
    scale_softmax_,
)

NONLINEAR = [name for name in DIVERGENCES if name not in ("forward_kl", "adaptive_kl")]
PARAMETERS: dict[str, dict[str, float]] = {
    "js_divergence": {"beta": 0.3},
    "skewed_forward_kl": {"skew_lambda": 0.6},
    "skewed_reverse_kl": {"skew_lambda": 0.6},
}


def distributions(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 5, 17, generator=generator, dtype=torch.float64) * 3
    student, teacher = logits.softmax(2).to(dtype)
    return student, teacher


def classes(student: Tensor, teacher: Tensor, near_equal: Tensor | bool = True) -> Classes:
    return Classes(
        teacher,
        student,
        lambda: teacher.log() - student.log(),
        lambda _: torch.empty_like(student),
        near_equal,
    )


@pytest.mark.parametrize("name", NONLINEAR)
def test_anchors_differ_by_a_constant_of_the_row(name: str) -> None:
    student, teacher = distributions()
    row = divergence_named(name, **PARAMETERS.get(name, {}))
    near, far = (
        row.evaluate(classes(student, teacher, torch.full((5, 1), value)))
        for value in (True, False)
    )
    torch.testing.assert_close(near[0], far[0], rtol=1e-12, atol=1e-15)
    difference = near[1] - far[1]
    torch.testing.assert_close(difference, difference[:1, :1].expand_as(difference))


def test_names_are_those_of_the_table() -> None:
    for name in DIVERGENCES:
        assert divergence_named(name).name == name
    assert divergence_named("js_divergence", beta=0.25).name == "js_divergence_beta0.25"
    with pytest.raises(ValueError, match="unknown divergence 'foward_kl'; known: adaptive_kl, for"):
        divergence_named("foward_kl")


def test_tail_weights_of_any_size_leave_no_residue_on_top_k_ids() -> None:
    softmax = torch.randn(3, 7, generator=torch.Generator().manual_seed(6)).softmax(1)
    columns, topk_mask = torch.tensor([[4, 0], [1, 0], [6, 2]]), torch.tensor([True, False])
    topk_mask = topk_mask.expand(3, 2).clone()
    topk_mask[2] = True
    one = TailWeight(torch.tensor([[1e12], [0.0], [2.0]]), columns, topk_mask)
    other = TailWeight(torch.tensor([[3.0], [1e20], [5.0]]), columns.flip(1), topk_mask.flip(1))
    weights = SoftmaxWeights(1.0, torch.tensor([[0.5], [0.5], [0.0]]), None, (), (), True)
    expected = softmax.double() * weights.student.double()
    kept = torch.zeros(3, 7, dtype=torch.bool)
    kept[0, 4] = kept[1, 1] = kept[2, 6] = kept[2, 2] = True
    for tail_weights in ((), (one,), (one, other), (other, one, one)):
        total = sum((each.weight.double() for each in tail_weights), torch.zeros(3, 1).double())
        exact = expected + torch.where(kept, 0.0, softmax.double() * total)
        found = scale_softmax_(
            softmax.clone(),
            replace(weights, tail_weights=tail_weights),
            lambda _: torch.empty(3, 7),
            factor=torch.ones(3, 1),
        )
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


TOKENS, VOCAB = 6, 700


def blocks_of(logits: Tensor, order: Tensor) -> list[TeacherBlock]:
    """All tokens as one block, their columns in that order."""
    shuffled = logits[:, order]
    probabilities = shuffled.softmax(1)
    return [TeacherBlock(slice(0, TOKENS), shuffled, probabilities, probabilities)]


@pytest.mark.parametrize(("values", "head_mass"), [(3, 0.1), (3, 0.5), (3, 0.9), (10**6, 0.5)])
def test_bins_find_the_tail_that_a_sort_finds(values: int, head_mass: float) -> None:
    generator = torch.Generator().manual_seed(values)
    logits = torch.randint(values, (TOKENS, VOCAB), generator=generator) / values * 8 - 4
    (block,) = blocks_of(logits, torch.arange(VOCAB))
    boundary = adaptive_kl._Boundary.find(
        lambda: [block], TOKENS, head_mass=head_mass, group=None, device=logits.device
    )
    ordered, ids = logits.sort(dim=1, stable=True)
    is_small = ordered.double().softmax(1).cumsum(1) <= head_mass
    expected = torch.zeros_like(is_small).scatter_(1, ids, is_small)
    assert torch.equal(boundary.is_tail(block), expected)


def test_the_boundary_does_not_depend_on_the_order_of_additions() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(TOKENS, VOCAB, generator=generator) * 3
    (plain,) = blocks_of(logits, torch.arange(VOCAB))
    order = torch.randperm(VOCAB, generator=generator)
    shuffled = TeacherBlock(
        plain.rows, *(one[:, order] for one in (plain.logits, plain.teacher, plain.student))
    )
    found = [
        adaptive_kl._Boundary.find(
            lambda block=block: [block], TOKENS, head_mass=0.5, group=None, device=logits.device
        )
        for block in (plain, shuffled)
    ]
    assert torch.equal(found[0].key, found[1].key)
    assert torch.equal(found[0].ties, found[1].ties)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_boundary_has_the_same_bits_in_each_run_on_each_device(device: str) -> None:
    tokens, vocab = 64, 4096  # a bin gets many additions at once
    logits = torch.randn(tokens, vocab, generator=torch.Generator().manual_seed(2)) * 3
    probabilities = logits.softmax(1)

    def found(place: str) -> tuple[Tensor, Tensor]:
        parts = (one.to(place) for one in (logits, probabilities, probabilities))
        block = TeacherBlock(slice(0, tokens), *parts)
        boundary = adaptive_kl._Boundary.find(
            lambda: [block], tokens, head_mass=0.5, group=None, device=torch.device(place)
        )
        return boundary.key.cpu(), boundary.ties.cpu()

    expected = found("cpu")
    for _ in range(3):
        for one, other in zip(found(device), expected, strict=True):
            assert torch.equal(one, other)
