"""Rows in order on a CPU and elsewhere: by value, and equal values by their place.

On a CPU numpy sorts integers twenty times as fast as torch sorts numbers and their places: the
upper half of an integer is the value's key, the lower one its place.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["descending", "keys_of", "places_by"]


def keys_of(values: Tensor) -> Tensor:
    """int32 keys in the order of fp32 values; minus zero is zero."""
    bits = (values.float() + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def places_by(keys: Tensor) -> Tensor:
    """On a CPU the places ``[N, C]`` of int32 keys from the least up, equal ones in their order."""
    both = keys.long().bitwise_left_shift_(32)
    both.bitwise_or_(torch.arange(keys.shape[1]))
    both.numpy().sort(axis=1)
    return both.bitwise_and_(0xFFFFFFFF)


def descending(values: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[N, C]`` from the largest value down, and the places; equal ones keep their order."""
    if values.device.type != "cpu" or values.dtype == torch.float64:
        return values.sort(dim=1, descending=True, stable=True)
    places = places_by(keys_of(values).bitwise_not_())
    return values.gather(1, places), places
