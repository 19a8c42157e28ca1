"""Every weight and moment that a layout saves is read by any other, bit by bit."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.distributed.pool import Pool
from tests.e2e.runs import (
    CONTEXT,
    EXPERT,
    FOUR,
    PIPELINE,
    SEQUENCE,
    TENSOR,
    VIRTUAL,
    Inputs,
    assembled,
    quick_and_slow,
)

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
    "TP2xDP2 to PP2+virtual, tied": ("gpt", (4, (TENSOR, TIED)), (2, (PIPELINE, VIRTUAL, TIED))),
    "PP2xDP2 to CP2, tied": ("gpt", (4, (PIPELINE, TIED)), (2, (CONTEXT, TIED))),
    "TP2xDP2 whole to PP2xDP2": ("dense", (4, (WHOLE, TENSOR)), (4, (PIPELINE,))),
    "DP4 to TP2 whole, bf16": ("dense", (4, (BF16,)), (2, (WHOLE, TENSOR, BF16))),
    "EP2xDP2 to TP2xEP2": ("moe", (4, (EXPERT,)), (4, (TENSOR, SEQUENCE, EXPERT))),
    "TP2xEP2 to DP2, whole": ("moe", (4, (TENSOR, SEQUENCE, EXPERT, WHOLE)), (2, (WHOLE,))),
}  # fmt: skip
QUICK = ("DP4 to TP2xPP2, bf16", "TP2xDP2 whole to PP2xDP2")


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
            from tests.support.old_checkpoint import write_old

            write_old(state, Path(run.output) / "checkpoints" / "step_0000003")
        return take_snapshot(shards, {}, None).nbytes, sorted({shard.key for shard in shards})


def differences(
    rank: int, world: int, config: Path, overrides: list[str]
) -> tuple[list[str], list[str]]:
    """Resume; return the tensors that differ from the known values, and those that this rank has.

    The weights of a bf16 model differ where its fp32 weights were not read.
    """
    with assembled(rank, world, config, overrides) as (_, parts):
        state = parts.state
        assert state.step == 3
        for part in state.optimizer.chained_optimizers:
            for moments in part.optimizer.state.values():
                assert float(moments["step"]) == 2.0
        shards = state._shards()
        wrong = [shard.key for shard in shards if not shard.data.equal(expected(shard))]
        return sorted(set(wrong)), sorted({shard.key for shard in shards})


def resume_elsewhere(
    pool: Pool, inputs: Inputs, output: Path, case: str, *, is_old: bool = False
) -> list[int]:
    """Save in one layout, resume in another; return the bytes that each rank wrote."""
    name, (world, layout), (other_world, other) = LAYOUTS[case]
    config = inputs.folder / f"{name}.yaml"
    common = [f"output={output}", *COMMON, "train.global_batch_size=24"]
    saved = pool.run(world, save, config, [*common, *layout], is_old, timeout=120.0)
    found = pool.run(other_world, differences, config, [*common, *other], timeout=120.0)
    assert [wrong for wrong, _ in found] == [[]] * other_world
    written = {key for _, keys in saved for key in keys}
    assert {key for _, keys in found for key in keys} == written
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in written)
    assert any(".fp32_param." in key for key in written) == (BF16 in layout)
    return [nbytes for nbytes, _ in saved]


@pytest.mark.parametrize("case", quick_and_slow(LAYOUTS, QUICK))
def test_any_layout_reads_every_bit(pool: Pool, inputs: Inputs, tmp_path: Path, case: str) -> None:
    nbytes = resume_elsewhere(pool, inputs, tmp_path, case)
    assert len(list((tmp_path / "checkpoints" / "step_0000003").glob("*.distcp"))) == len(nbytes)


@pytest.mark.parametrize("whole", [pytest.param((WHOLE,), marks=pytest.mark.slow), ()])
def test_replicas_write_as_much_as_each_other(
    pool: Pool, inputs: Inputs, tmp_path: Path, whole: Sequence[str]
) -> None:
    overrides = [f"output={tmp_path}", *COMMON, BF16, *whole]
    saved = pool.run(4, save, inputs.folder / "dense.yaml", overrides, False, timeout=120.0)
    nbytes = [count for count, _ in saved]
    assert max(nbytes) < 1.2 * sum(nbytes) / 4


OLD = ("DP4 to TP2xPP2, bf16", "TP2xDP2 whole to PP2xDP2", "EP2xDP2 to TP2xEP2")


@pytest.mark.parametrize("case", quick_and_slow(OLD, OLD[:1]))
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

        from tests.support.old_checkpoint import old_state

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
def test_megatron_core_reads_the_files(pool: Pool, inputs: Inputs, tmp_path: Path) -> None:
    config = inputs.folder / "dense.yaml"
    common = [f"output={tmp_path}", *COMMON]
    pool.run(4, save, config, [*common, BF16], False, timeout=120.0)
    assert pool.run(2, read_by_megatron, config, [*common, TENSOR, BF16]) == [[], []]
