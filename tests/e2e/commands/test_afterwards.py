"""A run that has ended holds no model and no process group."""

from __future__ import annotations

import gc
import importlib
from pathlib import Path

import pytest
from torch import nn

from tests.distributed.pool import Pool
from tests.e2e.runs import Inputs, train_here


def modules() -> set[int]:
    """Addresses of those that are alive, of objects kept from the collector too."""
    gc.unfreeze()
    gc.collect()
    return {id(one) for one in gc.get_objects() if isinstance(one, nn.Module)}


def modules_left(rank: int, world: int, config: Path, overrides: list[str]) -> int:
    """Train, and count the modules that were not there before: none may outlive the run."""
    # Imported by a run: its activations are modules at once.
    importlib.import_module("transformers.activations")
    before = modules()
    train_here(rank, world, config, overrides)
    return len(modules() - before)


@pytest.mark.slow
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
