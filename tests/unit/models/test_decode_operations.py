"""Operations of a decode step that a CPU computes in its own way: fp32, against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_distill.models.generation.attend import attend_once
from megatron_distill.models.generation.layer import RootMeanSquare


@pytest.mark.parametrize("gains", [(6,), (3, 6)], ids=str)
def test_a_norm_has_its_eps_below_the_root(gains: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    gain = torch.randn(gains, generator=generator)
    for size in (0.0, 1e-6, 1e-3, 1.0, 1e4):  # eps is most of it, or nothing
        x = size * torch.randn(4, 3, 6, generator=generator)
        expected = F.rms_norm(x.double(), (6,), eps=1e-5) * gain.double()
        found = RootMeanSquare.of(gain, 1e-5)(x)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_of_one_position_has_every_key_that_is_its_own(is_masked: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(3, 2, 2, 8, generator=generator)
    keys, values = torch.randn(2, 6, 1, 11, 8, generator=generator)
    added = None
    if is_masked:
        added = torch.zeros(6, 1, 1, 11)
        for head in range(6):
            added[head, ..., :head] = -torch.inf
    wide = [one.double() for one in (query.view(6, 1, 2, 8), keys, values)]
    mask = None if added is None else added.double()
    expected = F.scaled_dot_product_attention(*wide, attn_mask=mask, scale=0.7).view_as(query)
    found = attend_once(query, keys, values, added=added, scale=0.7)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
