"""Weights in host memory: blocks of it hold every byte, and are no longer than these."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_distill.train.teachers.resting import pinned_copies


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1000, 2**28])
def test_blocks_hold_the_bytes_of_all_weights_and_no_more(block_bytes: int) -> None:
    made: list[int] = []
    empty = torch.empty

    def unpinned(*shape: Any, pin_memory: bool = False, **named: Any) -> Tensor:
        if pin_memory:
            made.append(*shape)
        return empty(*shape, **named)

    values = [
        torch.randn(3, 5),
        torch.randn(4, 2).to(torch.bfloat16),
        torch.empty(0, 8),
        torch.randn(6, 4).t(),
        torch.arange(7),
    ]
    with patch.object(torch, "empty", unpinned):
        copies = pinned_copies(values, block_bytes=block_bytes)
    total = sum(value.nbytes for value in values)
    assert sum(made) == total
    assert all(size == block_bytes for size in made[:-1])
    assert made[-1] <= block_bytes
    for value, pieces in zip(values, copies, strict=True):
        found = torch.cat(pieces) if pieces else empty(0, dtype=torch.uint8)
        assert torch.equal(found.view(value.dtype).view(value.shape), value)
