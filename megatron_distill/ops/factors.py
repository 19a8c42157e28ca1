"""Constant factors of losses: numbers of the host, or scalars of a device that it does not read."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

__all__ = ["Factor", "is_zero", "scaled"]

# A tensor is an fp64 scalar without a gradient.
Factor: TypeAlias = float | Tensor


def scaled(values: Tensor, factor: Factor) -> Tensor:
    """``factor * values`` in their dtype, fp32 or fp64, with the bits of a host's product."""
    if isinstance(factor, Tensor):
        # Of two scalars torch would take the wider dtype.
        return factor.to(values.dtype) * values
    return factor * values


def is_zero(factor: Factor) -> bool:
    """Whether a factor is known to be zero: a number of the device is not known."""
    return not isinstance(factor, Tensor) and factor == 0
