"""Vocabulary shards: every id on exactly one, padding on none, impossible ranges refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distill.ops import VocabShard


@settings(max_examples=60, deadline=None)
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
