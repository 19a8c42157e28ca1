"""A tensor's bits as one whole number, which ranks with parts of the tensor add up.

Each number adds a hash of its bits and of its place in the whole tensor. The sum modulo 2^64 is the
same however the tensor is cut, and needs no number to be moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from megatron_distill.ops.split_mix import INCREMENT, mix_, signed

__all__ = ["window_sum"]

# Numbers that are hashed at once, with 24 bytes of memory each: within a core's cache, or enough
# for a GPU. They do not change the sum.
_AT_ONCE: Final = 2**16
_AT_ONCE_ON_GPU: Final = 2**21


def window_sum(window: Tensor, *, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return the sum of a window's hashes modulo 2^64, int64 [].

    The window is a part of a tensor of `shape`, [rows] or [rows, columns], that begins at `start`.
    Its numbers count as fp32, bit for bit; its rows beyond `shape` are padding and do not count.
    Runs on the window's device, and the host does not wait for it.

    Shapes: R rows at once, C columns of the window.
    """
    assert window.dim() == len(start) == len(shape) <= 2, "a vector or a matrix"
    if window.dim() == 1:  # a matrix of one column
        window, start, shape = window[:, None], (*start, 0), (*shape, 1)
    rows, columns = min(window.shape[0], shape[0] - start[0]), window.shape[1]
    device = window.device
    most = max(1, (_AT_ONCE if device.type == "cpu" else _AT_ONCE_ON_GPU) // columns)
    total = torch.zeros((), dtype=torch.int64, device=device)
    keys_C = _keys(start[1] + 1, columns, INCREMENT, device)
    for first in range(0, rows, most):
        values_RC = window[first : min(first + most, rows)].float()
        keys_R = _keys(start[0] + first, values_RC.shape[0], shape[1] * INCREMENT, device)
        total += mix_((keys_R[:, None] + keys_C).add_(values_RC.view(torch.int32))).sum()
    return total


def _keys(first: int, count: int, step: int, device: torch.device) -> Tensor:
    """Return the multiples of a step from `first` on modulo 2^64, int64 [count]."""
    return torch.arange(first, first + count, device=device) * signed(step % 2**64)
