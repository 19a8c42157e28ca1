"""Keys and values of earlier positions, one store per layer.

All rows end at the same slot: a row of `n` positions in a cache of `t` slots has slots t - n to t.
So one token per row is one slot of all rows, written as a slice. A layer with a window has a ring
of as many slots. A prefix that all rows share exists once.

Shapes: b rows, g key-value heads of this rank, d head size, t slots, S new slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distill.runtime.segments import copied

__all__ = [
    "Cache",
    "KeyBytes",
    "KeyShape",
    "LayerCache",
    "Prefix",
    "bytes_per_row",
    "integers",
    "layer_bytes_per_row",
]


def integers(values: Sequence[int], device: torch.device) -> Tensor:
    """Return integers of the host on a device, without a wait for it."""
    return copied(torch.tensor(values, dtype=torch.int64), device)


@dataclass(frozen=True)
class KeyShape:
    """The keys of one layer: heads of this rank, their size, and the window, None without."""

    heads: int
    head_size: int
    window: int | None

    def slots(self, capacity: int) -> int:
        """Return the slots that a row of `capacity` positions needs."""
        return capacity if self.window is None else min(self.window, capacity)


def bytes_per_row(shapes: Sequence[KeyShape], capacity: int, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of one row with `capacity` positions."""
    numbers = sum(shape.slots(capacity) * shape.heads * shape.head_size for shape in shapes)
    return 2 * numbers * dtype.itemsize


def layer_bytes_per_row(
    shapes: Sequence[KeyShape], positions: int, dtype: torch.dtype, *, prefix: int = 0
) -> int:
    """Return the most bytes of keys and values of one layer and one row, joined for a step.

    `positions`: old and new ones of the row, all of them; `prefix`: those before, of which a window
    sees the last.
    """
    numbers = max(
        ((positions + shape.slots(prefix)) * shape.heads * shape.head_size for shape in shapes),
        default=0,  # a stage without a layer
    )
    return 2 * numbers * dtype.itemsize


@dataclass(frozen=True)
class KeyBytes:
    """Bytes of keys and values on the pipeline stage that needs the most for them."""

    stages: Sequence[Sequence[KeyShape]]
    dtype: torch.dtype

    def row(self, capacity: int) -> int:
        """Return the bytes of the cache of a row with `capacity` positions."""
        return max(bytes_per_row(shapes, capacity, self.dtype) for shapes in self.stages)

    def most(self, given: int, added: int, *, prefix: int, copies: int) -> int:
        """Return the most bytes of a row at any time: its caches, and its part of a layer's copy.

        copies: of its cache at the same time. The first step after a prefix joins each layer's keys
        with it. Then `copies - 1` copies of the row are continued, or steps of one position follow.
        """
        found = []
        for shapes in self.stages:
            row = bytes_per_row(shapes, given + added, self.dtype) if copies else 0
            first = layer_bytes_per_row(shapes, given, self.dtype, prefix=prefix) if prefix else 0
            found.append(row + first)
            if copies > 1:
                later = layer_bytes_per_row(shapes, given + added, self.dtype, prefix=prefix)
                found += [copies * row, (copies - 1) * (row + later)]
            elif copies:
                # One store is copied: its rows that go on, or all of it in fp32 for the scores.
                found.append(row + layer_bytes_per_row(shapes, given + added, self.dtype))
        return max(found)


