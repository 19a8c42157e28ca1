"""Forked ranks meet, fail together, and are killed at their time limit; one server for all."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_distill.launching.forked_ranks import TIME_LIMIT, ForkedRanks


def prepare() -> None:
    os.environ["PREPARED"] = "once"


def add_ranks() -> None:
    """Needs torchrun's variables, the store behind them, and gloo."""
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    if dist.get_rank() == 1:
        words = total.item(), os.environ["PREPARED"], torch.get_num_threads()
        sys.stdout.write(" ".join(map(str, words)))
        sys.stdout.flush()
    dist.destroy_process_group()


def write_session() -> None:
    sys.stdout.write(f"{os.getsid(0) == os.getpid()} ")
    sys.stdout.flush()


def fail_on_last_rank(status: int) -> int:
    if os.environ["RANK"] != "1":
        time.sleep(300)
    raise SystemExit(status)


def work(seconds: float) -> None:
    while time.process_time() < seconds:
        pass


def sleep_long() -> None:
    time.sleep(300)


def sleep_named(pids: Path) -> None:
    (pids / str(os.getpid())).touch()
    time.sleep(300)


def signal_when_begun(forked: ForkedRanks, pids: Path, number: signal.Signals) -> None:
    while len(list(pids.iterdir())) < 2:
        time.sleep(0.01)
    pid = forked._process.pid
    assert pid is not None
    os.kill(pid, number)


@pytest.fixture(scope="module")
def forked() -> Iterator[ForkedRanks]:
    with ForkedRanks(prepare) as found:
        found.wait()
        yield found


def test_ranks_of_one_preparation_meet_call_after_call(forked: ForkedRanks, tmp_path: Path) -> None:
    for threads in (1, 2):
        output = tmp_path / f"{threads}.txt"
        status = forked.run(add_ranks, ranks=2, threads=threads, output=output, seconds=60)
        assert status == 0, output.read_text()
        assert output.read_text().splitlines()[-1] == f"3.0 once {threads}"


def test_each_rank_has_a_session_of_its_own_as_under_torchrun(
    forked: ForkedRanks, tmp_path: Path
) -> None:
    """Linux groups processes by session, and those of one group wake each other later."""
    output = tmp_path / "output.txt"
    assert forked.run(write_session, ranks=2, threads=1, output=output, seconds=60) == 0
    assert output.read_text().split() == ["True", "True"]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_ranks_end_with_the_process_that_forks_them(tmp_path: Path, number: signal.Signals) -> None:
    """A closed terminal hangs up on that process alone."""
    pids = tmp_path / "pids"
    pids.mkdir()
    with ForkedRanks(prepare) as forked:
        forked.wait()
        threading.Thread(target=signal_when_begun, args=(forked, pids, number)).start()
        with pytest.raises(EOFError):
            forked.run(
                sleep_named, pids, ranks=2, threads=1, output=tmp_path / "output.txt", seconds=200
            )
    for one in pids.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(one.name), 0)


def test_the_work_of_ranks_is_counted(forked: ForkedRanks, tmp_path: Path) -> None:
    """By it `calibrate` tells its own work from that of others."""
    before = forked.cpu_seconds
    forked.run(work, 0.4, ranks=2, threads=1, output=tmp_path / "output.txt", seconds=60)
    assert 0.8 <= round(forked.cpu_seconds - before, 6) < 1.6


def test_a_failed_rank_ends_the_others_at_once(forked: ForkedRanks, tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    began = time.monotonic()
    assert forked.run(fail_on_last_rank, 5, ranks=2, threads=1, output=output, seconds=200) == 5
    assert time.monotonic() - began < 100


def test_ranks_that_hang_are_killed_at_the_limit(forked: ForkedRanks, tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    assert forked.run(sleep_long, ranks=2, threads=1, output=output, seconds=0.5) == TIME_LIMIT
