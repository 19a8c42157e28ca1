"""Data that cannot be read, or differs between the roles, where a teacher has its own ranks."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_distill.errors import MegatronDistillError
from tests.distributed.pool import Pool
from tests.e2e.processes import SCRIPT
from tests.e2e.runs import (
    SECONDS,
    Inputs,
    checkpoints,
    course,
    environment,
    failure,
    step_records,
)
from tests.e2e.test_teacher_ranks import train_in_roles

SAVED = ("train.steps=200", "checkpoint.save=true", "checkpoint.interval=2")


def failure_in_roles(rank: int, world: int, config: Path, overrides: Sequence[str]) -> str:
    """Run one training that must fail; returns the error's kind and message."""
    try:
        train_in_roles(rank, world, config, overrides, None)
    except MegatronDistillError as error:
        return f"{type(error).__name__}: {error}"
    return "no failure"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("students", "teachers", "ahead"),
    [pytest.param(1, 1, 2, id="1 and 1"), pytest.param(2, 2, 1, id="2 and 2")],
)
def test_a_bad_record_ends_the_run_at_the_step_that_reads_it(
    pool: Pool, inputs: Inputs, tmp_path: Path, students: int, teachers: int, ahead: int
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    lines = inputs.corpus.read_text().splitlines()[:40]
    corpus.write_text("\n".join([*lines, '{"text": 7}']))
    config, given = inputs.folder / "dense.yaml", (*SAVED, f"data.sources.0.paths={corpus}")
    message = failure(pool, students, config, tmp_path / "shared", *given)
    assert message.startswith("DataError: "), message

    own = [f"output={tmp_path / 'apart'}", *given]
    own += [f"teacher.ranks={teachers}", f"teacher.steps_ahead={ahead}"]
    world = students + teachers
    found = pool.run(world, failure_in_roles, config, own, timeout=SECONDS)
    assert set(found) == {message}
    steps = course(step_records(tmp_path / "apart"))
    assert len(steps) > ahead
    assert steps == course(step_records(tmp_path / "shared"))
    assert checkpoints(tmp_path / "apart") == checkpoints(tmp_path / "shared")
    assert f"step_{len(steps) // 2 * 2:07d}" in checkpoints(tmp_path / "apart")


def start_on_two_hosts(folders: Sequence[Path], words: Sequence[str], log: Path) -> int:
    """Start rank i of a launch in folder i, as on a machine of its own; returns the larger status.

    The output of all is in `log`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(len(folders)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with log.open("wb") as stream:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), *words],
                env=environment(RANK=str(rank), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", **world),
                cwd=folder,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
            for rank, folder in enumerate(folders)
        ]
        try:
            return max(rank.wait(timeout=SECONDS) for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


@pytest.mark.slow
@pytest.mark.parametrize("differs", ["content", "size"])
def test_other_data_on_the_teachers_machine_is_named(
    inputs: Inputs, tmp_path: Path, differs: str
) -> None:
    lines = inputs.corpus.read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    folders = [tmp_path / "student", tmp_path / "teacher"]
    other = texts[0].replace("r", "s" if differs == "content" else "", 1)
    for folder, first in zip(folders, (texts[0], other), strict=True):
        folder.mkdir()
        rows = [json.dumps({"text": text}) for text in [first, *texts[1:]]]
        (folder / "corpus.jsonl").write_text("\n".join(rows))
    words = ["--config", str(inputs.folder / "dense.yaml"), f"output={tmp_path / 'run'}"]
    words += ["data.sources.0.paths=corpus.jsonl", "data.validation_fraction=0", "teacher.ranks=1"]
    words += ["train.steps=100"]
    assert start_on_two_hosts(folders, words, tmp_path / "log") != 0
    text = (tmp_path / "log").read_text()
    # An error of all ranks is written once per machine.
    (cause,) = {line for line in text.splitlines() if line.startswith("error: ")}
    host = socket.gethostname()
    if differs == "size":
        place = f"teacher.0 on {host} has other files than student.0 on {host} (names and sizes"
        assert cause.startswith(f"error: data source jsonl corpus.jsonl: {place}"), text
        return
    assert cause.startswith(f"error: student.0 on {host} failed at step "), text
    assert "is for other tokens than this rank's: their hash is " in cause
    assert "give all machines the same files" in cause
