"""The boundary of the teacher's tail, found by bins, is the one that a sort finds."""

import pytest
import torch
from torch import Tensor

from megatron_distill.ops import adaptive_kl
from megatron_distill.ops.adaptive_kl import TeacherBlock

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
