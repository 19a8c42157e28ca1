"""Token weights: the mask and the one division of the objective."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["token_weights"]


def token_weights(mask_N: Tensor, global_count: float) -> Tensor:
    """``mask / global_count`` as fp32 ``[N]``; zeros where nothing counts anywhere.

    The mask is of bools, or of weights where tokens count differently. ``global_count`` is its sum
    over the whole global batch, known before any forward pass. That is what makes loss and gradient
    independent of how the batch is split.

    Raises:
        ValueError: the count is negative.
    """
    if global_count < 0:
        raise ValueError(f"global token count is {global_count}; it cannot be negative")
    weights = mask_N.to(torch.float32)
    return weights / global_count if global_count else torch.zeros_like(weights)
