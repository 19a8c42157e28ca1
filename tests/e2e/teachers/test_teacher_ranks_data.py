"""Data that cannot be read, or differs between the roles, where a teacher has its own ranks."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_distill.runtime.batch import Batch
from megatron_distill.store import SampleRecord, StoreReader
from megatron_distill.store.records import trained_positions
from tests.distributed.pool import Pool
from tests.e2e.captures import run_in, write_capture
from tests.e2e.processes import SCRIPT
from tests.e2e.runs import (
    SECONDS,
    Inputs,
    checkpoints,
    course,
    environment,
    failure,
    failure_here,
    run,
    step_records,
)
from tests.e2e.teachers.roles import run_apart, train_in_roles
from tests.support.store_samples import columns_of

SAVED = ("train.steps=200", "checkpoint.save=true", "checkpoint.interval=2")


@pytest.mark.slow
def test_a_bad_record_ends_the_run_at_the_step_that_reads_it(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    students, teachers, ahead = 2, 2, 2
    corpus = tmp_path / "corpus.jsonl"
    lines = inputs.corpus.read_text().splitlines()[:40]
    corpus.write_text("\n".join([*lines, '{"text": 7}']))
    config, given = inputs.folder / "dense.yaml", (*SAVED, f"data.sources.0.paths={corpus}")
    message = failure(pool, students, config, tmp_path / "shared", *given)
    assert message.startswith("DataError: "), message

    own = [f"output={tmp_path / 'apart'}", *given]
    own += [f"teacher.ranks={teachers}", f"teacher.steps_ahead={ahead}"]
    world = students + teachers
    found = pool.run(world, failure_here, config, own, train_in_roles, timeout=SECONDS)
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
    route = r"unit \d+ of step \d+ from teacher\.0 to student\.0"
    assert re.search(f"{route} has other tokens than this rank: hash ", cause), text
    assert "give all machines the same files" in cause


# The settings of `write_capture`.
SENT_RECORDS = (
    "teacher.transfer={what: top_k, k: 12}",
    "objective.terms=[{top_k: 12}, {top_k: 12, temperature: 0.5}, {top_k: 12, temperature: 2.0}]",
)


def columns_in_roles(
    rank: int, world: int, config: Path, overrides: Sequence[str]
) -> list[tuple[tuple[int, ...], list[Tensor]]]:
    """Run one training; returns the columns of each top-k that this rank has received."""
    from megatron_distill.train.assemble.answers import signals

    found: list[tuple[tuple[int, ...], list[Tensor]]] = []
    usual = signals.signal_of_columns

    def noted(columns: Sequence[Tensor], batch: Batch, *given: Any) -> Any:
        numbers = tuple(batch.on_host.sample_ids_b.tolist())
        found.append((numbers, [column.clone() for column in columns]))
        return usual(columns, batch, *given)

    with patch.object(signals, "signal_of_columns", noted):
        train_in_roles(rank, world, config, overrides, None)
    return found


# Layouts of the student, and of the teacher and its capture.
OF_RECORDS: dict[str, tuple[int, tuple[str, ...], int, str]] = {
    "1 and 1": (1, (), 1, "{}"),
    "TP2+sequence and TP2": (2, ("parallel.tensor=2", "parallel.sequence=true"), 2, "{tensor: 2}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_RECORDS)
def test_a_sent_top_k_is_a_capture_of_the_teacher_record_by_record(
    pool: Pool, inputs: Inputs, tmp_path: Path, case: str
) -> None:
    students, layout, teachers, own = OF_RECORDS[case]
    store, samples = tmp_path / "store", 6 * 8
    written = write_capture(inputs, "sent", samples=samples)
    assert run_in(pool, teachers, written, store, f"parallel={own}") is True
    captured = StoreReader.open(store).read(range(samples))

    given = [f"output={tmp_path / 'run'}", "train.steps=6", *SENT_RECORDS, *layout]
    given += [f"teacher.ranks={teachers}", f"teacher.parallel={own}"]
    world = students + teachers
    config = inputs.folder / "dense.yaml"
    of_rank = pool.run(world, columns_in_roles, config, given, timeout=SECONDS)
    for answers in of_rank[:students]:
        assert [number for numbers, _ in answers for number in numbers] == list(range(samples))
        for numbers, columns in answers:
            assert_same_values(columns, [captured[number] for number in numbers])
    assert of_rank[students:] == [[]] * teachers


def assert_same_values(ours: Sequence[Tensor], records: Sequence[SampleRecord]) -> None:
    """Compare every value of the trained positions, bit by bit."""
    expected = columns_of(records)
    trained_Sb = torch.from_numpy(np.stack([trained_positions(one) for one in records], 1))
    # The last token of a document has no label here, and has values in the store.
    trained_Sb &= ours[1][..., 0] != 0
    assert trained_Sb.float().mean() > 0.5
    for sent, stored in zip(ours, expected, strict=True):
        assert sent.dtype == stored.dtype
        assert torch.equal(sent[trained_Sb], stored[trained_Sb])


@pytest.mark.slow
def test_a_run_with_a_sent_top_k_goes_on_from_a_store(
    pool: Pool, inputs: Inputs, dense: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    assert run_in(pool, 1, write_capture(inputs, "sent", samples=6 * 8), store) is True
    sent, terms = SENT_RECORDS
    saved = ("train.steps=6", "checkpoint.save=true", terms)
    undisturbed = run_apart(pool, 1, 1, dense, tmp_path / "undisturbed", sent, *saved)
    run_apart(pool, 1, 1, dense, tmp_path / "run", sent, *saved, stop_after=3)
    stored = (f"teacher.store={store}", "teacher.architecture=null")
    run(pool, 1, dense, tmp_path / "run", *saved, *stored)
    assert len(undisturbed) == 6
    assert course(step_records(tmp_path / "run")) == course(undisturbed)
