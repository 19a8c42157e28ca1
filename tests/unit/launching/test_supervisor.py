"""The decision after a launch: another one or none, when, and on which nodes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from importlib import metadata
from pathlib import Path
from threading import Timer

import pytest

from megatron_distill import log
from megatron_distill.cli import main
from megatron_distill.errors import ConfigError
from megatron_distill.launching import supervisor
from megatron_distill.launching.policy import Policy
from megatron_distill.launching.records import (
    Launches,
    LaunchRecord,
    Outcome,
    Status,
    bad_nodes,
    write_record,
)
from megatron_distill.launching.ssh import SSH, Hosts
from megatron_distill.launching.supervisor import (
    _decide,
    _end_option,
    _held,
    _Stop,
    _stop_seconds,
    _wait,
    supervise,
)
from tests.unit.launching.machines import SHELL, Machines

pytestmark = pytest.mark.usefixtures("handlers")
FAILED = Status.FAILED


def test_a_signal_to_the_ranks_may_come_before_that_to_the_supervisor() -> None:
    with _Stop() as stop:
        assert not stop.comes_within(0.1)
        Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert stop.comes_within(60.0)
        assert stop.is_cancelled


@pytest.mark.parametrize(
    ("restart", "said"),
    [(0, "stopped before the settings were read"), (1, "cancelled after step 0")],
)
def test_a_signal_that_ends_the_reading_of_the_settings_is_no_error_in_them(
    restart: int, said: str, machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal sends it to the program that reads them, too, which then has no answer."""
    log.configure(0)
    reading = f'case "$*" in *print-config*) kill -INT {os.getpid()}; sleep 0.2; exit 241 ;; esac\n'
    shell = machines.folder / "shell"
    shell.write_text(reading + SHELL.format(folder=machines.folder))
    hosts = machines.hosts("a", wanted=1)
    hosts.restart = restart
    assert supervise(hosts, machines.program, Policy(sys.executable, "s")) == 75
    text = capsys.readouterr().err
    assert said in text
    assert "error" not in text


@pytest.mark.parametrize(
    ("without", "begins"),
    [([], "goes on from step 0"), (["b"], "no further launch: 1 of 2 hosts are left")],
)
def test_the_record_of_a_launch_tells_whether_another_one_follows(
    without: list[str], begins: str, tmp_path: Path
) -> None:
    hosts = Hosts(["a", "b"], 2, {"a": "a", "b": "b"}, SSH, {}, first_pause=0.0)
    launches = Launches(tmp_path, tmp_path, "")
    launch = LaunchRecord(hosts.job, 0, hosts.job, ["train"], ["a", "b"], ["a", "b"], 0, 1.0)
    launches.begin(launch)
    failed = Outcome(FAILED, "why", 0, 2.0)
    policy = Policy("python3", hosts.job)
    stop = _Stop()
    assert _decide(hosts, policy, launches, launch, failed, stop, without=without, silent=()) == 1
    found = launches.outcome(launch)
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


