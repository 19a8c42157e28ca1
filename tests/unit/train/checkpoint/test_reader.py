"""Reading parts of stored tensors with their checksums, without processes."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron_distill.errors import CheckpointError
from megatron_distill.runtime.mcore_patches import prepare_megatron_core

prepare_megatron_core(on_cuda=False)

from megatron_distill.train.checkpoint import archive as module  # noqa: E402
from megatron_distill.train.checkpoint import reader, shards  # noqa: E402
from megatron_distill.train.checkpoint.archive import BlockReader, locate  # noqa: E402
from megatron_distill.train.checkpoint.reader import MappedChunks  # noqa: E402
from megatron_distill.train.checkpoint.shards import Shard, ShardPart  # noqa: E402
from megatron_distill.train.checkpoint.writer import (  # noqa: E402
    Snapshot,
    write_index,
    write_rank_file,
)

MATRIX, EXPERTS, PADDED = (12, 10), (3, 4, 6), (9, 5)


def held(key: str, shape: tuple[int, ...], rank: int, ranks: int, *, axis: int) -> Shard:
    """One rank's part of a tensor that is divided along an axis; its values are zero."""
    size = list(shape)
    size[axis] //= ranks
    offset = [0] * len(shape)
    offset[axis] = rank * size[axis]
    return Shard(
        key=key,
        data=torch.zeros(torch.Size(size).numel()),
        global_shape=shape,
        offset=tuple(offset),
        shape=tuple(size),
        is_padded=key == "padded",
    )


def expected(shard: Shard) -> torch.Tensor:
    """The values of a shard: their flat index in the whole tensor, and zero in padded rows."""
    count = torch.Size(shard.global_shape).numel()
    whole = torch.arange(1.0, count + 1).view(shard.global_shape)
    if shard.key == "padded":
        whole[PADDED[0] :] = 0.0
    for axis, (first, length) in enumerate(zip(shard.offset, shard.shape, strict=True)):
        whole = whole.narrow(axis, first, length)
    return whole.flatten()


def layout(ranks: int, *, axis: int, rows: int) -> list[list[Shard]]:
    """Each rank's shards; `rows` of the padded tensor."""
    return [
        [
            held("matrix", MATRIX, rank, ranks, axis=axis),
            held("experts", EXPERTS, rank, ranks, axis=2 - axis),
            held("padded", (rows, PADDED[1]), rank, ranks, axis=0),
        ]
        for rank in range(ranks)
    ]


def write(folder: Path, written: Sequence[Sequence[Shard]]) -> Path:
    stored = []
    for rank, own in enumerate(written):
        for shard in own:
            shard.data.copy_(expected(shard))
        windows = [w for shard in own for w in ShardPart(shard, 0, shard.data.numel()).windows()]
        found = write_rank_file(Snapshot(windows, {}), folder, rank)
        stored += found
    write_index(stored, folder)
    return folder


def read(folder: Path, wanted: Sequence[Sequence[Shard]]) -> int:
    """Read each rank's shards and compare checksums as `load_shards` does; return the bytes."""
    chunks = MappedChunks(folder)
    found = []
    for own in wanted:
        parts = [ShardPart(shard, 0, shard.data.numel()) for shard in own]
        found.append(reader._read(parts, chunks))
    every = np.concatenate([one.partial_registers() for one in found])
    for one in found:
        one.check(every)
    return sum(one.nbytes for one in found)


def total(folder: Path) -> int:
    """The bytes of all values in a checkpoint."""
    described = MappedChunks(folder).metadata.state_dict_metadata.values()
    return sum(one.size.numel() * 4 for one in described)


CHANGES = {
    "columns to rows": ((2, 1, 12), (3, 0, 12)),
    "rows to columns": ((3, 0, 12), (2, 1, 12)),
    "one to columns": ((1, 0, 9), (2, 1, 10)),
    "fewer padded rows": ((2, 1, 18), (3, 0, 9)),
    "the same": ((2, 1, 12), (2, 1, 12)),
}


