"""Shards of a checkpoint: their rectangles, checksums, copies, memory and description."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_distill.errors import CheckpointError
from megatron_distill.runtime.mcore_patches import prepare_megatron_core
from megatron_distill.train.checkpoint.best import BestRule
from megatron_distill.train.checkpoint.checksums import (
    joined,
    register_of,
    register_of_whole,
    shifted,
)
from megatron_distill.train.checkpoint.copies import _Range, _sources
from megatron_distill.train.checkpoint.description import COMMON_FILE, resolve_checkpoint

prepare_megatron_core(on_cuda=False)

from megatron_distill.train.checkpoint import shards as module  # noqa: E402
from megatron_distill.train.checkpoint.folder import _sizes  # noqa: E402
from megatron_distill.train.checkpoint.shards import (  # noqa: E402
    Shard,
    ShardPart,
    Staging,
    TensorWindow,
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


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6))
def test_parts_have_the_checksum_of_the_whole(content: bytes, cuts: list[int]) -> None:
    places = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    register = 0
    for start, stop in pairwise(places):
        register ^= shifted(register_of(content[start:stop]), len(content) - stop)
    assert register == register_of_whole(zlib.crc32(content), len(content))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 7), st.data())
def test_a_grid_of_parts_is_as_if_zeros_were_between(
    shape: list[int], width: int, data: st.DataObject
) -> None:
    gaps = data.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    strides, stride = [0] * len(shape), width
    for axis in reversed(range(len(shape))):
        strides[axis] = stride + gaps[axis]
        stride = strides[axis] * shape[axis]
    whole = bytearray(stride)
    registers = np.empty(math.prod(shape), np.int64)
    end = 0
    for number, index in enumerate(np.ndindex(*shape)):
        part = data.draw(st.binary(min_size=width, max_size=width))
        start = sum(at * n for at, n in zip(index, strides, strict=True))
        end = start + width
        whole[start:end] = part
        registers[number] = register_of(part)
    assert joined(registers.reshape(shape), strides) == register_of(whole[:end])


RECTANGLE = ("embedding", (0, 0), (10, 10))


def sources(start: int, stop: int, *offers: tuple[int, int, int], receiver: int) -> list[object]:
    """Sender, start and stop of each part of a range in a group of four; offers by sender."""
    given = [(sender, _Range(RECTANGLE, first, last)) for sender, first, last in offers]
    found = list(_sources(_Range(RECTANGLE, start, stop), given, receiver, 4))
    assert all((sender, offer) in given for sender, offer, _, _ in found)
    assert all(offer.start <= begin < end <= offer.stop for _, offer, begin, end in found)
    return [(sender, begin, end) for sender, _, begin, end in found]


def test_a_range_is_put_together_from_the_ranks_that_have_its_parts() -> None:
    offers = ((2, 60, 100), (0, 0, 25), (1, 25, 60))
    expected = [(0, 10, 25), (1, 25, 60), (2, 60, 90)]
    assert sources(10, 90, *offers, receiver=3) == expected
    assert sources(30, 50, *offers, receiver=3) == [(1, 30, 50)]


def test_of_several_that_have_it_the_next_rank_behind_the_receiver_sends() -> None:
    offers = ((0, 0, 50), (2, 0, 50), (0, 50, 100), (2, 50, 100))
    assert sources(0, 100, *offers, receiver=1) == [(2, 0, 50), (2, 50, 100)]
    assert sources(0, 100, *offers, receiver=3) == [(0, 0, 50), (0, 50, 100)]


def test_ranges_that_overlap_are_sent_once() -> None:
    assert sources(0, 100, (1, 40, 100), (0, 0, 70), receiver=3) == [(0, 0, 70), (1, 70, 100)]


class OnDevice(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True


class Status(Enum):
    success = 0
    refused = 2


@dataclass
class Driver:
    """CUDA's functions for host memory; notes what is locked and how often it was waited for."""

    locked: dict[int, int] = field(default_factory=dict)
    calls: int = 0
    waits: int = 0
    status: Status = Status.success
    cudaError = Status

    def cudaHostRegister(self, address: int, count: int, flags: int) -> Status:  # noqa: N802
        assert flags == 0
        self.calls += 1
        if self.status is Status.success:
            self.locked[address] = count
        return self.status

    def cudaHostUnregister(self, address: int) -> Status:  # noqa: N802
        del self.locked[address]
        return Status.success

    def wait(self) -> None:
        self.waits += 1


