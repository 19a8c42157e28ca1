"""All-reduces of real ranks before those of a run: over ssh, between hosts of this machine."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Timer

import psutil
import pytest

from megatron_distill import log
from megatron_distill.launching.checks.all_reduce import _cause
from megatron_distill.launching.checks.pairs import NodeSums, sums_file
from megatron_distill.launching.forked_ranks import TIME_LIMIT
from megatron_distill.launching.policy import AllReduceCheck, Policy
from megatron_distill.launching.records import bad_nodes, read_record
from megatron_distill.launching.supervisor import supervise
from tests.unit.launching.machines import SHELL, Machines

pytestmark = pytest.mark.usefixtures("handlers")

# The ranks of a run are not what is tested: they end at once.
WITHOUT_RANKS = 'case "$*" in *--endpoint*) exit 1 ;; esac\n'
UNKNOWN = "no-such-interface"
NCCL = "DistBackendError: NCCL error in: a.cpp, system error\nncclSystemError: System call failed\n"


def write_program(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def launched(
    machines: Machines,
    *names: str,
    wanted: int,
    check: AllReduceCheck = "always",
    seconds: float = 60.0,
    special: str = "",
    status: int = 1,
) -> list[str]:
    """Launch on hosts, and return the nodes of the ranks; special: lines of the remote shell."""
    nvidia_smi = machines.folder / "programs" / "nvidia-smi"
    if not nvidia_smi.exists():
        write_program(nvidia_smi, ":")  # whatever is here
    shell = SHELL.format(folder=machines.folder)
    (machines.folder / "shell").write_text(WITHOUT_RANKS + special + shell)
    hosts = machines.hosts(*names, wanted=wanted)
    policy = Policy(
        sys.executable, hosts.job, ranks_per_node=1, wanted_nodes=wanted, health_seconds=seconds,
        all_reduce_check=check,
    )  # fmt: skip
    log.configure(0)
    assert supervise(hosts, machines.program, policy) == status
    return machines.launches.all()[-1].nodes


def sums_of(machines: Machines, node: str) -> NodeSums | None:
    launches = machines.launches
    return read_record(sums_file(launches.of(launches.all()[-1]), node), NodeSums)


@pytest.mark.slow
def test_sound_hosts_sum_with_their_neighbours_and_the_log_has_the_speed(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(machines, "a", "b", "c", wanted=3) == ["a", "b", "c"]
    text = capsys.readouterr().err
    found = re.search(r"all-reduces took (\d+) s; (\S+) to (\S+) GB/s between two nodes\n", text)
    assert found, text
    assert int(found[1]) < 50
    assert 0.0 < float(found[2]) <= float(found[3])
    for node, others in (("a", "bc"), ("b", "ac"), ("c", "ab")):
        sums = sums_of(machines, node)
        assert sums is not None
        assert sorted(sums.speeds) == sorted(sums.begun) == list(others)
        assert sums.problems == {}


@pytest.mark.slow
def test_a_host_that_no_other_one_reaches_is_bad_and_a_spare_one_takes_its_place(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = f'test "$1" = b && export GLOO_SOCKET_IFNAME={UNKNOWN}\n'
    assert launched(machines, "a", "b", "c", wanted=2, special=wrong, seconds=40.0) == ["a", "c"]
    text = capsys.readouterr().err
    (bad,) = bad_nodes(machines.launches.folder)
    assert bad.node == "b"
    assert bad.reason.startswith("its sum with a: ")
    assert "; its sum with c: " in bad.reason
    assert bad.reason.count(UNKNOWN) == 2
    assert f"node b: {bad.reason}" in text


@pytest.mark.slow
def test_two_hosts_that_do_not_reach_each_other_start_no_ranks_and_none_is_excluded(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = f'test "$1" = b && export GLOO_SOCKET_IFNAME={UNKNOWN}\n'
    launched(machines, "a", "b", wanted=2, special=wrong, seconds=30.0)
    launches = machines.launches
    outcome = launches.outcome(launches.all()[-1])
    assert outcome is not None
    assert outcome.reason == "2 nodes failed the checks: a, b"
    assert bad_nodes(launches.folder) == []
    assert UNKNOWN in capsys.readouterr().err


def test_a_gpu_that_torch_cannot_use_is_found_before_the_ranks_start(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = "test \"$1\" = --list-gpus && echo 'GPU 0: H100'"
    write_program(machines.folder / "programs" / "nvidia-smi", listed)
    hidden = "export CUDA_VISIBLE_DEVICES=\n"
    launched(machines, "a", wanted=1, check="always", special=hidden)
    text = capsys.readouterr().err
    assert "node a: healthy: 1 GPU, " in text
    assert re.search(r"node a: the sum of its ranks: .*(CUDA|NVIDIA)", text), text
    outcome = machines.launches.outcome(machines.launches.all()[-1])
    assert outcome is not None
    assert outcome.reason == "1 node failed the checks: a"

    # A run on CPUs needs no GPU.
    assert launched(machines, "a", wanted=1, check="gpus", special=hidden) == ["a"]
    assert "the sum of its ranks" not in capsys.readouterr().err


@pytest.mark.slow
def test_hosts_that_have_begun_nothing_in_time_are_taken_as_they_are(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = 'case "$*" in *all_reduce*) exec sleep 600 ;; esac\n'
    began = time.monotonic()
    assert launched(machines, "a", "b", wanted=2, seconds=24.0, special=hangs) == ["a", "b"]
    assert time.monotonic() - began < 60.0
    text = capsys.readouterr().err
    assert "node a, b: has begun no all-reduce, and is taken as it is" in text


@pytest.mark.slow
def test_a_host_that_fails_its_own_check_is_excluded_though_all_others_fail_their_sums(
    machines: Machines,
) -> None:
    listed = "test \"$1\" = --list-gpus && echo 'GPU 0: H100'"
    write_program(machines.folder / "programs" / "nvidia-smi", listed)
    few = "test \"$1\" = --list-gpus && echo 'GPU 0: H100' || echo '0, 7'"
    write_program(machines.folder / "b" / "nvidia-smi", few)
    hidden = 'test "$1" = a && export CUDA_VISIBLE_DEVICES=\n'
    launched(machines, "a", "b", wanted=2, check="always", special=hidden)
    launches = machines.launches
    assert [one.node for one in bad_nodes(launches.folder)] == ["b"]
    outcome = launches.outcome(launches.all()[-1])
    assert outcome is not None
    assert outcome.reason == "2 nodes failed the checks: b, a"


def all_reduces(machines: Machines) -> list[psutil.Process]:
    """The processes of the check, ranks that wait included."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            words = one.cmdline()
            if "megatron_distill.launching.checks.all_reduce" in words:
                found += [one] if any(str(machines.folder) in word for word in words) else []
    return found