@dataclass
class LayerCache:
    """Keys, rotated already, and values of one layer, each [b, g, slots, d]."""

    keys: Tensor
    values: Tensor
    window: int | None

    @property
    def slots(self) -> int:
        """The slots of the store."""
        return self.keys.shape[2]

    def ordered(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the stored part of `length` slots in their order, [b, g, stored, d]."""
        if length == self.slots:
            return self.keys, self.values
        if length < self.slots or not self.slots:
            return self.keys[:, :, :length], self.values[:, :, :length]
        shift = -(length % self.slots)
        return self.keys.roll(shift, 2), self.values.roll(shift, 2)

    def append(self, key_bgd: Tensor, value_bgd: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Store one slot after `length`; returns all stored ones, in any order."""
        slot = length % self.slots
        self.keys.select(2, slot).copy_(key_bgd)
        self.values.select(2, slot).copy_(value_bgd)
        stored = min(length + 1, self.slots)
        return self.keys.narrow(2, 0, stored), self.values.narrow(2, 0, stored)

    def replace(self, keys_bgtd: Tensor, values_bgtd: Tensor, length: int) -> None:
        """Store the last of the slots that end at `length`."""
        count = min(self.slots, keys_bgtd.shape[2])
        if not count:
            return
        index = torch.arange(length - count, length, device=self.keys.device) % self.slots
        self.keys[:, :, index] = keys_bgtd[:, :, -count:]
        self.values[:, :, index] = values_bgtd[:, :, -count:]

    def select(self, rows: Tensor) -> LayerCache:
        """Return some of the rows, in a given order, repeated or not."""
        return LayerCache(
            self.keys.index_select(0, rows), self.values.index_select(0, rows), self.window
        )


@dataclass(frozen=True)
class Prefix:
    """The keys and values [1, g, stored, d] per layer of positions before those of all rows."""

    length: int
    layers: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, cache: Cache) -> Prefix:
        """Take the only row of a cache, and its layers out of it: one at a time exists twice."""
        assert cache.rows == 1
        layers = []
        while cache.layers:
            keys, values = cache.layers.pop(0).ordered(cache.length)
            layers.append((keys.contiguous(), values.contiguous()))
        return cls(cache.length, tuple(layers))


@dataclass
class Cache:
    """The layers of this rank in the order of their calls, and where each row begins.

    Attributes:
        length: slots in use, the same for all layers.
        starts: the first slot of each row, on the host; `starts_b` the same on the device, int64.
        prefix: of all rows, None without.
    """

    layers: list[LayerCache]
    starts: list[int]
    starts_b: Tensor
    length: int = 0
    prefix: Prefix | None = None

    @classmethod
    def empty(
        cls,
        shapes: Sequence[KeyShape],
        rows: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        prefix: Prefix | None = None,
    ) -> Cache:
        """Allocate the memory of `rows` with up to `capacity` positions after the prefix.

        With a capacity of 0 one step may run, whose keys and values are not stored.
        """
        layers = []
        for shape in shapes:
            size = (rows, shape.heads, shape.slots(capacity), shape.head_size)
            store = [torch.zeros(size, dtype=dtype, device=device) for _ in range(2)]
            layers.append(LayerCache(store[0], store[1], shape.window))
        starts_b = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(layers, [0] * rows, starts_b, prefix=prefix)

    @property
    def rows(self) -> int:
        """The rows."""
        return len(self.starts)

    @property
    def first_position(self) -> int:
        """The position of a row's first slot."""
        return 0 if self.prefix is None else self.prefix.length

    def select(self, rows: Sequence[int]) -> Cache:
        """Return some of the rows, in a given order, repeated or not."""
        index = integers(rows, self.starts_b.device)
        return Cache(
            [layer.select(index) for layer in self.layers],
            [self.starts[row] for row in rows],
            self.starts_b.index_select(0, index),
            self.length,
            self.prefix,
        )

    def drop_last(self, counts: Sequence[int]) -> None:
        """Forget the last positions of each row; every store has a slot per position.

        Rows still end at the same slot: those that lose more than the least move towards the end.
        """
        least = min(counts)
        moves = [count - least for count in counts]
        starts = [start + move for start, move in zip(self.starts, moves, strict=True)]
        unused, end = min(starts), self.length - least
        device = self.starts_b.device
        moves_b = integers(moves, device)
        slots_bt = torch.arange(unused, end, device=device) - moves_b[:, None]
        index = slots_bt.clamp_(min=0)[:, None, :, None]
        for layer in self.layers:
            assert layer.slots >= self.length, (layer.slots, self.length)
            for store in (layer.keys, layer.values):
                _, heads, _, size = store.shape
                moved = store.gather(2, index.expand(-1, heads, -1, size))
                store[:, :, : end - unused] = moved
        self.length = end - unused
        self.starts = [start - unused for start in starts]
        self.starts_b = self.starts_b + moves_b - unused

    def reduce_to(self, rows: Sequence[int]) -> None:
        """Drop all but some of the rows, in place; one store at a time exists twice."""
        index = integers(rows, self.starts_b.device)
        for layer in self.layers:
            layer.keys = layer.keys.index_select(0, index)
            layer.values = layer.values.index_select(0, index)
        self.starts = [self.starts[row] for row in rows]
        self.starts_b = self.starts_b.index_select(0, index)
