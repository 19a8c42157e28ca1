"""Batches on context ranks and devices: shards, documents, copies on the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import cast

import pytest
import torch

from megatron_distill.runtime.batch import zigzag_index
from megatron_distill.runtime.host_copy import HostCopy
from megatron_distill.runtime.segments import Segments, in_sequence_order
from tests.support.batches import batch_of


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shards_cover_the_sequence_and_share_the_causal_triangle(size: int) -> None:
    length = 24
    shards = [zigzag_index(length, rank=rank, size=size) for rank in range(size)]
    assert torch.cat(shards).sort().values.tolist() == list(range(length))
    assert all((shard.diff() > 0).all() for shard in shards)
    work = {int((shard + 1).sum()) for shard in shards}
    assert len(work) == 1, "some ranks attend to more pairs than others"


def test_two_ranks_by_hand() -> None:
    assert zigzag_index(8, rank=0, size=2).tolist() == [0, 1, 6, 7]
    assert zigzag_index(8, rank=1, size=2).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("size", [1, 2])
def test_trained_rows_are_the_places_that_a_mask_trains(size: int) -> None:
    for rank in range(size):
        batch = batch_of(3, 16).context_shard(rank, size).with_trained_rows()
        is_trained = (batch.ce_mask_bs | batch.kd_mask_bs).flatten().tolist()
        assert batch.trained_rows_n.tolist() == [n for n, yes in enumerate(is_trained) if yes]
        assert batch.to("cpu").trained_rows_n is not None


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_field_goes_with_its_position(size: int) -> None:
    whole = batch_of(2, 16)
    for rank in range(size):
        shard = whole.context_shard(rank, size)
        index = zigzag_index(16, rank=rank, size=size)
        assert shard.sequence_index_s.tolist() == index.tolist()
        for name in ("tokens_bs", "labels_bs", "ce_mask_bs", "kd_mask_bs", "position_ids_bs"):
            assert torch.equal(getattr(shard, name), getattr(whole, name)[:, index]), name
        assert torch.equal(shard.document_ids_bS, whole.document_ids_bS)
        assert torch.equal(shard.sample_ids_b, whole.sample_ids_b)
        assert shard.isolate_documents


def test_a_shard_cannot_be_sharded_again() -> None:
    with pytest.raises(AssertionError, match="sharded already"):
        batch_of(1, 16).context_shard(0, 2).context_shard(0, 2)


def test_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(AssertionError):
        zigzag_index(18, rank=0, size=2)


def test_moving_to_a_device_moves_every_tensor() -> None:
    moved = batch_of(1, 4).to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 8
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_a_copy_on_a_device_is_read_on_the_host() -> None:
    batch = batch_of(2, 16).with_trained_rows()
    assert batch.on_host is batch
    assert batch.to("meta").on_host is batch
    assert batch.to("meta").to("meta").on_host is batch


BOUNDS = ((0, 5, 20, 32), (0, 1, 28, 32))


def test_a_document_ends_where_the_id_changes() -> None:
    ids = torch.tensor([[0, 0, 1, 2, 2, 2, -1, -1], [0] * 8])
    assert Segments.of_documents(ids).bounds == ((0, 2, 3, 6, 8), (0, 8))
    assert Segments.whole(2, 8).bounds == ((0, 8), (0, 8))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gathered_pieces_are_put_in_the_order_of_the_sequence(size: int) -> None:
    length = 24
    ranks = torch.cat([zigzag_index(length, rank=rank, size=size) for rank in range(size)])
    assert in_sequence_order(ranks, size=size).tolist() == list(range(length))


@pytest.mark.parametrize(("size", "window"), [(1, None), (1, 6), (2, None), (2, 1), (4, 6)])
def test_every_query_sees_its_document_up_to_itself(size: int, window: int | None) -> None:
    for rank in range(size):
        segments = Segments(BOUNDS).sharded(rank, size)
        index = zigzag_index(32, rank=rank, size=size).tolist()
        ranges = segments.key_ranges(window)
        assert ranges.last_s.tolist() == index
        for sample, bound in enumerate(BOUNDS):
            for place, position in enumerate(index):
                start = max(edge for edge in bound if edge <= position)
                if window is not None:
                    start = max(start, position - window + 1)
                assert int(ranges.first_bs[sample, place]) == start
        hidden = ranges.hidden(slice(2, 6))
        keys = torch.arange(index[5] + 1)
        first, last = ranges.first_bs[:, 2:6, None], ranges.last_s[2:6, None]
        assert torch.equal(hidden, ~((keys >= first) & (keys <= last)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_segments_cover_the_queries_of_a_rank_once(size: int) -> None:
    for rank in range(size):
        segments = Segments(BOUNDS).sharded(rank, size)
        for sample in range(2):
            rows = [
                row
                for segment in segments.segments
                if segment.sample == sample
                for row in range(segment.first_query, segment.first_query + segment.queries)
            ]
            assert rows == list(range(32 // size))


def test_packed_lengths_by_hand() -> None:
    head, tail = Segments(BOUNDS).sharded(0, 2).to("cpu").packed
    assert (head.piece.start, head.piece.stop, tail.piece.start, tail.piece.stop) == (0, 8, 24, 32)
    assert head.first_keys == (0, 0)
    assert head.query_ends.tolist() == [0, 5, 8, 9, 16]
    assert head.key_ends.tolist() == head.query_ends.tolist()
    assert tail.first_keys == (20, 1)
    assert tail.query_ends.tolist() == [0, 8, 12, 16]
    assert tail.key_ends.tolist() == [0, 12, 39, 43]
    assert (tail.longest_query, tail.longest_key) == (8, 27)
    assert tail.query_ends.dtype is torch.int32
    assert len(Segments(BOUNDS).sharded(1, 2).to("cpu").packed) == 1  # its pieces are adjacent


def test_a_layer_asks_once_for_the_derived_values_of_its_kernel() -> None:
    segments, made = Segments(BOUNDS), []
    for _ in range(2):
        assert segments.derived("key", lambda: made.append(1) or len(made)) == 1
    assert segments.sharded(0, 2).derived("key", lambda: 5) == 5


OWN = torch.device("cuda", 3)


class Devices(threading.local):
    """The current device of each thread, as CUDA has it: GPU 0 in a new one."""

    current = 0


def test_another_thread_waits_on_the_device_of_the_originals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices, waited = Devices(), list[int]()

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        before, devices.current = devices.current, chosen.index
        yield
        devices.current = before

    class Event:
        def synchronize(self) -> None:
            waited.append(devices.current)

    monkeypatch.setattr(torch.cuda, "device", device)
    host = torch.arange(3)
    copies = HostCopy((host,), OWN, cast(torch.cuda.Event, Event()))
    with ThreadPoolExecutor(1) as other:
        (found,) = other.submit(copies.read).result()
        assert other.submit(lambda: devices.current).result() == 0
    assert found is host
    assert waited == [3]


def test_a_copy_of_host_memory_waits_for_nothing() -> None:
    one, other = torch.arange(3), torch.zeros(())
    found = HostCopy.begin(one, other).read()
    assert found[0] is one
    assert found[1] is other
