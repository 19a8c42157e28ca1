"""A run whose folder is removed ends at its next save, and makes no folder again."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.distributed.pool import Pool
from tests.e2e.runs import SAVE, SECONDS, Inputs, failure_here

COMMON = (SAVE, "checkpoint.interval=2", "train.steps=4", "schedule.warmup_steps=1")
REMOVED = {"all": ".", "the checkpoints": "checkpoints", "the settings": "config.yaml"}


def failure_after_removal(
    rank: int, world: int, config: Path, overrides: Sequence[str], removed: Path
) -> str:
    """The error of a run that loses a path in its third step, after the first save."""
    from megatron_distill.train import loop

    vote = loop._vote

    def remove_then_vote(termination: Any, log: Any, parts: Any) -> Any:
        if parts.state.step == 3 and rank == 0:
            if removed.is_dir():
                shutil.rmtree(removed)
            else:
                removed.unlink()
        return vote(termination, log, parts)

    with patch.object(loop, "_vote", remove_then_vote):
        return failure_here(rank, world, config, overrides)


@pytest.mark.parametrize("case", ["all", "the settings", "the checkpoints"])
def test_a_removed_folder_ends_all_ranks_at_the_next_save(
    pool: Pool, inputs: Inputs, tmp_path: Path, case: str
) -> None:
    output = tmp_path / "run"
    removed = output / REMOVED[case]
    given = (inputs.folder / "dense.yaml", [f"output={output}", *COMMON], removed)
    text = pool.run(2, failure_after_removal, *given, timeout=SECONDS)
    assert text[0] == text[1]
    assert text[0].startswith(f"CheckpointError: output={output}: {removed} is gone, ")
    assert not removed.exists()
    assert not (output / "checkpoints" / "step_0000004").exists()
