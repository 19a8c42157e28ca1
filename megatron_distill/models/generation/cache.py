"""Keys and values of earlier positions, one store per layer.

All rows end at the same slot: a row of `n` positions in a cache of `t` slots has slots t - n to t.
So one token per row is one slot of all rows, written as a slice. A layer with a window has a ring
of as many slots. A prefix that all rows share exists once.

Shapes: b rows, g key-value heads of this rank, d head size, t slots, S new slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatron_distill.runtime.segments import copied

__all__ = [
    "Cache",
    "KeyBytes",
    "KeyShape",
    "LayerCache",
    "Prefix",
    "aligned",
    "as_mask",
    "bytes_per_row",
    "copies_prefix",
    "integers",
    "layer_bytes_per_row",
    "multiplies_all_heads",
]


# Rows of a mask begin at multiples of so many numbers, or CUDA's kernels copy it for each layer.
_ALIGNED = 16


def aligned(numbers: int) -> int:
    """Return the numbers of a mask's row in memory."""
    return -(-numbers // _ALIGNED) * _ALIGNED


def integers(values: Sequence[int], device: torch.device) -> Tensor:
    """Return integers of the host on a device, without a wait for it."""
    return copied(torch.tensor(values, dtype=torch.int64), device)


def as_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bool [b, K] as a mask [b, 1, 1, K]: bool, or a summand of scores of another type."""
    if dtype is not torch.bool:
        seen = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -math.inf)
    return seen[:, None, None]


def copies_prefix(device: torch.device) -> bool:
    """Return whether rows that write begin with copies of their prefix.

    A GPU attends to one store of keys in one kernel. Two take some twenty, which copy both in fp32.
    A CPU multiplies the queries of all rows with the keys of the prefix at once.
    """
    return device.type == "cuda"


def multiplies_all_heads(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether one query per row is multiplied with the keys of all heads at once.

    torch's fused attention of a CPU has products head by head.
    """
    return device.type == "cpu" and dtype is torch.float32


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
    shapes: Sequence[KeyShape],
    positions: int,
    dtype: torch.dtype,
    *,
    is_capped: bool,
    prefix: int = 0,
) -> int:
    """Return the most bytes of keys and values of one layer and one row, joined for a step.

    `positions`: old and new ones of the row, all of them; `prefix`: those before, of which a window
    sees the last. `is_capped`: scores have a soft cap, and keys are copied once more, in fp32.
    """
    numbers = max(
        ((positions + shape.slots(prefix)) * shape.heads * shape.head_size for shape in shapes),
        default=0,  # a stage without a layer
    )
    return 2 * numbers * dtype.itemsize + _fp32_bytes(numbers, dtype, is_capped=is_capped)


def _fp32_bytes(numbers: int, dtype: torch.dtype, *, is_capped: bool) -> int:
    """Return the bytes of the fp32 copy that scores with a soft cap need."""
    return 4 * numbers if is_capped and dtype.itemsize < 4 else 0


