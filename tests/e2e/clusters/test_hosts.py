"""A job over two hosts with an interface of their own each: a pulled cable, and what follows.

Where OpenSSH's server is installed the job comes to them by ssh.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from megatron_distill.launching.records import Launches, Status
from tests.distributed.pool import Pool
from tests.e2e.processes import PATIENCE, ROOT
from tests.e2e.runs import course, environment, run, step_records
from tests.support.network_hosts import INTERFACE, Hosts, refusal, two_hosts

pytestmark = pytest.mark.slow

SETTINGS = ("train.steps=100000", "checkpoint.save=true", "checkpoint.interval=2",
            "runtime.timeout_seconds=15")  # fmt: skip


MARK = "MEGATRON_DISTILL_TEST_JOB"  # in the environment of everything that the job starts


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    reason = refusal()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts() as found:
        yield found


@contextmanager
def submitted(hosts: Hosts, log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A job over both hosts; nothing of it is left at the end."""
    command = [sys.executable, "-m", "megatron_distill.cli", "submit", "ssh", *words]
    command += ["--hosts", hosts.words, "--ranks-per-node", "1", "--pause", "1"]
    # A login has none of this process's variables.
    variables = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", MARK: str(log)}
    command += [f"--variable={name}={value}" for name, value in variables.items()]
    command += ["--shell", hosts.shell(log.with_name("ssh"))]
    with log.open("wb") as stream:
        job = subprocess.Popen(
            command, env=environment(**{MARK: str(log)}), cwd=ROOT, stdout=stream,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        yield job
    finally:
        for process, _ in processes_of(log):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        job.wait()


def processes_of(log: Path) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Each process of a job, with its environment."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found = process.environ()
            if found.get(MARK) == str(log):
                yield process, found


def has_ranks(log: Path) -> bool:
    return any("RANK" in environment for _, environment in processes_of(log))


def test_both_hosts_end_when_their_cable_is_pulled_and_go_on_when_it_is_back(
    hosts: Hosts, pool: Pool, dense: Path, tmp_path: Path
) -> None:
    config, output, log = dense, tmp_path / "run", tmp_path / "job.log"
    launches = Launches(output / "launches", output, "")

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert job.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def steps() -> int:
        file = output / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    with submitted(hosts, log, str(config), f"output={output}", *SETTINGS) as job:
        wait_for(lambda: steps() >= 4)
        assert min(hosts.received_bytes()) > 100_000
        assert has_ranks(log)
        hosts.pull()
        wait_for(lambda: not has_ranks(log))
        # A minute later `submit ssh` would end torchrun on the host that cannot reach the store.
        hosts.plug()
        wait_for(lambda: launches.outcome(launches.all()[0]) is not None)
        first = launches.all()[0]
        outcome = launches.outcome(first)
        assert outcome is not None
        assert outcome.status is Status.FAILED
        errors = [(launches.of(first) / f"rank_0000{rank}.err").read_text() for rank in (0, 1)]
        for rank, text in enumerate(errors):
            assert len(re.findall(rf"rank {rank} at step \d+ waited in ", text)) == 1, text
            assert "Traceback" not in text
        assert "No answer from rank" in "".join(errors)
        assert "Fatal Python error" not in log.read_text()
        assert any((launches.of(first) / "nodes").glob("*.json"))
        assert "goes on from step" in log.read_text()
        wait_for(lambda: len(launches.all()) == 2)
        second = launches.all()[1]
        wait_for(lambda: steps() >= second.progress + 3)
        job.send_signal(signal.SIGINT)
        assert job.wait(timeout=PATIENCE) == 75, log.read_text()
    found = step_records(output)
    wanted = second.progress + 3
    reference = run(
        pool, 2, config, tmp_path / "reference", *SETTINGS, "checkpoint.save=false",
        stop_after=wanted,
    )  # fmt: skip
    assert course(found[:wanted]) == course(reference)


def test_hosts_without_a_cable_start_no_ranks_and_train_when_it_is_there(
    hosts: Hosts, dense: Path, tmp_path: Path
) -> None:
    output, log = tmp_path / "run", tmp_path / "job.log"
    launches = Launches(output / "launches", output, "")
    check = ("--all-reduce-check", "always", "--health-seconds", "40")
    hosts.pull()
    with submitted(hosts, log, str(dense), f"output={output}", "train.steps=3", *check) as job:
        deadline = time.monotonic() + PATIENCE
        while not (launches.all() and launches.outcome(launches.all()[0])):
            assert job.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        hosts.plug()
        first = launches.all()[0]
        assert not list(launches.of(first).glob("rank_*"))
        outcome = launches.outcome(first)
        assert outcome is not None
        assert outcome.reason == f"2 nodes failed the checks: {', '.join(hosts.names)}"
        for name, other in (hosts.names, hosts.names[::-1]):
            assert f"node {name}: its sum with {other}: " in log.read_text()
        assert job.wait(timeout=PATIENCE) == 0, log.read_text()
    assert "GB/s between two nodes" in log.read_text()
    assert len(launches.all()) == 2
    assert len(step_records(output)) == 3
