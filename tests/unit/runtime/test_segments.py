"""Documents as lengths: bounds from ids, the pieces of a context rank, the keys of each query."""

from __future__ import annotations

import pytest
import torch

from megatron_distill.runtime.batch import zigzag_index
from megatron_distill.runtime.segments import Segments, in_sequence_order

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
