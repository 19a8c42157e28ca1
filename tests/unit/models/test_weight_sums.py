"""The whole number of a tensor's bits: a law in plain integers, and the same however it is cut."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_distill.models import weight_sums
from megatron_distill.models.weight_sums import window_sum

ROWS, COLUMNS = 7, 9
WHOLE = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))


def own(values: Tensor) -> int:
    return int(window_sum(values, start=(0,) * values.dim(), shape=values.shape))


def in_integers(values: Tensor) -> int:
    """The sum of SplitMix64's outputs, each shifted by the bits of the number of its place."""
    total = 0
    for place, bits in enumerate(values.float().flatten().numpy().view(np.int32).tolist()):
        word = ((place + 1) * 0x9E3779B97F4A7C15 + bits) % 2**64
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        total += word ^ (word >> 31)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("at_once", [1, 20, 2**16])
def test_sums_are_those_of_integers_in_any_cut(at_once: int) -> None:
    expected = in_integers(WHOLE)
    with patch.object(weight_sums, "_AT_ONCE", at_once):
        assert own(WHOLE) == expected
        assert own(WHOLE[:, 0]) == in_integers(WHOLE[:, 0])
        assert own(WHOLE.bfloat16()) == in_integers(WHOLE.bfloat16().float())
        parts = [
            window_sum(WHOLE[top:bottom, left:right], start=(top, left), shape=WHOLE.shape)
            for top, bottom in ((0, 3), (3, ROWS))
            for left, right in ((0, 4), (4, 5), (5, COLUMNS))
        ]
        assert int(torch.stack(parts).sum()) == expected
        padded = torch.cat([WHOLE, torch.ones(4, COLUMNS)])
        assert int(window_sum(padded, start=(0, 0), shape=WHOLE.shape)) == expected
        assert int(window_sum(padded[8:], start=(8, 0), shape=WHOLE.shape)) == 0


def test_every_bit_and_every_place_counts() -> None:
    """Each bit of each number, each exchange of two numbers, and the sign of a zero."""
    sums = {own(WHOLE)}
    for place in range(WHOLE.numel()):
        for bit in range(32):
            changed = WHOLE.clone().view(torch.int32)
            changed.view(-1)[place] ^= 1 << bit if bit < 31 else -(2**31)
            sums.add(own(changed.view(torch.float32)))
        for other in range(place):
            order = torch.arange(WHOLE.numel())
            order[[place, other]] = order[[other, place]]
            sums.add(own(WHOLE.view(-1)[order].view(WHOLE.shape)))
    numbers = WHOLE.numel()
    assert len(sums) == 1 + 32 * numbers + numbers * (numbers - 1) // 2
    assert own(torch.zeros(3)) != own(-torch.zeros(3))
