"""Token weights: one division by the global count, nothing where nothing counts."""

import pytest
import torch

from megatron_distill.losses import token_weights


def test_weights_are_the_mask_over_the_global_count() -> None:
    mask = torch.tensor([True, False, True])
    weights = token_weights(mask, 8)
    assert weights.dtype is torch.float32
    assert weights.tolist() == [0.125, 0.0, 0.125]


def test_nothing_counts_anywhere() -> None:
    assert token_weights(torch.tensor([False, False]), 0).tolist() == [0.0, 0.0]


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="global token count is -1"):
        token_weights(torch.tensor([True]), -1)


def test_parts_of_a_batch_weigh_as_the_whole() -> None:
    mask = torch.rand(40, generator=torch.Generator().manual_seed(0)) > 0.3
    count = int(mask.sum())
    parts = torch.cat([token_weights(part, count) for part in mask.split([1, 30, 9])])
    assert torch.equal(parts, token_weights(mask, count))
    assert float(parts.sum()) == pytest.approx(1.0, rel=1e-6)