@pytest.mark.slow
def test_a_job_that_is_told_to_stop_ends_its_sums_and_starts_no_ranks(machines: Machines) -> None:
    hangs = 'case "$1 $*" in "b "*all_reduce*) exec sleep 600 ;; esac\n'

    def stop() -> None:
        deadline = time.monotonic() + 60.0
        while len(all_reduces(machines)) < 4 and time.monotonic() < deadline:  # with ranks
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR1)

    Timer(0.0, stop).start()
    launched(machines, "a", "b", wanted=2, special=hangs, seconds=120.0, status=75)
    launches = machines.launches
    outcome = launches.outcome(launches.all()[-1])
    assert outcome is not None
    assert outcome.reason == "stopped before its ranks began"
    assert outcome.next == "goes on from step 0"
    assert time.time() - launches.all()[-1].started < 60.0
    deadline = time.monotonic() + 30.0
    while all_reduces(machines):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("text", "status", "cause"),
    [
        (
            f"{NCCL}Last error:\nConnection closed by peer\n"
            "torch.AcceleratorError: CUDA error: uncorrectable ECC error\n",
            1,
            "CUDA error: uncorrectable ECC error",
        ),
        (f"{NCCL}Last error:\nsocketPoll: No route to host\n", 1, "socketPoll: No route to host"),
        (NCCL, 1, "System call failed"),
        ("Last error:\nProcess ForkProcess-1:3:\nRuntimeError: no route\n", 1, "no route"),
        ("RuntimeError: Connection reset by peer\n", 1, "Connection reset by peer"),
        ("a connection was closed\n", 11, "a rank ended with status 11"),
        ("a warning\n", 1, "a rank ended with status 1"),
        ("a warning\n", TIME_LIMIT, None),
        ("Watchdog caught collective operation timeout\n", 6, None),
    ],
)
def test_the_cause_is_the_error_that_no_other_rank_has_brought_about(
    text: str, status: int, cause: str | None
) -> None:
    assert _cause(text, status) == cause


def test_hosts_without_gpus_sum_only_if_asked(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(machines, "a", "b", wanted=2, check="gpus") == ["a", "b"]
    assert "all-reduces took" not in capsys.readouterr().err
    assert sums_of(machines, "a") is None