def test_a_job_of_a_chain_starts_no_ranks_after_useless_launches_or_an_error(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = machines.hosts("a", wanted=1)
    chain = Policy(sys.executable, "s", max_starts=2, requeues=False)
    for number in range(2):
        machines.launches.begin(LaunchRecord(f"{number}", 0, "s", [], ["a"], ["a"], 0, number))
    log.configure(0)
    assert supervise(hosts, machines.program, chain) == 1
    text = "not started: 2 launches since step 0 brought no new checkpoint"
    assert text in capsys.readouterr().err

    error = Outcome(Status.MISCONFIGURED, "error: the disk is full", 0, 2.0)
    last = machines.launches.all()[-1]
    write_record(machines.launches.of(last) / "outcome.json", error)
    assert supervise(hosts, machines.program, chain) == 78
    assert "submit` again: error: the disk is full" in capsys.readouterr().err
    assert len(machines.launches.all()) == 2


def test_the_log_tells_the_warning_of_the_scheduler_from_the_job_s_own_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts, policy = Hosts(["a"], 1, {"a": "a"}, SSH, {}), Policy("python3", "s")
    near = "the end of the job's time is near"
    log.configure(0)
    hosts.end = time.time()
    with _Stop() as stop:
        assert _wait(hosts, ["sleep", "60"], policy, tmp_path, stop) == (-signal.SIGUSR1, True)
    assert f"{near} (clock): saving" in capsys.readouterr().err
    hosts.end = time.time() + 3600.0
    with _Stop() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert _wait(hosts, ["sleep", "60"], policy, tmp_path, stop) == (-signal.SIGUSR1, True)
    assert f"{near} (signal): saving" in capsys.readouterr().err


def test_the_job_s_own_clock_leaves_the_measured_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 200 s: 460 s, which is more than the usual five minutes."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "step_seconds": 200.0}\n')
    hosts, policy = Hosts(["a"], 1, {"a": "a"}, SSH, {}), Policy("python3", "s")
    hosts.end = 10_000.0
    for left, told in ((455.0, True), (465.0, False)):
        now = iter([5000.0])  # the ranks begin
        monkeypatch.setattr(
            supervisor.time, "time", lambda now=now, left=left: next(now, 10_000.0 - left)
        )
        seconds = "60" if told else "2"
        with _Stop() as stop:
            status, was_told = _wait(hosts, ["sleep", seconds], policy, tmp_path, stop)
        assert was_told is told
        assert status == (-signal.SIGUSR1 if told else 0)


def test_nodes_kill_ranks_that_do_not_end_half_a_minute_before_the_job_does() -> None:
    hosts = Hosts(["a"], 1, {"a": "a"}, SSH, {})
    assert _end_option(hosts) == []
    for left, least in ((3600.0, 30.0), (60.0, 15.0)):
        hosts.end = time.time() + left
        name, end = _end_option(hosts)
        assert name == "--end"
        assert float(end) == pytest.approx(hosts.end - least, abs=2.0)


def test_a_first_host_without_an_answer_costs_a_launch_and_the_next_begins_on_another(
    machines: Machines,
) -> None:
    machines.break_connections("a")
    hosts = machines.hosts("a", "b", "c", wanted=2)
    policy = Policy(sys.executable, hosts.job)
    assert supervise(hosts, machines.program, policy) == 1
    assert (hosts.again, hosts.names) == (True, ["b", "c", "a"])
    (launch,) = machines.launches.all()
    outcome = machines.launches.outcome(launch)
    assert outcome.status is FAILED
    assert outcome.reason == "no answer from a: status 255: connect to host a: No route"
    assert outcome.next == "goes on from step 0"

    # Before the first launch it is more likely an error in the words.
    hosts = machines.hosts("a", wanted=1)
    hosts.restart = 0
    assert supervise(hosts, machines.program, policy) == 78
    assert not hosts.again


def test_a_node_check_that_hangs_is_cut_off_and_the_host_is_tried_again(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = SHELL.format(folder=machines.folder)
    hanging = 'case "$*" in *node_health*) exec sleep 600 ;; esac\n'
    (machines.folder / "shell").write_text(hanging + shell)
    hosts = machines.hosts("a", wanted=1)
    log.configure(0)
    began = time.monotonic()
    assert supervise(hosts, machines.program, Policy(sys.executable, "s", health_seconds=1.0)) == 1
    assert time.monotonic() - began < 60.0
    assert "node a: has not answered within 1 s" in capsys.readouterr().err
    assert bad_nodes(machines.launches.folder) == []


@pytest.mark.parametrize(
    ("number", "text"),
    [(signal.SIGUSR1, "goes on from step 0"), (signal.SIGTERM, "cancelled after step 0; the same")],
)
def test_a_signal_ends_a_node_check_that_hangs_and_no_rank_starts(
    number: signal.Signals, text: str, machines: Machines
) -> None:
    shell = SHELL.format(folder=machines.folder)
    begun = machines.folder / "begun"
    hanging = f'case "$*" in *node_health*) touch {begun}; exec sleep 600 ;; esac\n'
    (machines.folder / "shell").write_text(hanging + shell)

    def tell() -> None:
        deadline = time.monotonic() + 60.0
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    Timer(0.0, tell).start()
    began = time.monotonic()
    hosts = machines.hosts("a", wanted=1)
    assert supervise(hosts, machines.program, Policy(sys.executable, "s")) == 75
    assert time.monotonic() - began < 40.0
    (launch,) = machines.launches.all()
    outcome = machines.launches.outcome(launch)
    assert outcome is not None
    assert (outcome.status, outcome.reason) == (
        Status.UNFINISHED,
        "stopped before its ranks began",
    )
    assert outcome.next.startswith(text)


def test_ranks_meet_at_a_port_that_is_free_on_the_first_host_without_a_problem(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    used = (
        "import socket\nports = []\n"
        "class Used(socket.socket):\n"
        "    def bind(self, address):\n"
        "        ports.append(address[1])\n"
        "        if len(ports) <= 2: raise OSError(98, 'used')\n"
        "        super().bind(address)\n"
        "socket.socket = Used\n"
    )
    (machines.folder / "b").mkdir()
    (machines.folder / "b" / "sitecustomize.py").write_text(used)
    words = machines.folder / "words"
    told = f'case "$*" in *--endpoint*) echo "$*" >{words}; exit 1 ;; esac\n'
    (machines.folder / "shell").write_text(told + SHELL.format(folder=machines.folder))
    hosts = machines.hosts("a", "b", wanted=1)
    check = 'test "$DISTILL_NODE_NAME" != a'
    policy = Policy(sys.executable, hosts.job, wanted_nodes=1, health_command=check)
    log.configure(0)
    assert supervise(hosts, machines.program, policy) == 1
    (launch,) = machines.launches.all()
    assert launch.nodes == ["b"]
    assert len({*launch.ports}) == 20
    assert f"--endpoint 127.0.0.1:{launch.ports[3]} " in words.read_text()
    shown = [line for line in capsys.readouterr().err.splitlines() if ": node " in line]
    (healthy,) = [line for line in shown if "healthy" in line]
    assert " INFO " in healthy
    assert re.search(rf": node b: healthy: .*, port {launch.ports[3]} free$", healthy)
    (bad,) = [line for line in shown if line not in healthy]
    assert ": node a: " in bad


@pytest.mark.slow
def test_a_host_whose_connection_breaks_is_tried_again_and_a_bad_one_is_not(
    machines: Machines,
) -> None:
    machines.break_connections("b")
    hosts = machines.hosts("a", "b", "c", wanted=3)
    policy = Policy(sys.executable, hosts.job, health_seconds=120.0)
    assert supervise(hosts, machines.program, policy) == 1
    assert (hosts.again, hosts.names) == (True, ["a", "c", "b"])
    (launch,) = machines.launches.all()
    outcome = machines.launches.outcome(launch)
    assert outcome.reason == "1 node failed the checks: b"
    # It may have been slow: the next submission has it again.
    assert bad_nodes(machines.launches.folder) == []

    machines.break_connections()
    hosts.again = False
    check = 'test "$DISTILL_NODE_NAME" != b'
    policy = Policy(sys.executable, hosts.job, health_seconds=120.0, health_command=check)
    assert supervise(hosts, machines.program, policy) == 1
    assert not hosts.again
    assert [one.node for one in bad_nodes(machines.launches.folder)] == ["b"]
    outcome = machines.launches.outcome(machines.launches.all()[-1])
    assert outcome.next.startswith("no further launch: 2 of 3 hosts are left")


def test_hosts_that_see_other_files_packages_or_gpus_are_bad(machines: Machines) -> None:
    for name in ("a", "b", "c", "d"):
        (machines.folder / name).mkdir()
        text = "{}" if name == "b" else '{"text": "whole"}'
        (machines.folder / name / "corpus.jsonl").write_text(text)
    (machines.folder / "c" / "corpus.jsonl").unlink()
    torch = machines.folder / "d" / "torch-2.99.dist-info"
    torch.mkdir()
    (torch / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.99\n")
    (machines.folder / "e").symlink_to(machines.folder / "a")
    shutil.copytree(machines.folder / "a", machines.folder / "f")
    (machines.folder / "programs").mkdir()
    for place, listed in (("f", "echo 'GPU 0: H100'"), ("programs", ":")):  # whatever is here
        program = machines.folder / place / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{listed}\n")
        program.chmod(0o755)
    hosts = machines.hosts("a", "b", "c", "d", "e", "f", wanted=6)
    policy = Policy(sys.executable, hosts.job, health_seconds=120.0)
    assert supervise(hosts, machines.program, policy) == 1
    assert not hosts.again
    file = "sees under ~/corpus.jsonl"
    assert {one.node: one.reason for one in bad_nodes(machines.launches.folder)} == {
        "b": f"{file}: 1 file of 2 bytes, but a: 1 file of 17 bytes",
        "c": f"{file}: nothing, but a: 1 file of 17 bytes",
        "d": f"has torch: 2.99, but a: {metadata.version('torch')}",
        "f": "has GPUs: 1, but a: 0",
    }


@pytest.mark.slow
def test_a_job_over_ssh_waits_longer_each_time_and_ends_without_a_new_checkpoint(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    machines.break_connections("b")
    words = ["submit", "ssh", "x", "--command", str(machines.folder / "program.py")]
    words += ["--hosts", "a=127.0.0.1,b=127.0.0.2", "--shell", machines.shell]
    assert main([*words, "--max-starts", "3", "--pause", "0.13"]) == 1
    launches = machines.launches.all()
    assert [one.restart for one in launches] == [0, 1, 2]
    outcomes = [machines.launches.outcome(one) for one in launches]
    ends = [one.ended for one in outcomes if one is not None]
    assert len(ends) == 3
    assert launches[1].started - ends[0] >= 0.5
    assert launches[2].started - ends[1] >= 2.0
    error = capsys.readouterr().err
    assert error.count("node b: has written no answer: its own message is above") == 3
    assert "goes on from step 0 in 1 s" in error
    assert "goes on from step 0 in 2 s" in error
    assert "no further launch: 3 launches since step 0 brought no new checkpoint" in error


def test_a_signal_in_the_pause_ends_the_job(machines: Machines) -> None:
    machines.break_connections("a")
    hosts = machines.hosts("a", wanted=1, pause=900.0)

    def cancel() -> None:
        deadline = time.monotonic() + 120.0
        while not list(machines.launches.folder.glob("*/outcome.json")):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    Timer(0.0, cancel).start()
    assert supervise(hosts, machines.program, Policy(sys.executable, hosts.job)) == 1
    assert not hosts.again
    outcome = machines.launches.outcome(machines.launches.all()[0])
    assert outcome.next == "no further launch: cancelled; the same submission goes on from step 0"
