"""A disk that is full, or fills up while a run writes, ends all ranks and costs no checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from tests.distributed.pool import Pool
from tests.e2e.failing import call, message
from tests.e2e.runs import (
    SAVE,
    TENSOR,
    Inputs,
    assembled,
    checkpoints,
    configure,
    failure_here,
    run,
    step_records,
)

SHORT = ("train.steps=4", "schedule.warmup_steps=1")


def test_a_disk_too_small_for_a_checkpoint_is_found_before_the_first_step(
    pool: Pool, inputs: Inputs, small_disk: Callable[[str], Path]
) -> None:
    output = small_disk("512k") / "run"
    shown = "logging.progress=true"
    endings = call(pool, inputs.folder / "dense.yaml", output, *SHORT, SAVE, shown)
    text = message(endings)
    assert "no space left for a checkpoint" in text
    assert str(output / "checkpoints") in text
    assert "checkpoint.keep" in text
    assert checkpoints(output) == []
    assert step_records(output) == []
    assert "finished" not in endings[0].stderr


@pytest.mark.slow
def test_a_disk_that_has_become_too_small_is_found_before_writing(
    pool: Pool, inputs: Inputs, small_disk: Callable[[str], Path]
) -> None:
    output = small_disk("1400k") / "run"
    shown = ("logging.progress=true", "checkpoint.interval=2", "checkpoint.keep=9")
    endings = call(pool, inputs.folder / "dense.yaml", output, *SHORT, SAVE, *shown)
    assert "no space left for a checkpoint" in message(endings)
    assert checkpoints(output) == ["step_0000002"]
    assert len(step_records(output)) == 4
    assert "stopped at step 4 of 4" in endings[0].stderr
    assert "finished" not in endings[0].stderr


def room_and_snapshot(rank: int, world: int, config: Path, overrides: list[str]) -> tuple[int, int]:
    """Bytes of this rank that the start wants room for, and those of tensors that a save has."""
    with assembled(rank, world, config, overrides) as (_, parts):
        from megatron_distill.train.checkpoint import folder

        wanted: list[int] = []
        with patch.object(
            folder.CheckpointFolder, "_check_space", lambda _, own: wanted.append(own)
        ):
            parts.state.require_room()
        windows = folder.take_snapshot(parts.state._shards(), {}, None).windows
        return wanted[0], sum(window.data.nbytes for window in windows)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "layout", [(), pytest.param((TENSOR,), marks=pytest.mark.slow)], ids=["data", "tensor"]
)
def test_the_start_wants_room_for_what_a_save_writes(
    pool: Pool, inputs: Inputs, tmp_path: Path, precision: str, layout: tuple[str, ...]
) -> None:
    overrides = [f"output={tmp_path}", f"train.precision={precision}", *layout]
    found = pool.run(2, room_and_snapshot, inputs.folder / "dense.yaml", overrides)
    wanted, written = (sum(values) for values in zip(*found, strict=True))
    assert wanted == written > 0


FULL = "free disk space or change `output`"


@pytest.mark.parametrize(
    ("failing", "asynchronous"),
    [(1, "false"), (0, "true")],
)
@pytest.mark.slow
def test_a_disk_that_fills_up_on_one_rank_ends_all(
    pool: Pool, inputs: Inputs, tmp_path: Path, asynchronous: str, failing: int
) -> None:
    # The first file of a tensor-parallel rank that grows beyond this is its part of a checkpoint.
    config = inputs.folder / "dense.yaml"
    overrides = (TENSOR, SAVE, "checkpoint.interval=2", f"checkpoint.asynchronous={asynchronous}")
    overrides += ("train.steps=5",)
    run(pool, 2, config, tmp_path, *overrides, stop_after=2)
    assert checkpoints(tmp_path) == ["step_0000002"]
    endings = call(pool, config, tmp_path, *overrides, limits={failing: 60_000})
    text = message(endings)
    assert str(tmp_path / "checkpoints" / "step_0000004") in text
    assert f"(rank {failing}" in text
    assert "File too large" in text
    assert FULL in text
    assert checkpoints(tmp_path) == ["step_0000002"]
    after = run(pool, 2, config, tmp_path, *overrides)
    assert [record["step"] for record in after] == list(range(1, 6))


def failure_on_a_disk_that_looks_empty(
    rank: int, world: int, config: Path, overrides: list[str]
) -> str:
    """The error of a run that another process takes the disk's space from while it saves."""
    configure(rank, config, (), world)
    from megatron_distill.train.checkpoint import folder

    with patch.object(folder.shutil, "disk_usage", return_value=Mock(free=1 << 40)):
        return failure_here(rank, world, config, overrides)


@pytest.mark.parametrize("asynchronous", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_a_real_disk_that_fills_up_while_saving(
    pool: Pool, inputs: Inputs, small_disk: Callable[[str], Path], asynchronous: str
) -> None:
    output = small_disk("1400k") / "run"
    overrides = [f"output={output}", SAVE, "checkpoint.interval=1", "checkpoint.keep=9"]
    overrides.append(f"checkpoint.asynchronous={asynchronous}")
    config = inputs.folder / "dense.yaml"
    text = pool.run(2, failure_on_a_disk_that_looks_empty, config, overrides)
    assert text[0] == text[1]
    assert text[0].startswith(f"CheckpointError: saving {output}/checkpoints/step_")
    assert "No space left on device" in text[0]
    kept = checkpoints(output)
    assert kept
    assert all(re.fullmatch(r"step_\d{7}", name) for name in kept)


def test_a_log_that_cannot_be_written_ends_all_ranks(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    (tmp_path / "hugging_face").mkdir()  # else the tokenizer's copy is what does not fit
    endings = call(pool, inputs.folder / "dense.yaml", tmp_path, limits={0: 6000})
    text = message(endings)
    assert f"cannot write {tmp_path}/metrics.jsonl: File too large" in text
    steps = step_records_of_whole_lines(tmp_path)
    assert 0 < len(steps) < 20


def step_records_of_whole_lines(output: Path) -> list[dict[str, object]]:
    """Records of a log whose last line may be torn."""
    whole = (output / "metrics.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line) for line in whole]
