"""Ends of a launch on its hosts, and which hosts the next launch has."""

from __future__ import annotations

import argparse
import io
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from megatron_distill import log
from megatron_distill.cli import main
from megatron_distill.commands.submit_ssh import COMMAND, _hosts
from megatron_distill.launching.node import NodePart
from megatron_distill.launching.outcomes import _end_of, classified, report
from megatron_distill.launching.ranks import _in_order, _run
from megatron_distill.launching.records import (
    LOST_PEER,
    LOST_RENDEZVOUS,
    LaunchRecord,
    NodeOutcome,
    Status,
)
from megatron_distill.launching.ssh import SSH, Hosts, _wait
from tests.guards.source_tree import ROOT

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
    found, text = classified(nodes, silent, 1, was_told=told)
    assert found is status
    assert text.startswith(reason)


def test_a_node_without_a_report_is_the_reason_of_ranks_that_lost_a_peer() -> None:
    lost, own = (node(0, FAILED, order=order, rank=0) for order in (LOST_PEER, 0))
    assert classified([lost], ["n1"], 1, was_told=False)[1] == "no report from n1 (status 1)"
    assert classified([own], ["n1"], 1, was_told=False)[1] == "of n0"
    assert classified([lost], [], 1, was_told=False)[1] == "of n0"


def test_ranks_that_outlive_the_first_node_end_as_it_did() -> None:
    late = node(1, FAILED, order=LOST_RENDEZVOUS)
    for status in (UNFINISHED, DONE, FAILED):
        first = node(0, status, rank=0 if status is FAILED else None)
        assert classified([first, late], [], 0, was_told=status is UNFINISHED)[0] is status
    assert classified([late], ["n0"], 1, was_told=False)[0] is FAILED


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
    report(nodes, tmp_path, shows_traceback=True)
    log.configure(0)
    text = stream.getvalue()
    assert text.count("rank 9 on n2 failed first, at ") == 1
    assert "a warning" not in text
    assert text.index(trace) < text.index("outcomes: of n2\n")


def test_the_end_of_a_log_is_its_last_traceback_or_its_last_lines() -> None:
    trace = "Traceback (most recent call last):\n  here\nValueError: {}"
    log = f"start\n{trace.format(1)}\nbetween\n{trace.format(2)}\nafter"
    assert _end_of(log) == f"{trace.format(2)}\nafter"
    assert _end_of("\n".join(map(str, range(40)))) == "\n".join(map(str, range(25, 40)))
    assert _end_of("") == ""


def test_ranks_meet_by_an_id_of_their_launch(tmp_path: Path) -> None:
    found = []
    for job, restart in (("7", 0), ("7", 1), ("8", 0)):
        launch = LaunchRecord(job, restart, job, [], ["n1"], ["127.0.0.1"], 0, 1.0)
        words = NodePart(tmp_path, launch, 0, "127.0.0.1:1", ["x.py"])._command(1)
        found += [word for word in words if word.startswith("--rdzv-id=")]
    assert found == ["--rdzv-id=7-0", "--rdzv-id=7-1", "--rdzv-id=8-0"]


def test_nodes_have_ranks_in_the_order_of_the_launch() -> None:
    """By name n10 would be the first; two nodes of one address are in any order."""
    addresses = ["n9", "n10", "10.0.0.9", "10.0.0.10", "n9"]
    nodes = [_NodeDesc(address, pid, 0) for pid, address in enumerate(addresses)]
    found = [node.addr for node in _in_order(addresses[:4], reversed(nodes))]
    assert found == ["n9", "n9", "n10", "10.0.0.9", "10.0.0.10"]


def test_a_taken_port_of_the_rendezvous_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
                 "--rdzv-conf=is_host=1", "--local-addr=127.0.0.1", "-m", "json.tool"]  # fmt: skip
        status, _, _, _, message = _run(tmp_path, ["127.0.0.1"], words)
    assert status is FAILED
    assert message.startswith("error: the nodes did not meet: The server socket has failed")
    assert f"port: {port}" in message


TINY = str(ROOT / "configs" / "tiny.yaml")


def test_another_launch_is_on_the_hosts_that_are_left_if_they_are_enough() -> None:
    names = ["a", "b", "c"]
    hosts = Hosts(names, 2, {name: f"10.0.0.{name}" for name in names}, SSH, {})
    assert hosts.requeue(without=["b"], silent=[]) is None
    assert (hosts.nodes, hosts.restart, hosts.again) == (["a", "c"], 1, True)
    hosts.again = False
    assert hosts.requeue(without=["c"], silent=[]) == "1 of 2 hosts are left: name more in --hosts"
    assert (hosts.nodes, hosts.restart, hosts.again) == (["a", "c"], 1, False)
    assert hosts.address("c") == "10.0.0.c"


def test_a_user_s_name_is_for_the_shell_and_no_part_of_an_address() -> None:
    words = [TINY, "--hosts", "ubuntu@10.0.0.1,ubuntu@node2=10.0.0.2,node3"]
    hosts = _hosts(COMMAND.parse(argparse.ArgumentParser(), words))
    assert hosts.names == ["ubuntu@10.0.0.1", "ubuntu@node2", "node3"]
    assert [hosts.address(name) for name in hosts.names] == ["10.0.0.1", "10.0.0.2", "node3"]
    endpoint = f"{hosts.address(hosts.names[0])}:{hosts.ports[0]}"
    assert parse_rendezvous_endpoint(endpoint, 29400)[0] == "10.0.0.1"


def test_a_silent_host_stays_and_no_launch_begins_on_it() -> None:
    hosts = Hosts(["a", "b", "c"], 2, {}, SSH, {})
    assert hosts.requeue(without=["a", "b"], silent=["a"]) is None
    assert hosts.names == ["c", "a"]
    assert hosts.requeue(without=[], silent=["c"]) is None
    assert hosts.names == ["a", "c"]


def test_the_pause_grows_with_launches_without_a_new_checkpoint() -> None:
    hosts = Hosts(["a"], 1, {}, SSH, {})
    assert [hosts.pause(starts) for starts in range(5)] == [15.0, 60.0, 240.0, 900.0, 900.0]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--hosts", "a,a"], "--hosts a,a: write different names"),
        (["--hosts", "a,"], "--hosts a,: write different names"),
        (["--hosts", "a,b", "--spare-hosts", "2"], "--spare-hosts 2: must be from 0 to 1"),
        (["--hosts", "a,b", "--variable", "X"], "--variable X: write NAME=VALUE"),
        (["--hosts", "a,b", "--variable", "=1"], "--variable =1: write NAME=VALUE, as NCCL_SOCKET"),
        (["--hosts", "a,b", "--max-starts", "0"], "--max-starts 0: must be 1 or more"),
        (["--hosts", "a,b", "--health-seconds", "0"], "--health-seconds 0: must be a finite"),
        (
            ["--hosts", "a,b", "--pause", "-1"],
            "--pause -1: must be a finite number of seconds, 0 or more",
        ),
    ],
)
def test_wrong_words_are_named(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["submit", "ssh", TINY, *words])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(("waits", "second"), [(0, 0), (60, -15)])
def test_a_host_that_fails_ends_the_ranks_of_another_one_but_not_its_checks(
    waits: int, second: int
) -> None:
    seconds = 600 if waits else 2
    programs = ("raise SystemExit(255)", f"import time; time.sleep({seconds})")
    clients = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    assert _wait(clients, waits=waits) == 255
    assert [client.returncode for client in clients] == [255, second]
