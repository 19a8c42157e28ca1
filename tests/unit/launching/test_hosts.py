"""The words of `submit ssh`, and hosts that are left after a failure."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from megatron_distill.cli import main
from megatron_distill.commands.submit_ssh import COMMAND, _hosts
from megatron_distill.launching.ssh import SSH, Hosts, _wait
from tests.guards.source_tree import ROOT

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
    endpoint = hosts.endpoint(hosts.address(hosts.names[0]))
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
        (["--hosts", "a,b", "--max-starts", "0"], "--max-starts 0: must be 1 or more"),
        (["--hosts", "a,b", "--health-seconds", "0"], "--health-seconds 0: must be a finite"),
        (["--hosts", "a,b", "--pause", "-1"], "--pause -1: must be 0 or more"),
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
    programs = ("raise SystemExit(255)", "import time; time.sleep(2)")
    clients = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    assert _wait(clients, waits=waits) == 255
    assert [client.returncode for client in clients] == [255, second]
