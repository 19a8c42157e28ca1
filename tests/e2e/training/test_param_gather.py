"""Parameters that are gathered late arrive before the head, a validation or a save reads them.

A gather here arrives when it is waited for, and the other ranks' parameters are NaN until then: a
read that does not wait is no race but an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.distributed.megatron_world import build, megatron_groups, small_architecture
from tests.distributed.pool import Pool
from tests.e2e.runs import (
    PIPELINE,
    SECONDS,
    course,
    quick_and_slow,
    run,
    step_records,
    train_here,
    validations,
)

SMALL_BUCKETS = "optimizer.bucket_size=2000"  # the head closes one of its own
TIED = "student.architecture.tied_embeddings=true"
# After step 3 nothing but the save gathers the parameters, and after step 4 the validation.
BETWEEN = (
    "train.steps=6", "validation.samples=8", "validation.interval=4", "checkpoint.save=true",
    "checkpoint.interval=3", "checkpoint.keep=3",
)  # fmt: skip
# configs/llama31_8b_to_1b.yaml with `student.num_layers`: an untied student in bf16.
LLAMA = (
    "parallel.tensor=2", "parallel.sequence=true", "train.precision=bf16",
    "train.recompute=selective", "schedule.decay=wsd", "schedule.wsd_decay_steps=2",
    "schedule.warmup_steps=1", "checkpoint.asynchronous=true",
)  # fmt: skip
CASES: dict[str, tuple[int, Sequence[str]]] = {
    "tied": (2, (TIED,)),
    "tied PP2": (4, (TIED, PIPELINE)),
    "PP2+virtual": (4, (PIPELINE, "parallel.virtual_pipeline=2")),
    "the flagship's shape": (4, LLAMA),
}


class Deferred:
    """A gather that is done when it is waited for, and not before."""

    def __init__(
        self, gathered: torch.Tensor, own: torch.Tensor, *, group: Any, async_op: bool
    ) -> None:
        self._arguments = gathered, own, group
        if async_op:
            mine = own.clone()  # a part of `gathered`
            gathered.fill_(torch.nan)
            own.copy_(mine)
        else:
            self.wait()

    def wait(self) -> None:
        """Gather now."""
        gathered, own, group = self._arguments
        torch.distributed.all_gather_into_tensor(gathered, own, group=group)


def train_deferred(rank: int, world: int, config: Path, overrides: Sequence[str]) -> bool:
    """Train with gathers that arrive as late as they may."""
    from megatron_distill.runtime.mcore_patches import prepare_megatron_core

    prepare_megatron_core(on_cuda=False)
    from megatron.core.distributed import param_and_grad_buffer

    with patch.object(param_and_grad_buffer, "dist_all_gather_func", Deferred):
        return train_here(rank, world, config, overrides)


def connected(rank: int, world: int, pipeline: dict[str, int], is_late: bool) -> tuple[bool, bool]:
    """Whether stages gather in step with each other, and whether the schedule starts gathers."""
    with megatron_groups(**pipeline) as groups:
        from megatron_distill.config import OptimizerConfig
        from megatron_distill.train.optimizer import connect_schedule, wrap_data_parallel

        settings = OptimizerConfig(overlap_param_gather=is_late)
        chunks = build(small_architecture(), groups, seed=1)
        wrapped = wrap_data_parallel(chunks, settings, groups=groups)
        connect_schedule(wrapped, settings, positions=1)
        starts = wrapped[0].config.param_sync_func
        assert starts in (None, [chunk.start_param_sync for chunk in wrapped])
        aligned = {chunk.ddp_config.align_param_gather for chunk in wrapped}
        assert len(aligned) == 1
        return aligned.pop(), starts is not None


@pytest.mark.parametrize(
    ("pipeline", "is_late", "expected"),
    [
        ({"pipeline": 2, "virtual_pipeline": 2}, True, True),
        ({"pipeline": 2, "virtual_pipeline": 2}, False, False),
        ({"pipeline": 2}, True, False),
    ],
    ids=["virtual stages", "virtual stages, not late", "stages"],
)
def test_the_schedule_starts_the_gathers_that_stages_align(
    pool: Pool, pipeline: dict[str, int], is_late: bool, expected: bool
) -> None:
    # Aligned without a schedule that starts them, no gather of a next chunk would ever start.
    assert pool.run(2, connected, pipeline, is_late) == [(expected, expected)] * 2


def saved(output: Path) -> dict[str, torch.Tensor]:
    """The tensors of every checkpoint of a run."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    found = {}
    for folder in sorted((output / "checkpoints").iterdir()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this process has no process group
            state = _load_state_dict_from_keys(checkpoint_id=folder)
        tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
        found |= {f"{folder.name}/{name}": value for name, value in tensors.items()}
    return found


@pytest.mark.parametrize("case", quick_and_slow(CASES, []))
def test_a_late_gather_changes_no_loss_no_validation_and_no_checkpoint(
    pool: Pool, dense: Path, tmp_path: Path, case: str
) -> None:
    world, overrides = CASES[case]
    for output, function, is_late in (
        ("plain", train_here, False),
        ("late", train_deferred, True),
    ):
        changes = (*overrides, SMALL_BUCKETS, f"optimizer.overlap_param_gather={is_late}")
        arguments = [f"output={tmp_path / output}", *BETWEEN, *changes]
        config = dense
        assert pool.run(world, function, config, arguments, timeout=SECONDS) == [True] * world
    assert course(step_records(tmp_path / "late")) == course(step_records(tmp_path / "plain"))
    assert validations(tmp_path / "late") == validations(tmp_path / "plain")
    assert len(validations(tmp_path / "late")) == 2
    late, plain = saved(tmp_path / "late"), saved(tmp_path / "plain")
    assert late.keys() == plain.keys()
    assert any("output_layer" in name or "word_embeddings" in name for name in late)
    assert [name for name in late if not torch.equal(late[name], plain[name])] == []


@pytest.mark.slow
def test_padding_between_buckets_moves_no_saved_state(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    # Megatron-Core's own format shifts the states of a bucket by the padding of those before it.
    changes = ("train.steps=4", "checkpoint.save=true")
    run(pool, 2, dense, tmp_path / "one", *changes)
    run(pool, 2, dense, tmp_path / "many", *changes, SMALL_BUCKETS)
    one, many = saved(tmp_path / "one"), saved(tmp_path / "many")
    moments = [name for name in one if ".exp_avg" in name]
    assert len(moments) > 10
    for name in moments:
        torch.testing.assert_close(many[name], one[name], rtol=1e-3, atol=1e-7, msg=name)
