"""The file that names the best checkpoint: it agrees with the descriptions, or a save fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.megatron_world import (
    build,
    megatron_groups,
    saved_description,
    small_architecture,
)
from tests.distributed.pool import Pool


def saved(rank: int, world: int, root: Path, steps: list[int], best_steps: list[int]) -> list[str]:
    """Save steps whose best steps are these; return the error of each save, or nothing.

    No steps: prepare the folder alone, as a start does.
    """
    with megatron_groups() as groups:
        from megatron_distill.errors import MegatronDistillError
        from megatron_distill.train.checkpoint.folder import CheckpointFolder
        from megatron_distill.train.checkpoint.state import model_shards

        architecture = small_architecture()
        shards = model_shards(build(architecture, groups, seed=3), groups)
        description = saved_description(architecture.as_dict())
        folder = CheckpointFolder(root, keep=1, asynchronous=False)
        folder.prepare()
        found = []
        for step, best_step in zip(steps, best_steps, strict=True):
            best = {"step": best_step, "metric": "validation.ce_loss", "value": 2.0}
            try:
                folder.save(shards, replace(description, step=step, best=best))
                found.append("")
            except MegatronDistillError as error:
                found.append(f"{type(error).__name__}: {error}")
        return found


def named_best(root: Path) -> int:
    """The step that best.json names."""
    return int(json.loads((root / "best.json").read_text())["step"])


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("left", [None, '{"step": 1}', "{"])
@pytest.mark.parametrize("steps", [[], [3]])
def test_a_kill_before_the_best_is_named_costs_no_name(
    pool: Pool, tmp_path: Path, left: str | None, steps: list[int]
) -> None:
    """The next start names it, and so does the next save of a start that was let go on."""
    root = tmp_path / "checkpoints"
    pool.run(1, saved, root, [2], [2])
    assert named_best(root) == 2
    (root / "best.json").unlink()
    if left is not None:
        (root / "best.json").write_text(left)
    pool.run(1, saved, root, steps, [2] * len(steps))
    assert named_best(root) == 2
    assert names(root) == ["best.json", "step_0000002", *(["step_0000003"] if steps else [])]


def test_a_best_checkpoint_that_is_gone_is_not_named(pool: Pool, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    pool.run(1, saved, root, [2], [1])
    assert names(root) == ["step_0000002"]


@pytest.mark.parametrize("blocked", ["best.json", "step_0000001.old.partial"])
def test_what_follows_a_whole_checkpoint_ends_all_ranks_too(
    pool: Pool, tmp_path: Path, blocked: str
) -> None:
    root = tmp_path / "checkpoints"
    pool.run(2, saved, root, [1], [1])
    found = pool.run(2, saved_beside, root, blocked)
    assert found[0] == found[1]
    text = found[0]
    assert text.startswith(f"CheckpointError: {root}/step_0000002 is saved, but ")
    assert str(root / blocked.replace(".old.partial", "")) in text
    assert "change `output`" in text
    assert "step_0000002" in names(root)


def saved_beside(rank: int, world: int, root: Path, blocked: str) -> str:
    """Save step 2 as the best where a folder takes a name that the save needs."""
    from unittest.mock import patch

    from megatron_distill.train.checkpoint import folder

    write = folder.write_index

    def write_then_block(*given: object) -> None:
        write(*given)  # type: ignore[arg-type]
        (root / "best.json").unlink()
        (root / blocked / "in the way").mkdir(parents=True)

    with patch.object(folder, "write_index", write_then_block):
        return saved(rank, world, root, [2], [2])[0]
