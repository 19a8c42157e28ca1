"""A user's error ends every rank with one message that has the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.e2e.failing import call, message
from tests.e2e.runs import SAVE, Inputs, checkpoints, run, step_records

SHORT = ("train.steps=4", "schedule.warmup_steps=1")

# overrides -> what the message must hold
WRONG: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "out of range": (
        ("optimizer.learning_rate=-1", "train.micro_batch_size=0"),
        ("2 problems", "optimizer.learning_rate = -1", "train.micro_batch_size = 0", "must be"),
    ),
    "world size": (
        ("parallel.context=4",),
        ("parallel.context", "layout needs a multiple of 4 processes; there are 2", "Set --proc"),
    ),
    "no tokenizer": (
        ("data.tokenizer.path=/nowhere/tokenizer",),
        ("/nowhere/tokenizer: no such folder", "data.tokenizer.path"),
    ),
    "no GPU": (("runtime.device=cuda",), ("runtime.device is cuda", "runtime.device=cpu")),
    "nothing held out": (
        ("validation.samples=4000",),
        ("validation.samples is 4000", "raise data.validation_fraction"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_configuration_is_reported_once(
    pool: Pool, inputs: Inputs, tmp_path: Path, case: str
) -> None:
    overrides, parts = WRONG[case]
    output = tmp_path / "run"
    text = message(call(pool, inputs.folder / "dense.yaml", output, *SHORT, SAVE, *overrides))
    for part in parts:
        assert part in text
    assert not (output / "metrics.jsonl").exists()
    assert not (output / "checkpoints").exists() or checkpoints(output) == []


def test_an_output_that_cannot_be_written(pool: Pool, inputs: Inputs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = message(call(pool, inputs.folder / "dense.yaml", tmp_path / "file" / "run", *SHORT))
    assert f"output={tmp_path}/file/run: cannot write there" in text


def _missing(folder: Path) -> tuple[Path, str]:
    return folder / "gone.jsonl", "gone.jsonl: no such file; correct data.sources.paths"


def _unreadable(folder: Path) -> tuple[Path, str]:
    path = folder / "unreadable.jsonl"
    path.symlink_to("/proc/self/mem")  # reading its beginning is an input/output error
    return path, "unreadable.jsonl: cannot be read (Input/output error)"


# Damage within a file: tests/unit/data/text/test_documents.py, and in a run below.
@pytest.mark.parametrize("make", [_missing, _unreadable])
def test_wrong_data_are_reported_once(
    pool: Pool, inputs: Inputs, tmp_path: Path, make: Callable[[Path], tuple[Path, str]]
) -> None:
    path, part = make(tmp_path)
    output = tmp_path / "run"
    text = message(
        call(pool, inputs.folder / "dense.yaml", output, *SHORT, SAVE,
             f"data.sources.0.paths={path}", "data.validation_fraction=0")
    )  # fmt: skip
    assert part in text
    assert not (output / "metrics.jsonl").exists() or step_records(output) == []
    assert not (output / "checkpoints").exists() or checkpoints(output) == []


def with_bad_lines(inputs: Inputs, path: Path, numbers: list[int]) -> int:
    """Write the corpus with some lines cut; return how many lines there are."""
    lines = inputs.corpus.read_text().splitlines()
    for number in numbers:
        lines[number - 1] = lines[number - 1][:-3]
    path.write_text("\n".join(lines) + "\n")
    return len(lines)


@pytest.mark.slow
def test_a_corrupt_line_far_in_the_data_ends_all_ranks_in_the_middle(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    with_bad_lines(inputs, corpus, [30])
    output = tmp_path / "run"
    data = (f"data.sources.0.paths={corpus}", "data.shuffle_buffer=4")
    data += ("data.shuffle_samples=4", "train.steps=200")
    text = message(
        call(pool, inputs.folder / "dense.yaml", output, *data, SAVE, "checkpoint.interval=5",
             "checkpoint.asynchronous=true")
    )  # fmt: skip
    assert f"{corpus}:30: not a JSON object" in text
    assert "data.on_error=skip" in text
    steps = [record["step"] for record in step_records(output)]
    assert steps == list(range(1, len(steps) + 1))
    assert 5 <= len(steps) < 200
    # The checkpoint in progress then is of a step that went well.
    newest = len(steps) // 5 * 5
    assert checkpoints(output)[-1] == f"step_{newest:07d}"


@pytest.mark.slow
def test_corrupt_lines_are_skipped_counted_and_reported(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    bad = list(range(2, 34, 2))
    with_bad_lines(inputs, corpus, bad)
    endings = call(
        pool, inputs.folder / "dense.yaml", tmp_path / "run", "train.steps=20",
        f"data.sources.0.paths={corpus}", "data.on_error=skip",
    )  # fmt: skip
    assert [ending.status for ending in endings] == [0, 0]
    for number in bad[:10]:
        assert f"skipped: {corpus}:{number}: not a JSON object" in endings[0].stderr
    assert "skipped 16 records so far" in endings[0].stderr
    assert len(step_records(tmp_path / "run")) == 20


def test_a_sequence_beyond_the_positions_of_a_checkpoint(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    config = inputs.folder / "dense.yaml"
    run(pool, 1, config, tmp_path / "short", *SHORT, SAVE)
    text = message(
        call(pool, config, tmp_path / "long", *SHORT, "student.architecture=null",
             f"student.checkpoint={tmp_path / 'short'}", "data.sequence_length=64")
    )  # fmt: skip
    assert "data.sequence_length = 64" in text
    assert "max_position_embeddings = 32" in text


def test_a_folder_that_another_run_holds_is_refused(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    import fcntl

    tmp_path.joinpath(".lock").write_text("process 1 on elsewhere\n")
    with (tmp_path / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        endings = pool.run(2, impatient, inputs.folder / "dense.yaml", tmp_path)
    assert endings[0] == endings[1]
    assert "another run (process 1 on elsewhere) is writing there" in endings[0]


def impatient(rank: int, world: int, config: Path, output: Path) -> str:
    """The error of a run that does not wait for another one."""
    from unittest.mock import patch

    from tests.e2e.runs import configure, failure_here

    configure(rank, config, (), world)
    from megatron_distill.runtime import folder_lock

    with patch.object(folder_lock, "_MOMENT_SECONDS", 0.5):
        return failure_here(rank, world, config, [f"output={output}"])