@dataclass(frozen=True)
class KeyBytes:
    """Bytes of keys and values on the pipeline stage that needs the most for them.

    is_capped: as in `layer_bytes_per_row`. drawn: bytes of the draw of one row's next id.
    copies_prefix: rows begin with a copy of the prefix, see `Cache.empty`.
    """

    stages: Sequence[Sequence[KeyShape]]
    dtype: torch.dtype
    is_capped: bool
    drawn: int = 0
    copies_prefix: bool = False

    def shared(self, prefix: int) -> int:
        """Return the bytes of a prefix of all rows: its cache, and an fp32 copy of a layer."""
        found = [0]
        for shapes in self.stages:
            numbers = [shape.slots(prefix) * shape.heads * shape.head_size for shape in shapes]
            copied = _fp32_bytes(max(numbers, default=0), self.dtype, is_capped=self.is_capped)
            found.append(bytes_per_row(shapes, prefix, self.dtype) + copied)
        return max(found)

    def most(self, given: int, added: int, *, prefix: int, copies: int) -> int:
        """Return the most bytes of a row at any time: its caches, and its part of a layer's copy.

        copies: of its cache at the same time. The first step after a prefix joins each layer's keys
        with it. Then `copies - 1` copies of the row are continued, or steps of one position follow.
        """
        found = []
        copied = prefix if self.copies_prefix else 0
        for shapes in self.stages:
            row = bytes_per_row(shapes, copied + given + added, self.dtype) if copies else 0
            first = self._layer(shapes, given, prefix) if prefix else 0
            found.append(row + first)
            if copies > 1:
                later = self._layer(shapes, given + added, prefix)
                found += [copies * row, (copies - 1) * (row + later)]
            elif copies:
                # One store is copied: its rows that go on, or its keys in fp32, which take no more.
                whole = layer_bytes_per_row(
                    shapes, copied + given + added, self.dtype, is_capped=False
                )
                found.append(row + max(whole, self.drawn))
        return max(found)

    def _layer(self, shapes: Sequence[KeyShape], positions: int, prefix: int) -> int:
        return layer_bytes_per_row(
            shapes, positions, self.dtype, is_capped=self.is_capped, prefix=prefix
        )


