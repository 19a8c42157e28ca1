"""Checks of a signal's tensors; each raises ValueError with the field's name."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from megatron_distill.errors import counted
from megatron_distill.signals.targets import TermView

__all__ = ["refuse_choice", "require_bias", "require_ids", "require_matrix", "require_positive"]


def require_matrix(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that is not a floating-point matrix."""
    if tensor.dim() != 2 or not tensor.is_floating_point():
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; "
            "it must be a floating-point matrix with one row per token or column"
        )


def require_bias(bias: Tensor, weight: Tensor) -> None:
    """Refuse a bias that does not belong to the head's weight."""
    if bias.shape != weight.shape[:1] or (bias.dtype, bias.device) != (weight.dtype, weight.device):
        raise ValueError(
            f"HiddenState.bias is {bias.dtype} of shape {tuple(bias.shape)} on {bias.device}; it "
            f"must be {weight.dtype} on {weight.device}, one number for each of "
            f"{weight.shape[0]} columns"
        )


def require_ids(kind: str, ids: Tensor, values: Tensor, name: str) -> None:
    """Refuse ids that are not an integer matrix, or values of another shape."""
    if ids.dim() != 2 or ids.shape[1] < 1 or ids.is_floating_point() or ids.is_complex():
        raise ValueError(
            f"{kind}.ids is {ids.dtype} of shape {tuple(ids.shape)}; "
            "it must be an integer matrix with one row per token and at least one column"
        )
    if values.shape != ids.shape or values.device != ids.device:
        raise ValueError(
            f"{kind}.{name} is of shape {tuple(values.shape)} on {values.device}, "
            f"its ids of {tuple(ids.shape)} on {ids.device}"
        )


def require_positive(name: str, value: float) -> None:
    """Refuse a number that is not positive and finite."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value}; it must be positive and finite")


def refuse_choice(terms: Sequence[TermView], ids: Tensor) -> None:
    """Refuse terms with a ``top_k`` on a signal of few ids."""
    for term in terms:
        if term.top_k is not None:
            raise ValueError(
                f"{term.name} has top_k {term.top_k}, but the signal has only "
                f"{counted(ids.shape[1], 'id')} per token; remove top_k"
            )
