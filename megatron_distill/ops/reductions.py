"""Sums and largest logits of the rows of a block."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["row_sums", "row_top"]

_SEGMENT = 128
_LANES = 128


def row_sums(values: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Sums of the rows ``[N, V]`` in fp64, ``[N]``, in hardly more time than in their own dtype.

    Columns that are a multiple of the lanes apart are added first: what rounding does to the lanes
    averages out.
    """
    rows, columns = values.shape
    lanes = min(columns, _LANES)
    if lanes == 0:
        return torch.sum(values, 1, dtype=torch.float64, out=out)
    rest = columns % lanes
    inside = values[:, : columns - rest] if rest else values
    sums = inside.view(rows, -1, lanes).sum(1)
    if rest:
        sums[:, :rest].add_(values[:, columns - rest :])
    return torch.sum(sums, 1, dtype=torch.float64, out=out)


def row_top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value and its lowest column per row of ``[N, V]``, V > 0."""
    segments = logits.shape[1] // _SEGMENT
    if logits.device.type != "cpu" or segments == 0:
        values, columns = logits.max(1)
        return values, columns
    # torch's max with index is not vectorised on a CPU: find the segment first.
    parts = logits[:, : segments * _SEGMENT].unfold(1, _SEGMENT, _SEGMENT)
    value, segment = parts.amax(2).max(1)
    within = parts[torch.arange(logits.shape[0]), segment].argmax(1)
    column = within.add_(segment, alpha=_SEGMENT)
    if logits.shape[1] == segments * _SEGMENT:
        return value, column
    last_value, last_column = logits[:, segments * _SEGMENT :].max(1)
    later = last_value > value
    return (
        torch.where(later, last_value, value),
        torch.where(later, last_column + segments * _SEGMENT, column),
    )