@pytest.fixture
def driver() -> Iterator[Driver]:
    found = Driver()
    stream = SimpleNamespace(synchronize=found.wait)
    with (
        patch("torch.cuda.cudart", lambda: found),
        patch("torch.cuda.check_error", lambda status: status),
        patch("torch.cuda.current_stream", lambda: stream),
    ):
        yield found


def windows(*counts: int) -> list[TensorWindow]:
    return [
        TensorWindow(str(count), torch.arange(float(count)).as_subclass(OnDevice), (0,), (count,))
        for count in counts
    ]


def test_memory_is_locked_once_and_each_save_waits_once(driver: Driver) -> None:
    staging = Staging()
    for save in (1, 2):
        copies = staging.copies(windows(3, 40))
        assert all(not copy.data.is_cuda for copy in copies)
        assert [copy.data.tolist() for copy in copies] == [list(range(3)), list(range(40))]
        assert driver.waits == save
    assert driver.calls == 1
    ((address, count),) = driver.locked.items()
    assert address == copies[0].data.data_ptr()
    assert count == 64 + 192  # bytes, of a cache line each
    staging.copies(windows(300))
    assert driver.calls == 2
    assert list(driver.locked.values()) == [1216]
    staging.release()
    assert driver.locked == {}


def test_a_refusal_names_the_key_and_the_amount(driver: Driver) -> None:
    driver.status = Status.refused
    with pytest.raises(CheckpointError, match=r"checkpoint\.asynchronous needs .* GB"):
        Staging().copies(windows(3))


prepare_megatron_core(on_cuda=False)

from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME  # noqa: E402


def test_sizes_that_look_the_same_are_told_apart() -> None:
    assert _sizes(3_912_345, 3_906_112) == ("3,912,345 bytes", "3,906,112 bytes")
    assert _sizes(3_912_345, 3_806_112) == ("3.91 MB", "3.81 MB")


def test_the_common_file_has_the_name_that_megatron_core_gives_it() -> None:
    assert COMMON_FILE == COMMON_STATE_FNAME


def test_a_pickle_is_refused_and_the_common_file_of_a_partial_checkpoint_is_none(
    tmp_path: Path,
) -> None:
    partial = tmp_path / "step_0000002.partial"
    partial.mkdir()
    (partial / COMMON_FILE).write_bytes(b"")
    with pytest.raises(CheckpointError, match="contains no complete checkpoint"):
        resolve_checkpoint(str(tmp_path))
    (partial / "model.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.pt is a pickle"):
        resolve_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("metric", "is_missing"),
    [("validation.loss", True), ("validation.ce_loss", False), ("mmlu.acc", False)],
)
def test_a_validation_figure_that_the_run_lacks_is_named(metric: str, is_missing: bool) -> None:
    """A metric of a task is checked at the start, where the task is read."""
    text = BestRule(metric, "min").missing_figure(["validation.ce_loss", "validation.kd_loss"])
    assert (f"checkpoint.keep_best.metric = '{metric}' is not a figure" in text) == is_missing
    assert ("give one of validation.ce_loss, validation.kd_loss" in text) == is_missing


@pytest.mark.parametrize(
    ("metric", "is_missing"),
    [("quiz.letter_mass", True), ("quiz.acc", False), ("other.acc", False)],
)
def test_a_measure_that_an_evaluation_did_not_give_is_named(metric: str, is_missing: bool) -> None:
    """Such as the mass of letters where choices have several tokens."""
    text = BestRule(metric, "max").missing_measure(["quiz"], ["quiz.acc", "quiz.acc_norm"])
    assert (
        f"checkpoint.keep_best.metric = '{metric}' is not in the results of quiz" in text
    ) == is_missing
    assert ("give one of quiz.acc, quiz.acc_norm" in text) == is_missing
