"""The outcome of a launch from the outcomes of its nodes, and the report of the first failure."""

from __future__ import annotations

import io
import os
import signal
import time
from pathlib import Path
from threading import Timer

import pytest

from megatron_distill import log
from megatron_distill.errors import ConfigError
from megatron_distill.launching.records import (
    LOST_PEER,
    Launch,
    Launches,
    NodeOutcome,
    Outcome,
    Status,
)
from megatron_distill.launching.ssh import SSH, Hosts
from megatron_distill.launching.supervisor import (
    Policy,
    _classified,
    _decide,
    _end_of,
    _held,
    _report,
    _Stop,
    _stop_seconds,
)

DONE, UNFINISHED, ENDED = Status.DONE, Status.UNFINISHED, Status.ENDED
FAILED, MISCONFIGURED = Status.FAILED, Status.MISCONFIGURED


def node(
    index: int, status: Status, *, seconds: float = 0.0, order: int = 0, rank: int | None = None
) -> NodeOutcome:
    return NodeOutcome(f"n{index}", index, status, seconds, rank, order, f"of n{index}")


@pytest.mark.parametrize(
    ("kinds", "silent", "told", "status", "reason"),
    [
        ([DONE, DONE], [], False, DONE, "done"),
        ([DONE, DONE], [], True, DONE, "done"),
        ([UNFINISHED, UNFINISHED], [], True, UNFINISHED, "stopped before"),
        ([UNFINISHED, ENDED], [], True, UNFINISHED, "stopped before"),
        ([UNFINISHED], ["n1"], True, UNFINISHED, "stopped before"),
        ([UNFINISHED, UNFINISHED], [], False, UNFINISHED, "stopped by a signal to a rank"),
        ([UNFINISHED, ENDED], [], False, FAILED, "a signal from outside"),
        ([ENDED, ENDED], [], False, FAILED, "a signal from outside"),
        ([DONE], ["n1"], False, FAILED, "no report from n1"),
        ([], ["n0", "n1"], False, FAILED, "no report from n0, n1"),
        ([FAILED, ENDED], [], True, FAILED, "of n0"),
        ([FAILED, MISCONFIGURED], [], False, MISCONFIGURED, "of n0"),
    ],
)
def test_the_outcome_of_a_launch(
    kinds: list[Status], silent: list[str], told: bool, status: Status, reason: str
) -> None:
    nodes = [node(index, kind) for index, kind in enumerate(kinds)]
    found, text = _classified(nodes, silent, 1, was_told=told)
    assert found is status
    assert text.startswith(reason)


def test_a_signal_to_the_ranks_may_come_before_that_to_the_supervisor() -> None:
    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        with _Stop() as stop:
            assert not stop.comes_within(0.1)
            Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            assert stop.comes_within(60.0)
            assert stop.is_cancelled
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_node_without_a_report_is_the_reason_of_ranks_that_lost_a_peer() -> None:
    lost, own = (node(0, FAILED, order=order, rank=0) for order in (LOST_PEER, 0))
    assert _classified([lost], ["n1"], 1, was_told=False)[1] == "no report from n1 (status 1)"
    assert _classified([own], ["n1"], 1, was_told=False)[1] == "of n0"
    assert _classified([lost], [], 1, was_told=False)[1] == "of n0"


def test_the_first_failure_is_no_lost_peer_and_then_the_earliest(tmp_path: Path) -> None:
    nodes = [
        node(0, FAILED, seconds=10.0, order=LOST_PEER + 1, rank=0),  # lost a peer
        node(1, FAILED, seconds=12.0, order=0, rank=5),
        node(2, FAILED, seconds=11.0, order=0, rank=9),
        node(3, ENDED),
    ]
    trace = 'Traceback (most recent call last)\n  File "step.py"\nValueError: the cause'
    (tmp_path / "rank_00009.err").write_text(f"a warning\n{trace}\n")
    stream = io.StringIO()
    log.configure(0, name="job", stream=stream)
    _report(nodes, tmp_path, shows_traceback=True)
    log.configure(0)
    text = stream.getvalue()
    assert text.count("rank 9 on n2 failed first, at ") == 1
    assert "a warning" not in text
    assert text.index(trace) < text.index("supervisor: of n2\n")


def test_the_end_of_a_log_is_its_last_traceback_or_its_last_lines() -> None:
    trace = "Traceback (most recent call last):\n  here\nValueError: {}"
    log = f"start\n{trace.format(1)}\nbetween\n{trace.format(2)}\nafter"
    assert _end_of(log) == f"{trace.format(2)}\nafter"
    assert _end_of("\n".join(map(str, range(40)))) == "\n".join(map(str, range(25, 40)))
    assert _end_of("") == ""


@pytest.mark.parametrize(
    ("without", "begins"),
    [([], "goes on from step 0"), (["b"], "no further launch: 1 of 2 hosts are left")],
)
def test_the_record_of_a_launch_tells_whether_another_one_follows(
    without: list[str], begins: str, tmp_path: Path
) -> None:
    hosts = Hosts(["a", "b"], 2, {"a": "a", "b": "b"}, SSH, {})
    launches = Launches(tmp_path, tmp_path, "")
    launch = Launch(hosts.job, 0, hosts.job, ["train"], ["a", "b"], ["a", "b"], 0, 1.0)
    launches.begin(launch)
    failed = Outcome(FAILED, "why", 0, 2.0)
    policy = Policy("python3", hosts.job)
    assert _decide(hosts, policy, launches, launch, failed, _Stop(), without=without) == 1
    found = launches.outcome(launch)
    assert found is not None
    assert found.next.startswith(begins)


def test_a_refused_job_leaves_the_name_of_the_holder_where_files_have_no_locks(
    tmp_path: Path,
) -> None:
    class Asked(Hosts):
        def is_running(self, job: str) -> bool:
            return job == "first"

    launches = Launches(tmp_path, tmp_path, "output=a")
    launches.lock_file.write_text("job first on n1\n")
    for name in ("second", "third"):
        hosts = Asked(["a"], 1, {"a": "a"}, SSH, {}, name)
        with (
            pytest.raises(ConfigError, match="output=a: job first is writing there"),
            _held(launches, hosts),
        ):
            pass
    assert launches.lock_file.read_text() == "job first on n1\n"


def test_ranks_that_save_have_the_measured_time_and_until_the_job_ends(tmp_path: Path) -> None:
    hosts = Hosts(["a"], 1, {"a": "a"}, SSH, {})
    measured, given = Policy("python3", "s"), Policy("python3", "s", grace_seconds=900.0)
    assert _stop_seconds(hosts, measured, tmp_path) == 300.0
    assert _stop_seconds(hosts, given, tmp_path) == 900.0
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "step_seconds": 200.0}\n')
    assert _stop_seconds(hosts, measured, tmp_path) == 460.0
    hosts.end = time.time() + 7200.0
    assert _stop_seconds(hosts, measured, tmp_path) == pytest.approx(3600.0, abs=5.0)
