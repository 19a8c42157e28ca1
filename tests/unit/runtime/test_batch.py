"""Batch: the zigzag shards cover the sequence exactly once and carry every field along."""

import pytest
import torch

from megatron_distill.runtime.batch import Batch, zigzag_index


def batch_of(rows: int, length: int) -> Batch:
    cells = torch.arange(rows * length).view(rows, length)
    return Batch(
        tokens_bs=cells,
        labels_bs=cells + 1,
        ce_mask_bs=cells % 3 == 0,
        kd_mask_bs=cells % 5 == 0,
        position_ids_bs=cells % length,
        document_ids_bS=cells // 4,
        sequence_index_s=torch.arange(length),
        sample_ids_b=torch.arange(rows),
        isolate_documents=True,
    )


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
        assert batch.trained_rows_n is not None
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