@pytest.mark.parametrize("block_bytes", [8, 40, 1 << 22])
@pytest.mark.parametrize("case", CHANGES)
def test_each_byte_is_read_once_and_has_its_checksum(
    tmp_path: Path, case: str, block_bytes: int
) -> None:
    (ranks, axis, rows), (others, other_axis, other_rows) = CHANGES[case]
    write(tmp_path, layout(ranks, axis=axis, rows=rows))
    wanted = layout(others, axis=other_axis, rows=other_rows)
    with (
        patch.object(module, "_BLOCK_BYTES", block_bytes),
        patch.object(shards, "_BLOCK_BYTES", 100),
    ):
        assert read(tmp_path, wanted) == total(tmp_path)
    for own in wanted:
        for shard in own:
            assert shard.data.equal(expected(shard)), shard.key


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, bytes]:
    write(tmp_path, layout(2, axis=1, rows=12))
    return tmp_path / "__1_0.distcp", (tmp_path / "__1_0.distcp").read_bytes()


def failure(folder: Path, wanted: Sequence[Sequence[Shard]]) -> str:
    """Read each rank's shards; return the error, or nothing."""
    try:
        read(folder, wanted)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_flipped_bit_anywhere_is_named_or_changes_nothing(damaged: tuple[Path, bytes]) -> None:
    path, content = damaged
    values = {
        place
        for index, stored in MappedChunks(path.parent).metadata.storage_data.items()
        if stored.relative_path == path.name
        for chunk in MappedChunks(path.parent).metadata.state_dict_metadata[index.fqn].chunks
        if chunk.offsets == index.offset
        for found in (
            locate(
                path, "", stored.offset, stored.length, chunk.sizes, torch.float32, checked=True
            ),
        )
        for place in range(found.start, found.start + found.nbytes)
    }
    assert len(values) == total(path.parent) // 2
    silent = []
    for place in range(0, len(content), 97):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        wanted = layout(3, axis=0, rows=12)
        text = failure(path.parent, wanted)
        if text:
            assert str(path) in text
            assert "use another" in text
            continue
        silent.append(place)
        assert all(shard.data.equal(expected(shard)) for own in wanted for shard in own)
    assert not values.intersection(silent)
    assert len(silent) < len(content) / 97 / 2  # padding between records, and unused fields


@pytest.mark.parametrize("size", [0, 700, -100])
def test_a_file_that_ends_early_is_named(damaged: tuple[Path, bytes], size: int) -> None:
    path, content = damaged
    path.write_bytes(content[:size])
    with pytest.raises(CheckpointError, match=f"{path} is damaged at .*use another"):
        read(path.parent, layout(3, axis=0, rows=12))
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path} is missing"):
        read(path.parent, layout(3, axis=0, rows=12))


def test_a_rectangle_reads_its_own_bytes_alone(tmp_path: Path) -> None:
    values = torch.arange(6 * 4 * 5 * 3, dtype=torch.int16).view(6, 4, 5, 3)
    path = tmp_path / "tensor"
    torch.save(values, path)
    stored = locate(
        path, "tensor", 0, path.stat().st_size, values.shape, values.dtype, checked=True
    )
    plain = os.preadv
    counted: list[int] = []

    def counting(file: int, rooms: list[memoryview], offset: int) -> int:
        counted.append(plain(file, rooms, offset))
        return counted[-1]

    first, sizes = (1, 0, 2, 0), (4, 3, 2, 3)
    window = values[1:5, 0:3, 2:4]
    into = torch.empty(sizes, dtype=torch.float32)
    with patch.object(module.os, "preadv", counting):
        register = BlockReader().read(stored, first, sizes, into)
    assert into.equal(window.float())
    assert sum(counted) == window.numel() * 2
    apart = torch.zeros_like(values)
    apart[1:5, 0:3, 2:4] = window
    checksum = zlib.crc32(apart.numpy().tobytes())
    assert register == module.register_of_whole(checksum, stored.nbytes)
