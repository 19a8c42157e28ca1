"""Initial weights from somewhere else: every rank reads its own slices and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_distill.models.initialise import sharded_tensors
from megatron_distill.models.parameters import Place
from megatron_distill.runtime.groups import Groups


class WeightSource(Protocol):
    """Something that knows a model's global tensors by the names of sharded checkpoints."""

    def read_into(self, destination: Tensor, key: str, place: Place, start: Sequence[int]) -> None:
        """Copy a window of the tensor at `place` (layer, expert) into `destination`.

        `start` is the window's first row and column. Rows past the real vocabulary become zero.
        """
        ...

    def read(
        self, key: str, place: Place, start: Sequence[int], shape: tuple[int, ...]
    ) -> Tensor | None:
        """Return a window as it lies in one file, unread, or None where it does not.

        The window has real rows only.
        """
        ...


class WindowReader:
    """Windows of a source for one look each: as they lie, or put together in one kept buffer.

    The buffer is kept because memory that is new is slow at its first touch.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(
        self,
        key: str,
        place: Place,
        start: Sequence[int],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return a window in `dtype`, valid until the next is read, not to be written to."""
        found = self._source.read(key, place, start, shape)
        if found is not None and found.dtype == dtype:
            return found
        count = torch.Size(shape).numel() * dtype.itemsize
        if self._buffer.numel() < count:
            self._buffer = torch.empty(count, dtype=torch.uint8)
        window = self._buffer[:count].view(dtype).view(shape)
        self._source.read_into(window, key, place, start)
        return window


@torch.no_grad()
def fill(
    chunks: Sequence[torch.nn.Module],
    source: WeightSource,
    *,
    groups: Groups,
    keep_layers: Sequence[int] | None = None,
) -> None:
    """Fill every parameter in place, in any layout.

    `keep_layers` names, for each of our layers, the source's layer that it starts from.
    """
    for part in sharded_tensors(chunks, groups):
        assert part.data is not None
        axes = part.prepend_axis_num
        place = part.global_offset[:axes]
        if axes and keep_layers is not None:
            place = (keep_layers[place[0]], *place[1:])
        source.read_into(part.data, part.key, place, part.global_offset[axes:])
