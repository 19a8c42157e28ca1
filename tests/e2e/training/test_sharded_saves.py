"""Every weight and moment that a layout saves is read by any other, bit by bit."""

from __future__ import annotations

import gc
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.distributed.pool import Pool
from tests.e2e.runs import (
    CONTEXT,
    EXPERT,
    FOUR,
    PIPELINE,
    SECONDS,
    SEQUENCE,
    TENSOR,
    VIRTUAL,
    Inputs,
    assembled,
    quick_and_slow,
)
from tests.support.old_checkpoint import old_state, write_old

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_distill.train.checkpoint.shards import Shard

COMMON = ("train.steps=9", "checkpoint.save=true")
WHOLE = "optimizer.distributed=false"
BF16 = "train.precision=bf16"
TIED = "student.architecture.tied_embeddings=true"
UNEVEN = ("student.architecture.num_layers=5", "teacher.architecture.num_layers=3")
VOCABULARY = 301

Run = tuple[int, Sequence[str]]
LAYOUTS: dict[str, tuple[str, Run, Run]] = {
    "TP4 on 2 KV heads to one rank": ("dense", (4, (FOUR,)), (1, ())),
    "DP4 to TP2xPP2, bf16": ("dense", (4, (BF16,)), (4, (TENSOR, PIPELINE, BF16))),
    "TP2xPP2 to DP3, bf16": ("dense", (4, (TENSOR, PIPELINE, BF16)), (3, (BF16,))),
    "uneven PP2+virtual to DP2": ("dense", (2, (PIPELINE, VIRTUAL, *UNEVEN)), (2, UNEVEN)),
    "TP2xDP2 to PP2xDP2+virtual, tied": (
        "gpt", (4, (TENSOR, TIED)), (4, (PIPELINE, VIRTUAL, TIED))
    ),
    "PP2xDP2 to CP2, tied": ("gpt", (4, (PIPELINE, TIED)), (2, (CONTEXT, TIED))),
    "TP2xDP2 whole to PP2xDP2": ("dense", (4, (WHOLE, TENSOR)), (4, (PIPELINE,))),
    "DP4 to TP2 whole, bf16": ("dense", (4, (BF16,)), (2, (WHOLE, TENSOR, BF16))),
    "EP2xDP2 to TP2xEP2": ("moe", (4, (EXPERT,)), (4, (TENSOR, SEQUENCE, EXPERT))),
    "TP2xEP2 to DP2, whole": ("moe", (4, (TENSOR, SEQUENCE, EXPERT, WHOLE)), (2, (WHOLE,))),
}  # fmt: skip
QUICK = ("DP4 to TP2xPP2, bf16",)


def expected(shard: Shard) -> Tensor:
    """Values that depend on the tensor and the place in it alone, but zero in padded rows."""
    index = torch.arange(shard.first, shard.first + shard.data.numel())
    place = torch.zeros_like(index)
    row = torch.zeros_like(index)
    stride = 1
    for axis in reversed(range(len(shard.shape))):
        at = index % shard.shape[axis] + shard.offset[axis]
        index //= shard.shape[axis]
        place += at * stride
        stride *= shard.global_shape[axis]
        row = at
    values = (place * 7919 + zlib.crc32(shard.key.encode())) % 65521 / 65521.0 - 0.5
    if shard.is_padded:
        values[row >= VOCABULARY] = 0.0
    return values.to(shard.data.dtype)


def save(
    rank: int, world: int, config: Path, overrides: list[str], is_old: bool
) -> tuple[int, list[str]]:
    """Save known values; return the bytes that this rank writes, and the tensors that it holds."""
    with assembled(rank, world, config, overrides) as (run, parts):
        from megatron_distill.train.checkpoint.writer import take_snapshot

        state = parts.state
        state.step, state.bad_steps = 3, 1
        shards = state._shards()
        for shard in shards:
            shard.data.copy_(expected(shard))
        state.save(parts.loader)
        state.checkpoints.finish()
        if is_old:
            write_old(state, Path(run.output) / "checkpoints" / "step_0000003")
        return take_snapshot(shards, {}, None).nbytes, sorted({shard.key for shard in shards})


@dataclass(frozen=True)
class Resumed:
    """State of a rank after a resume: its tensors, those that differ from the known values, and
    the bytes of values that it read by its own account and by the system's."""

    keys: list[str]
    wrong: list[str]
    nbytes: int
    read: int


