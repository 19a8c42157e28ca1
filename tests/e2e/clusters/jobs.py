"""The records of a run that jobs of a cluster make, and waiting for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import psutil

from megatron_distill.launching.records import Launches, Status
from tests.e2e.processes import HOLD, Hold
from tests.support.slurm_cluster import Cluster, Job

SAVING = ("checkpoint.save=true", "checkpoint.keep=2")
ENDLESS = ("train.steps=100000", *SAVING)
NEAR_END = "the end of the job's time is near"
WARNED = f"{NEAR_END} (signal): saving"


def launches_of(output: Path, folder: str = "launches") -> Launches:
    return Launches(output / folder, output, "")


def outcomes(output: Path, folder: str = "launches") -> list[Status | None]:
    """How each launch of a run ended, oldest first."""
    launches = launches_of(output, folder)
    found = [launches.outcome(launch) for launch in launches.all()]
    return [None if one is None else one.status for one in found]


def steps_done(output: Path) -> int:
    log = output / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def nodes_of(output: Path, launch: int) -> list[str]:
    return launches_of(output).all()[launch].nodes


def written_by(process: psutil.Process) -> set[str]:
    """The files that a process has open for writing, and its named sockets."""
    files = {file.path for file in process.open_files() if file.mode != "r"}
    return files | {one.laddr for one in process.net_connections("unix") if one.laddr}


@contextmanager
def holding(cluster: Cluster, folder: Path, file: Path) -> Iterator[None]:
    """Let jobs that are submitted in the block go no further than a file, until `go` is there.

    A job that a test warns comes to no end before.
    """
    hook = folder / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HOLD)
    path = f"{hook}{os.pathsep}{cluster.environment['PYTHONPATH']}"
    with patch.dict(cluster.environment, Hold(file).variables(folder) | {"PYTHONPATH": path}):
        yield


@contextmanager
def held_up(job: Job) -> Iterator[None]:
    """Stop the running ranks of a job; they take signals and go on at the end."""
    ranks = job.ranks()
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.suspend()
    try:
        yield
    finally:
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.resume()


def next_launch_steps(job: Job, output: Path, launches: int, steps: int = 2) -> None:
    """Wait until that many launches have begun and the newest has logged further steps."""
    job.wait_for(lambda: len(launches_of(output).all()) >= launches)
    # A launch drops the lines after the checkpoint that it resumes from.
    before = steps_done(output)
    job.wait_for(lambda: steps_done(output) >= before + steps)
