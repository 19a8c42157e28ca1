"""Shards of a vocabulary, blocks of rows and their buffers."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distill.ops import VocabShard
from megatron_distill.ops.workspace import Scratch, accumulation_dtype, allocate, row_blocks


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 300), world=st.integers(1, 8), extra=st.integers(0, 40))
def test_every_real_id_is_owned_once_and_padding_by_no_rank(
    size: int, world: int, extra: int
) -> None:
    padded = (-(-size // world) + extra) * world
    shards = [VocabShard.for_rank(size, padded, rank, world) for rank in range(world)]
    ids = torch.arange(padded + 3)
    owners = torch.stack([shard.owns(ids) for shard in shards]).sum(0)
    assert owners.tolist() == [1] * size + [0] * (padded + 3 - size)
    assert sum(shard.real_width for shard in shards) == size
    for shard in shards:
        assert shard.width == padded // world
        assert 0 <= shard.real_width <= shard.width
        owned = ids[shard.owns(ids)]
        assert torch.equal(shard.local(owned) + shard.start, owned)
        assert (shard.local(owned) < shard.real_width).all()


def test_ids_of_other_shards_are_clamped_into_range() -> None:
    shard = VocabShard(10, 4, 8)
    assert shard.local(torch.tensor([-100, 0, 4, 7, 9, 999])).tolist() == [0, 0, 0, 3, 3, 3]
    padded = VocabShard(10, 12, 16)
    assert padded.local(torch.tensor([0, 13])).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 4), "size is 0"),
        ((4, 3, 2), r"\[3, 2\)"),
        ((4, -1, 2), r"\[-1, 2\)"),
    ],
)
def test_impossible_shards_are_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VocabShard(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((100, 96, 0, 2), "padded vocabulary 96 is smaller than the real one 100"),
        ((100, 102, 0, 4), "102 is not a multiple of the 4 ranks"),
        ((100, 104, 4, 4), "rank 4 is not one of 4"),
    ],
)
def test_impossible_splits_are_refused(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VocabShard.for_rank(*arguments)


CPU = torch.device("cpu")


def test_blocks_cover_every_row_once() -> None:
    for rows, columns in product((0, 1, 7, 1000), (1, 500, 151_936, 5_000_000)):
        blocks = list(row_blocks(rows, columns, CPU))
        covered = [row for block in blocks for row in range(block.start, block.stop)]
        assert covered == list(range(rows))
        largest = max((block.stop - block.start for block in blocks), default=1)
        cores = torch.get_num_threads()
        assert largest <= cores or largest * columns * 4 <= 2**20 * cores * 4 / 3


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
def test_cores_have_as_many_rows_of_a_block(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (1, 500, 32_768, 100_352, 128_256, 151_936, 262_144, 5_000_000):
        monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
        first = next(iter(row_blocks(2**20 * cores, columns, CPU)))
        assert first.stop % cores == 0
        # To the nearest row of each core, at least one.
        assert abs(first.stop // cores - 2**18 / columns) <= 0.5 or first.stop == cores


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 5), torch.bfloat16),
        ((0, 5), torch.float32),
        ((4, 0), torch.float64),
        ((300, 9001), torch.float32),
        ((300, 9001), torch.bfloat16),
    ],
)
def test_buffers_have_the_shape_and_the_alignment_of_torch(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    matrix = allocate(*shape, dtype, CPU).zero_()
    assert (matrix.shape, matrix.dtype) == (shape, dtype)
    assert matrix.is_contiguous()
    assert not matrix.any()
    assert matrix.numel() == 0 or matrix.data_ptr() % 64 == 0


def test_scratch_is_allocated_once_per_name() -> None:
    scratch = Scratch(10, 4, torch.float32, CPU)
    first = scratch.take("a", 10)
    assert scratch.take("a", 3).data_ptr() == first.data_ptr()
    assert scratch.take("a", 3).shape == (3, 4)
    assert scratch.take("b", 10).data_ptr() != first.data_ptr()


def test_statistics_are_never_coarser_than_fp32() -> None:
    assert accumulation_dtype(torch.bfloat16) is torch.float32
    assert accumulation_dtype(torch.float32) is torch.float32
    assert accumulation_dtype(torch.float64) is torch.float64


def test_defect_11_blocks_hold_a_bounded_number_of_logits(one_thread: None) -> None:
    for vocab in (32_000, 128_256, 151_936, 262_144):
        for device, elements in (("cpu", 2**18), ("cuda", 2**25)):
            blocks = list(row_blocks(8192, vocab, torch.device(device)))
            (rows,) = {block.stop - block.start for block in blocks[:-1]}
            assert elements / 2 < rows * vocab <= elements * 4 / 3