def resume(rank: int, world: int, config: Path, overrides: list[str]) -> Resumed:
    """Resume, and compare with the known values.

    The weights of a bf16 model differ where its fp32 weights were not read.
    """
    from megatron_distill.train.checkpoint import reader

    plain, found = reader._read, []

    def counted(*given: Any) -> Any:
        before = read_bytes()
        checked = plain(*given)
        found.append((checked.nbytes, read_bytes() - before))
        return checked

    with (
        patch.object(reader, "_read", counted),
        assembled(rank, world, config, overrides) as (_, parts),
    ):
        state = parts.state
        assert state.step == 3
        for part in state.optimizer.chained_optimizers:
            for moments in part.optimizer.state.values():
                assert float(moments["step"]) == 2.0
        shards = state._shards()
        wrong = {shard.key for shard in shards if not shard.data.equal(expected(shard))}
        ((nbytes, read),) = found
        return Resumed(sorted({shard.key for shard in shards}), sorted(wrong), nbytes, read)


def read_bytes() -> int:
    """The bytes that this process has read, of files in the system's cache too."""
    name, count = Path("/proc/self/io").read_text().splitlines()[0].split()
    assert name == "rchar:"
    return int(count)


def resume_elsewhere(
    pool: Pool, inputs: Inputs, output: Path, case: str, *, is_old: bool = False
) -> list[int]:
    """Save in one layout, resume in another; return the bytes that each rank wrote."""
    name, (world, layout), (other_world, other) = LAYOUTS[case]
    config = inputs.folder / f"{name}.yaml"
    common = [f"output={output}", *COMMON, "train.global_batch_size=24"]
    saved = pool.run(world, save, config, [*common, *layout], is_old, timeout=SECONDS)
    found = pool.run(other_world, resume, config, [*common, *other], timeout=SECONDS)
    assert [rank.wrong for rank in found] == [[]] * other_world
    written = {key for _, keys in saved for key in keys}
    assert {key for rank in found for key in rank.keys} == written
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in written)
    assert any(".fp32_param." in key for key in written) == (BF16 in layout)
    assert sum(rank.nbytes for rank in found) == values_in(output / "checkpoints" / "step_0000003")
    return [nbytes for nbytes, _ in saved]


def values_in(checkpoint: Path) -> int:
    """The bytes of a checkpoint's tensors."""
    from megatron_distill.train.checkpoint.reader import MappedChunks

    tensors = MappedChunks(checkpoint).metadata.state_dict_metadata.values()
    return sum(
        one.size.numel() * one.properties.dtype.itemsize
        for one in tensors
        if isinstance(one, TensorStorageMetadata)
    )


@pytest.mark.parametrize("case", quick_and_slow(LAYOUTS, QUICK))
def test_any_layout_reads_every_bit(pool: Pool, inputs: Inputs, tmp_path: Path, case: str) -> None:
    nbytes = resume_elsewhere(pool, inputs, tmp_path, case)
    assert len(list((tmp_path / "checkpoints" / "step_0000003").glob("*.distcp"))) == len(nbytes)


