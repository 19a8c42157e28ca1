"""A run that has ended holds no model and no process group."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from torch import nn

from tests.distributed.pool import Pool
from tests.e2e.runs import Inputs, train_here


def modules_with_weights() -> list[nn.Module]:
    """Those that are alive; the activations of `transformers` are modules without weights."""
    gc.collect()
    found = [one for one in gc.get_objects() if isinstance(one, nn.Module)]
    return [one for one in found if next(one.parameters(), None) is not None]


def modules_left(rank: int, world: int, config: Path, overrides: list[str]) -> int:
    """Train, and count what is left of the models once garbage is collected."""
    train_here(rank, world, config, overrides)
    return len(modules_with_weights())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dense", ["train.recompute=full"]),
        ("moe", ["parallel.expert=2", "train.recompute=full"]),
    ],
)
def test_no_part_of_a_model_outlives_its_run(
    pool: Pool, inputs: Inputs, tmp_path: Path, name: str, options: list[str]
) -> None:
    short = [f"output={tmp_path}", "train.steps=2", "schedule.warmup_steps=0", *options]
    assert pool.run(2, modules_left, inputs.folder / f"{name}.yaml", short) == [0, 0]
