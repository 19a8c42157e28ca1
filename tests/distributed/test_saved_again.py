"""A step that is saved again: its checkpoint of before stays until the new one is complete."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.distributed.megatron_world import (
    build,
    megatron_groups,
    saved_description,
    small_architecture,
)
from tests.distributed.pool import Pool


def checkpoints_at_each_removal(rank: int, world: int, root: Path) -> list[list[str]]:
    """The complete checkpoints each time that something is removed while step 1 is saved twice."""
    with megatron_groups() as groups:
        from megatron_distill.train.checkpoint.folder import CheckpointFolder
        from megatron_distill.train.checkpoint.state import model_shards

        architecture = small_architecture()
        shards = model_shards(build(architecture, groups, seed=3), groups)
        description = saved_description(architecture.as_dict())
        folder = CheckpointFolder(root, keep=1, asynchronous=False)
        folder.prepare()
        found: list[list[str]] = []
        remove = shutil.rmtree

        def noted(path: Path, **named: Any) -> None:
            if path.exists():
                found.append(sorted(one.name for one in root.glob("step_*[0-9]")))
            remove(path, **named)

        with patch.object(shutil, "rmtree", noted):
            for _ in range(2):
                folder.save(shards, description)
        return found


def test_no_removal_leaves_a_run_without_its_checkpoint(pool: Pool, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    (found,) = pool.run(1, checkpoints_at_each_removal, root)
    assert found == [["step_0000001"]]
    assert sorted(path.name for path in root.iterdir()) == ["step_0000001"]