class LayerCache:
    """Keys, rotated already, and values of one layer, [b, g, slots, d] each.

    `parts` are one or two tensors [b, g, n, slots, d]. One holds both, so that a new position of
    all rows is one copy. Or keys stand alone, with the slots of a head side by side in memory:
    the CPU's products of one query with many keys take about half the time then.
    """

    def __init__(self, parts: Sequence[Tensor], window: int | None) -> None:
        self.window = window
        self.take(parts)

    @classmethod
    def empty(
        cls, shape: KeyShape, rows: int, capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> LayerCache:
        """Allocate the memory of `rows` with up to `capacity` positions."""
        slots, size = shape.slots(capacity), shape.head_size
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        if not multiplies_all_heads(dtype, device):
            return cls([zeros(rows, shape.heads, 2, slots, size)], shape.window)
        keys = zeros(rows, shape.heads, 1, size, slots).mT
        return cls([keys, zeros(rows, shape.heads, 1, slots, size)], shape.window)

    def take(self, parts: Sequence[Tensor]) -> None:
        """Take keys and values of other rows."""
        self.parts, self.slots = tuple(parts), parts[0].shape[3]
        self.keys, self.values = (one for part in parts for one in part.unbind(2))
        # Each head of each row as a row of its own, [b g, slots, d]: see `attend_once`.
        self.flat_keys, self.flat_values = self.keys.flatten(0, 1), self.values.flatten(0, 1)

    def of_parts(self, pairs: Tensor) -> Sequence[Tensor]:
        """Divide keys and values, [b, g, 2, ...], as `parts` have them."""
        return (pairs,) if len(self.parts) == 1 else pairs.split(1, 2)

    def ordered(self, length: int) -> Tensor:
        """Return the stored part of `length` slots in their order, [b, g, 2, t, d]."""
        stored = min(length, self.slots)
        first = length % stored if stored < length and stored else 0  # of a ring
        if not first and len(self.parts) == 1:
            return self.parts[0][:, :, :, :stored]
        rows, groups, _, size = self.values.shape
        found = self.values.new_empty(rows, groups, 2, stored, size)
        for part, own in zip(self.parts, self.of_parts(found), strict=True):
            own[:, :, :, : stored - first] = part[:, :, :, first:stored]
            own[:, :, :, stored - first :] = part[:, :, :, :first]
        return found

    def append(self, pair_bg2d: Tensor, length: int) -> int:
        """Store one slot after `length`; returns how many are stored, in any order."""
        for part, own in zip(self.parts, self.of_parts(pair_bg2d), strict=True):
            part.select(3, length % self.slots).copy_(own)
        return min(length + 1, self.slots)

    def write(self, rows_N: Tensor, slots_N: Tensor, pairs_Ng2d: Tensor) -> None:
        """Store positions of some rows at some slots."""
        for part, own in zip(self.parts, self.of_parts(pairs_Ng2d), strict=True):
            part[rows_N, :, :, slots_N] = own

    def replace(self, pairs_bg2td: Tensor, length: int) -> None:
        """Store the last of the slots that end at `length`."""
        count = min(self.slots, pairs_bg2td.shape[3])
        if not count:
            return
        index = torch.arange(length - count, length, device=self.keys.device) % self.slots
        for part, own in zip(self.parts, self.of_parts(pairs_bg2td), strict=True):
            part[:, :, :, index] = own[:, :, :, -count:]

    def move(self, index_b11t1: Tensor) -> None:
        """Store at the first slots those of an index."""
        for part in self.parts:
            index = index_b11t1.expand(-1, *part.shape[1:3], -1, part.shape[4])
            part[:, :, :, : index.shape[3]] = part.gather(3, index)

    def rows(self, rows: Tensor) -> list[Tensor]:
        """Return the parts of some rows, in a given order, repeated or not."""
        return [
            part.index_select(0, rows)
            if part.is_contiguous()
            else part.mT.index_select(0, rows).mT  # in the same order in memory
            for part in self.parts
        ]

    def select(self, rows: Tensor) -> LayerCache:
        """Return a store of some rows, as `rows`."""
        return LayerCache(self.rows(rows), self.window)


@dataclass(frozen=True)
class Prefix:
    """The keys and values [1, g, 2, stored, d] per layer of positions before those of all rows."""

    length: int
    layers: tuple[Tensor, ...]

    @classmethod
    def of(cls, cache: Cache) -> Prefix:
        """Take the only row of a cache, and its layers out of it: one at a time exists twice."""
        assert cache.rows == 1
        layers = []
        while cache.layers:
            layers.append(cache.layers.pop(0).ordered(cache.length).contiguous())
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
    _masks: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict)

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
        copies_prefix: bool = False,
    ) -> Cache:
        """Allocate the memory of `rows` with up to `capacity` positions after the prefix.

        With a capacity of 0 one step may run, whose keys and values are not stored. copies_prefix:
        each row begins with a copy of the prefix, and its steps know of none.
        """
        length = 0 if prefix is None or not copies_prefix else prefix.length
        capacity += length
        layers = [
            LayerCache.empty(shape, rows, capacity, dtype=dtype, device=device) for shape in shapes
        ]
        starts_b = torch.zeros(rows, dtype=torch.int64, device=device)
        if prefix is None or not copies_prefix:
            return cls(layers, [0] * rows, starts_b, prefix=prefix)
        for layer, pairs in zip(layers, prefix.layers, strict=True):
            layer.replace(pairs, length)
        return cls(layers, [0] * rows, starts_b, length)

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

    def move(self, starts: list[int], starts_b: Tensor) -> None:
        """Begin the rows at other slots."""
        self.starts, self.starts_b = starts, starts_b
        self._masks.clear()

    def mask(self, slots: int, copies: int, dtype: torch.dtype) -> Tensor:
        """Return which slots belong to each row, as long as none is written again.

        bool, or what is added to scores, [b copies, 1, 1, slots]; `copies`: of each row, one after
        another. Made once for all steps and layers.
        """
        kind = slots, copies, dtype
        if kind not in self._masks:
            index = torch.arange(aligned(slots), device=self.starts_b.device)
            self._masks[kind] = as_mask(
                index >= self.starts_b.repeat_interleave(copies)[:, None], dtype
            )[..., :slots]
        return self._masks[kind]

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
        index = slots_bt.clamp_(min=0)[:, None, None, :, None]
        assert all(layer.slots >= self.length for layer in self.layers), "a ring has another order"
        for layer in self.layers:
            layer.move(index)
        self.length = end - unused
        self.move([start - unused for start in starts], self.starts_b + moves_b - unused)

    def reduce_to(self, rows: Sequence[int]) -> None:
        """Drop all but some of the rows, in place; one store at a time exists twice."""
        index = integers(rows, self.starts_b.device)
        for layer in self.layers:
            layer.take(layer.rows(index))
        self.move([self.starts[row] for row in rows], self.starts_b.index_select(0, index))
