"""A run that has ended holds no model and no process group."""

import gc
from pathlib import Path

import pytest
from torch import nn

from tests.e2e.runs import train_here


def modules_left(rank: int, world: int, config: Path, overrides: list[str]) -> int:
    """Train, and count what is left of the models once garbage is collected."""
    train_here(rank, world, config, overrides)
    gc.collect()
    return sum(isinstance(found, nn.Module) for found in gc.get_objects())


@pytest.mark.parametrize(
    ("name", "options"),
    [("dense", ["train.recompute=full"]), ("moe", ["parallel.expert=2", "train.recompute=full"])],
)
def test_no_part_of_a_model_outlives_its_run(pool, inputs, tmp_path, name, options):
    short = [f"output={tmp_path}", "train.steps=2", "schedule.warmup_steps=0", *options]
    assert pool.run(2, modules_left, inputs.folder / f"{name}.yaml", short) == [0, 0]
