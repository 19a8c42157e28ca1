"""The largest logits of each row, ties by the lowest column: of a shard, on one rank alone."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from megatron_distill.ops.blocks import Scratch, accumulation_dtype, row_blocks
from megatron_distill.ops.ordering import descending, keys_of, packed, places_of

__all__ = ["largest"]

# Columns of which a maximum is taken first; the fewest segments, and most candidates, in k.
_SEGMENT = 64
_SEGMENTS_OF_K = 3
_MOST_LEFT = 4


def largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest values of each row of ``[N, V]`` and their columns, by (value, column).

    torch.topk leaves open which of equal values it takes and in which order.
    """
    count, width = logits.shape
    if k == 0:  # of a shard that is all padding
        return logits.new_empty(count, 0), logits.new_empty(count, 0, dtype=torch.int64)
    has_keys = logits.device.type == "cpu" and logits.dtype != torch.float64
    if not has_keys or width < _SEGMENTS_OF_K * k * _SEGMENT:
        return _largest_of_all(logits, k)
    values, columns = logits.new_empty(count, k), logits.new_empty(count, k, dtype=torch.int64)
    # Of the logits, this reads the segments that matter alone once more: blocks may be large.
    for block in row_blocks(count, _SEGMENT * k, logits.device):
        few = _largest_of_few(logits[block], k)
        values[block], columns[block] = few or _largest_of_all(logits[block], k)
    return values, columns


def _kth_largest(values: Tensor, k: int) -> Tensor:
    """The k-th of each row ``[N, C]`` on a CPU: ``[N, 1]``. numpy finds it ten times as fast."""
    place = values.shape[1] - k
    return torch.from_numpy(np.partition(values.numpy(), place, axis=1)[:, place : place + 1])


def _largest_of_few(logits: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """`largest` among what reaches the k-th of the segments' maxima, which is hardly more.

    None if a row leaves too many, as equal logits do, or has a NaN, which nothing reaches.
    """
    count, width = logits.shape
    segments = width // _SEGMENT
    parts = logits[:, : segments * _SEGMENT].view(count, segments, _SEGMENT)
    rest = logits[:, segments * _SEGMENT :]
    maxima = _maxima(parts)
    if maxima.isnan().any() or rest.isnan().any():
        return None
    least = _kth_largest(maxima, k)
    chosen = torch.from_numpy(np.flatnonzero((maxima >= least).numpy()))
    if len(chosen) > _MOST_LEFT * k * count:
        return None
    row, segment = chosen // segments, chosen % segments
    if parts.is_contiguous():
        candidates = parts.flatten(0, 1).index_select(0, chosen)
    else:
        candidates = parts[row, segment]
    column = segment * _SEGMENT
    if width > segments * _SEGMENT:
        lacking = _SEGMENT - rest.shape[1]
        rest = torch.nn.functional.pad(rest, (0, lacking), value=-math.inf)
        row = torch.cat([row, torch.arange(count)])
        column = torch.cat([column, column.new_full((count,), segments * _SEGMENT)])
        candidates = torch.cat([candidates, rest])
    reaches = candidates.to(least.dtype).numpy() >= least[row].numpy()
    place = torch.from_numpy(np.flatnonzero(reaches))
    part, offset = place // _SEGMENT, place % _SEGMENT
    row, column, value = row[part], column[part] + offset, candidates.flatten()[place]
    if width > segments * _SEGMENT:
        row, order = row.sort(stable=True)
        column, value = column[order], value[order]
    columns = _largest_of_ragged(row, column, value, count, k)
    return None if columns is None else (logits.gather(1, columns), columns)


def _maxima(parts: Tensor) -> Tensor:
    """Largest of each ``[N, S, W]`` in the dtype of statistics, to which blocks are first brought:
    torch is slow at comparing narrower ones."""
    dtype = accumulation_dtype(parts.dtype)
    if parts.dtype == dtype:
        return parts.amax(2)
    count, segments, width = parts.shape
    maxima = parts.new_empty(count, segments, dtype=dtype)
    scratch = Scratch(count, segments * width, dtype, parts.device)
    for rows in row_blocks(count, segments * width, parts.device):
        block = parts[rows]
        wide = scratch.take("wide", len(block)).view(block.shape).copy_(block)
        torch.amax(wide, 2, out=maxima[rows])
    return maxima


def _largest_of_ragged(
    row: Tensor, column: Tensor, value: Tensor, count: int, k: int
) -> Tensor | None:
    """Columns ``[N, k]`` of `largest` among these ``[M]``, which stand in the order of their rows.

    None if a row has too many or not enough.
    """
    found = row.bincount(minlength=count)
    most = int(found.max())
    if most > _MOST_LEFT * k or int(found.min()) < k:
        return None
    padded = np.full((count, most), np.iinfo(np.int64).max)
    padded[np.arange(most) < found.numpy()[:, None]] = packed(keys_of(value).bitwise_not_(), column)
    padded.sort(axis=1)
    return places_of(torch.from_numpy(padded[:, :k]))


def _largest_of_all(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`largest` by torch.topk, and its ties by the lowest column."""
    values, columns = logits.topk(k, 1)
    return _ordered(values, _lowest_columns(logits, values, columns))


def _ordered(values: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """By (value, lowest column)."""
    columns, order = columns.sort(1)
    values, order = descending(values.gather(1, order))
    return values, columns.gather(1, order)


def _lowest_columns(logits: Tensor, values: Tensor, columns: Tensor) -> Tensor:
    """The columns, those of the least value exchanged for the lowest that hold it."""
    least, width = values[:, -1:], logits.shape[1]
    # Columns are exact in fp32 up to 2^24.
    reversed_columns = torch.arange(width, 0, -1, dtype=torch.float32, device=logits.device)
    ties = torch.where(logits == least, reversed_columns, 0.0).topk(values.shape[1], 1).values
    lowest = (width - ties).long()
    is_least = values == least
    return torch.where(is_least, lowest.gather(1, (is_least.cumsum(1) - 1).clamp_(min=0)), columns)
