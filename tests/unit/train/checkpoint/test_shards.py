"""Flat ranges as windows of a tensor, and the shares of replicas."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_distill.runtime.mcore_patches import prepare_megatron_core

prepare_megatron_core(on_cuda=False)

from megatron_distill.train.checkpoint import shards as module  # noqa: E402
from megatron_distill.train.checkpoint.shards import (  # noqa: E402
    Shard,
    ShardPart,
    Staging,
    rectangles,
    shares,
)

SHAPES = st.lists(st.integers(1, 5), max_size=4)


@given(SHAPES, st.data())
def test_rectangles_are_a_range_in_its_order(shape: list[int], data: st.DataObject) -> None:
    count = math.prod(shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    whole = torch.arange(count).view(shape)
    found = []
    for offset, sizes in rectangles(shape, start, stop):
        window = whole
        for axis, (first, length) in enumerate(zip(offset, sizes, strict=True)):
            window = window.narrow(axis, first, length)
        found += window.flatten().tolist()
    assert found == list(range(start, stop))
    assert len(list(rectangles(shape, start, stop))) <= max(1, 2 * len(shape) - 1)


def a_shard(shape: tuple[int, ...], *, start: int = 0, stop: int | None = None) -> Shard:
    """The elements of a rectangle that lies one further than the beginning along every axis."""
    whole = torch.arange(math.prod(shape), dtype=torch.float32)
    return Shard(
        key="w",
        data=whole[start:stop],
        global_shape=tuple(size + 1 for size in shape),
        offset=tuple(1 for _ in shape),
        shape=shape,
        first=start,
    )


@pytest.mark.parametrize("block_bytes", [4, 40, 1 << 20])
def test_windows_of_any_block_size_hold_the_part(block_bytes: int) -> None:
    shard = a_shard((1, 6, 5), start=3, stop=28)
    expected = torch.full(shard.global_shape, -1.0)
    expected[1:, 1:, 1:] = torch.arange(30.0).view(1, 6, 5)
    found = torch.full(shard.global_shape, -1.0)
    with patch.object(module, "_BLOCK_BYTES", block_bytes):
        windows = list(ShardPart(shard, 1, 24).windows())
    for window in windows:
        assert window.data.is_contiguous()
        assert window.data.nbytes <= max(block_bytes, 20)
        place = tuple(
            slice(first, first + size)
            for first, size in zip(window.offset, window.data.shape, strict=True)
        )
        assert bool((found[place] == -1).all())
        found[place] = window.data
    inside = (expected >= 4) & (expected < 27)
    assert found.equal(torch.where(inside, expected, torch.tensor(-1.0)))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1), st.integers(1, 5))
def test_shares_hold_every_element_once_and_differ_by_a_row(
    shapes: list[tuple[int, int]], size: int
) -> None:
    held = [a_shard(shape) for shape in shapes]
    found = shares(held, size)
    assert len(found) == size
    for shard in held:
        spans = [(p.start, p.stop) for parts in found for p in parts if p.shard is shard]
        assert [i for span in spans for i in range(*span)] == list(range(shard.data.numel()))
    nbytes = [sum(part.data.nbytes for part in parts) for parts in found]
    row = 4 * max(shape[-1] for shape in shapes)
    assert max(nbytes) <= sum(nbytes) / size + row + 4


def test_a_save_s_copies_stay_while_the_weights_go_on_and_the_next_reuses_the_memory() -> None:
    staging = Staging()
    held = [a_shard((3, 5)), a_shard((2, 2), start=1)]
    windows = [w for shard in held for w in ShardPart(shard, 0, shard.data.numel()).windows()]
    expected = [window.data.clone() for window in windows]
    copies = staging.copies(windows)
    for shard in held:
        shard.data.add_(1)
    assert all(a.data.equal(b) for a, b in zip(copies, expected, strict=True))
    again = staging.copies(windows)
    assert [w.data.data_ptr() for w in again] == [w.data.data_ptr() for w in copies]
    assert all(a.data.equal(b.data) for a, b in zip(again, windows, strict=True))
