"""The words of `submit ssh`, and hosts that are left after a failure."""

from __future__ import annotations

import pytest

from megatron_distill.cli import main
from megatron_distill.launching.ssh import SSH, Hosts
from tests.guards.source_tree import ROOT

TINY = str(ROOT / "configs" / "tiny.yaml")


def test_another_launch_is_on_the_hosts_that_are_left_if_they_are_enough() -> None:
    names = ["a", "b", "c"]
    hosts = Hosts(names, 2, {name: f"10.0.0.{name}" for name in names}, SSH, {})
    assert hosts.requeue(without=["b"]) is None
    assert (hosts.nodes, hosts.restart, hosts.again) == (["a", "c"], 1, True)
    hosts.again = False
    assert hosts.requeue(without=["c"]) == "1 of 2 hosts are left: name more in --hosts"
    assert (hosts.nodes, hosts.restart, hosts.again) == (["a", "c"], 1, False)
    assert hosts.address("c") == "10.0.0.c"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--hosts", "a,a"], "--hosts a,a: write different names"),
        (["--hosts", "a,"], "--hosts a,: write different names"),
        (["--hosts", "a,b", "--spare-hosts", "2"], "--spare-hosts 2: must be from 0 to 1"),
        (["--hosts", "a,b", "--variable", "X"], "--variable X: write NAME=VALUE"),
    ],
)
def test_wrong_words_are_named(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["submit", "ssh", TINY, *words])
    assert text in capsys.readouterr().err