# Large enough that the descriptions of the chunks are little beside their values.
LARGE = (
    "student.architecture.hidden_size=512", "student.architecture.ffn_hidden_size=1024",
    "student.architecture.num_layers=2", BF16,
)  # fmt: skip
READ: dict[str, tuple[Run, Run]] = {
    "DP2 to TP2xPP2": ((2, ()), (4, (TENSOR, PIPELINE))),
    "DP2 to DP2": ((2, ()), (2, ())),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", READ)
def test_the_ranks_read_no_byte_twice(pool: Pool, dense: Path, tmp_path: Path, case: str) -> None:
    (world, layout), (other_world, other) = READ[case]
    common = [f"output={tmp_path}", *COMMON, *LARGE]
    pool.run(world, save, dense, [*common, *layout], False, timeout=SECONDS)
    found = pool.run(other_world, resume, dense, [*common, *other], timeout=SECONDS)
    assert [rank.wrong for rank in found] == [[]] * other_world
    checkpoint = tmp_path / "checkpoints" / "step_0000003"
    stored = sum(path.stat().st_size for path in checkpoint.glob("*.distcp"))
    assert stored > 4e7
    assert values_in(checkpoint) <= sum(rank.read for rank in found) < 1.05 * stored


@dataclass(frozen=True)
class Work:
    """Bytes of a rank's weights and states, of those in its file, and the peak beside them."""

    share: int
    stored: int
    peak: int


def measured(shards: Sequence[Shard], work: Callable[[], object]) -> Work:
    """Do some work; tensors count, and Python's objects with numpy's arrays of all threads."""
    from benchmarks.harness.peak import LiveStorages
    from megatron_distill.train.checkpoint.shards import own_parts

    gc.collect()
    tracemalloc.start()
    with LiveStorages() as live:
        work()
    _, objects = tracemalloc.get_traced_memory()  # traced until the pool's call ends
    own = own_parts([shard for shard in shards if shard.is_stored])
    share, stored = (sum(one.data.nbytes for one in some) for some in (shards, own))
    return Work(share, stored, live.peak + objects)


def memory_of_saves(rank: int, world: int, config: Path, overrides: list[str]) -> Work:
    """Save twice: the second save has the first one's host memory."""
    with assembled(rank, world, config, overrides) as (_, parts):
        state = parts.state

        def work() -> None:
            for state.step in (2, 3):
                state.save(parts.loader)
                state.checkpoints.finish()

        return measured(state._shards(), work)


def memory_of_a_resume(rank: int, world: int, config: Path, overrides: list[str]) -> Work:
    """Read the checkpoint of the last step in this layout."""
    from megatron_distill.train import run_state

    plain, found = run_state.load_shards, []

    def watched(*given: Any, **named: Any) -> None:
        found.append(measured(given[0], lambda: plain(*given, **named)))

    with (
        patch.object(run_state, "load_shards", watched),
        assembled(rank, world, config, overrides) as (_, parts),
    ):
        assert parts.state.step == 3
    return found[0]


TWO_BLOCKS = 2**23  # bytes; a file is read in blocks of half as many
# The layout that saves, and the one that resumes.
HELD: dict[str, tuple[Run, Run]] = {
    "DP4 to TP2xPP2": ((4, ()), (4, (TENSOR, PIPELINE))),
    "TP2xPP2 to DP2": ((4, (TENSOR, PIPELINE)), (2, ())),
    "DP2 whole to one rank": ((2, (WHOLE,)), (1, ())),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HELD)
def test_saves_and_resumes_hold_no_more_than_the_share_of_a_rank(
    pool: Pool, dense: Path, tmp_path: Path, case: str
) -> None:
    (world, layout), (other_world, other) = HELD[case]
    common, meanwhile = [f"output={tmp_path}", *COMMON, *LARGE], "checkpoint.asynchronous=true"
    copied = pool.run(world, memory_of_saves, dense, [*common, *layout, meanwhile], timeout=120.0)
    written = pool.run(world, memory_of_saves, dense, [*common, *layout], timeout=120.0)
    read = pool.run(other_world, memory_of_a_resume, dense, [*common, *other], timeout=120.0)
    for one in (*copied, *written, *read):
        assert one.peak < 1.2 * one.share, one
    for one in copied:
        assert one.stored < one.peak < one.stored + TWO_BLOCKS, one
    for one in (*written, *read):
        assert one.peak < TWO_BLOCKS, one


@pytest.mark.parametrize("whole", [pytest.param((WHOLE,), marks=pytest.mark.slow), ()])
def test_replicas_write_as_much_as_each_other(
    pool: Pool, dense: Path, tmp_path: Path, whole: Sequence[str]
) -> None:
    overrides = [f"output={tmp_path}", *COMMON, BF16, *whole]
    saved = pool.run(4, save, dense, overrides, False, timeout=SECONDS)
    nbytes = [count for count, _ in saved]
    assert max(nbytes) < 1.2 * sum(nbytes) / 4


OLD = ("DP4 to TP2xPP2, bf16", "TP2xDP2 whole to PP2xDP2", "EP2xDP2 to TP2xEP2")


@pytest.mark.slow
@pytest.mark.parametrize("case", OLD)
def test_checkpoints_of_earlier_releases_are_read(
    pool: Pool, inputs: Inputs, tmp_path: Path, case: str
) -> None:
    resume_elsewhere(pool, inputs, tmp_path, case, is_old=True)


def read_by_megatron(rank: int, world: int, config: Path, overrides: list[str]) -> list[str]:
    """Fill this rank's tensors as earlier releases did; return those that differ."""
    with assembled(rank, world, config, overrides) as (run, parts):
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.dict_utils import (
            extract_matching_values,
            nested_values,
        )
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        state = parts.state
        for shard in state._shards():
            shard.data.zero_()
        described = old_state(state, is_loading=True)
        wanted, _ = extract_matching_values(described, lambda v: not isinstance(v, ShardedObject))
        folder = Path(run.output) / "checkpoints" / "step_0000003"
        loaded = dist_checkpointing.load(wanted, str(folder))
        (chunk,) = state.student.chunks
        chunk.load_state_dict(loaded["model"], strict=False)  # without Transformer Engine's objects
        wrong = [
            shard.key
            for shard in state._shards()
            if not shard.key.startswith("optimizer.") and not shard.data.equal(expected(shard))
        ]
        moments = [v for v in nested_values(loaded["optimizer"]) if isinstance(v, torch.Tensor)]
        assert moments
        wrong += ["a moment" for moment in moments if not moment.any()]
        return wrong


@pytest.mark.slow
def test_megatron_core_reads_the_files(pool: Pool, dense: Path, tmp_path: Path) -> None:
    common = [f"output={tmp_path}", *COMMON]
    pool.run(4, save, dense, [*common, BF16], False, timeout=SECONDS)
    assert pool.run(2, read_by_megatron, dense, [*common, TENSOR, BF16]) == [[], []]
