"""The choice of hosts that `submit ssh` asks before a launch, and the errors of silent ones."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from megatron_distill.cli import main
from megatron_distill.commands import submit_ssh
from megatron_distill.launching.policy import Policy
from megatron_distill.launching.program import Program
from megatron_distill.launching.ssh import Hosts
from tests.guards.source_tree import ROOT

# A host whose name begins with `dead` has no connection, as ssh shows it.
SHELL = """\
host=$1; shift
case $host in dead*) echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; esac
exec "$@"
"""
NO_ROUTE = "ssh: connect to host {} port 22: No route to host"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The hosts of each launch, none of which starts a rank."""
    found: list[list[str]] = []

    def supervise(job: Hosts, program: Program, policy: Policy) -> int:
        del program, policy
        found.append(list(job.nodes))
        return 0

    monkeypatch.setattr(submit_ssh, "supervise", supervise)
    return found


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A submission of a script, whose layout nothing checks before its ranks."""
    (tmp_path / "shell").write_text(SHELL)
    (tmp_path / "program.py").write_text(f"print({f'output: {tmp_path}/run'!r})\n")
    program = ["x", "--command", str(tmp_path / "program.py"), "--ranks-per-node", "1"]
    return ["submit", "ssh", *program, "--shell", f"sh {tmp_path / 'shell'} {{host}}"]


@pytest.mark.parametrize(
    ("hosts", "spare", "order", "silent"),
    [
        ("dead,live", 1, ["live", "dead"], ["dead"]),
        ("dead,a,b", 1, ["a", "b", "dead"], ["dead"]),
        ("dead1,dead2,a", 2, ["a", "dead1", "dead2"], ["dead1", "dead2"]),
        ("a,dead", 1, ["a", "dead"], []),  # the checks of the nodes find it
    ],
)
def test_a_launch_begins_on_a_host_with_an_answer_where_there_are_spare_ones(
    words: list[str], begun: list[list[str]], capsys: pytest.CaptureFixture[str],
    hosts: str, spare: int, order: list[str], silent: list[str],
) -> None:  # fmt: skip
    assert main([*words, "--hosts", hosts, "--spare-hosts", str(spare)]) == 0
    assert begun == [order]
    text = capsys.readouterr().err
    assert text.count("gives no answer") == len(silent)
    for host in silent:
        assert f"host {host} gives no answer ({NO_ROUTE.format(host)})" in text


@pytest.mark.parametrize(
    ("hosts", "spare", "silent"),
    [("dead,live", 0, ["dead"]), ("dead1,dead2,live", 1, ["dead1", "dead2"])],
)
def test_too_few_hosts_are_one_message_that_names_the_silent_ones(
    words: list[str], begun: list[list[str]], capsys: pytest.CaptureFixture[str],
    hosts: str, spare: int, silent: list[str],
) -> None:  # fmt: skip
    assert main([*words, "--hosts", hosts, "--spare-hosts", str(spare)]) == 78
    assert begun == []
    text = capsys.readouterr().err
    answers = ", ".join(f"{host} ({NO_ROUTE.format(host)})" for host in silent)
    assert text == (
        f"error: --hosts {hosts}: no answer from {answers}. A host needs a login without a "
        "password, and this folder and this Python under the same paths. Repair it, leave it out, "
        "or name another host and --spare-hosts\n"
    )


def test_a_training_is_checked_on_the_first_host_with_an_answer(
    words: list[str], begun: list[list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    train = [str(ROOT / "configs" / "tiny.yaml"), f"output={tmp_path}/run", "parallel.tensor=4"]
    shell = words[words.index("--shell") :]
    hosts = ["--hosts", "dead,a,b", "--spare-hosts", "1", "--ranks-per-node"]
    assert main(["submit", "ssh", *train, *shell, *hosts, "1"]) == 78
    assert "error: this configuration on 2 processes: 1 problem" in capsys.readouterr().err
    assert main(["submit", "ssh", *train, *shell, *hosts, "2"]) == 0
    assert begun == [["a", "b", "dead"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hosts", "a b"), "--hosts 'a b': 'a b' has a space; write only commas between hosts"),
        (("--hosts", "a, b"), "--hosts 'a, b': ' b' has a space; write only commas between hosts"),
        (("--hosts", "b,a="), "--hosts b,a=: a= has no address after =; write NAME=ADDRESS, or a"),
        (("--hosts", "me@,b"), "--hosts me@,b: write different names with commas between them"),
        (("--hosts", "a,a"), "--hosts a,a: write different names with commas between them"),
        (("--hosts", "a", "--shell", "rsh a"), "--shell 'rsh a': has no {host} after a program"),
        (("--hosts", "a", "--shell", "{host}"), "--shell '{host}': has no {host} after a program"),
        (("--hosts", "a", "--shell", ""), "--shell '': has no {host} after a program; write it as"),
        (("--hosts", "a", "--shell", "sh '{host}"), "cannot be read (No closing quotation); close"),
        (("--hosts", "a", "--health-command", ""), "--health-command '': is empty; give a shell"),
    ],
)
def test_an_option_that_no_host_could_follow_is_refused(
    words: list[str], begun: list[list[str]], capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main([*words, *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert begun == []


def test_a_dry_run_shows_the_rules_and_the_command_of_each_host(
    words: list[str], begun: list[list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hosts = ["--hosts", "me@a=10.0.0.1,b,c", "--spare-hosts", "1", "--variable", "X=1 2"]
    rules = ["--ranks-per-node", "4", "--max-starts", "5", "--health-command", "nvidia-smi -L"]
    shell = words.index("--shell")
    assert main([*words[:shell], *hosts, *rules, "--dry-run"]) == 0
    *told, first, second = capsys.readouterr().out.splitlines()
    assert told == [
        "# hosts: me@a, b; spare: c",
        "# ranks per host: 4",
        "# rendezvous: 10.0.0.1, at a PORT from 10000 to 29999, new in each launch",
        "# max starts: 5 launches without a new checkpoint",
        "# health command: nvidia-smi -L, on each host before the ranks",
        "# all-reduce check: between hosts with GPUs, before the ranks",
        f"# records and logs: {tmp_path}/run/launches, a folder LAUNCH for each launch",
    ]
    for place, (host, line) in enumerate((("me@a", first), ("b", second))):
        *client, name, remote = shlex.split(line)
        assert (client[0], name) == ("ssh", host)
        _, _, command = remote.partition(" && exec env ")
        variables = ["X=1 2", f"DISTILL_NODE_INDEX={place}", f"DISTILL_NODE_NAME={host}"]
        found = shlex.split(command)
        at = found.index(sys.executable)
        assert found[:at][-3:] == variables
        assert found[at + 1 :] == [
            "-m", "megatron_distill.launching.node",
            "--launch", f"{tmp_path}/run/launches/LAUNCH", "--endpoint", "10.0.0.1:PORT",
            "--stop-seconds", "300.0", "--stops-with-input", "--ranks-per-node", "4",
            "--", str(tmp_path / "program.py"), "x",
        ]  # fmt: skip
    assert begun == []
    alone = ["--hosts", "a", "--no-requeue", "--dry-run"]
    assert main([*words[: words.index("--ranks-per-node")], *alone]) == 0
    text = capsys.readouterr().out
    assert "# ranks per host: one per GPU, else 1, counted there\n" in text
    assert "# max starts: 1 launch\n" in text
    assert "# health command: none\n" in text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-starts", "3"], "--max-starts 3: has no effect"),
        (["--pause", "2.5"], "--pause 2.5: has no effect"),
        (["--pause", "0", "--max-starts", "5"], "--max-starts 5 and --pause 0: have no effect"),
        ([], None),
    ],
)
def test_rules_of_further_launches_are_a_warning_where_there_is_one_launch(
    words: list[str], begun: list[list[str]], capsys: pytest.CaptureFixture[str],
    options: list[str], named: str | None,
) -> None:  # fmt: skip
    assert main([*words, "--hosts", "a", "--no-requeue", *options]) == 0
    text = capsys.readouterr().err
    assert ("no effect with --no-requeue, which launches once; " in text) is (named is not None)
    assert named is None or named in text
    assert main([*words, "--hosts", "a", *options]) == 0
    assert "no effect" not in capsys.readouterr().err
    assert len(begun) == 2


def test_a_dry_run_without_rules_shows_the_usual_ones(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--hosts", "a", "--dry-run"]) == 0
    assert "# max starts: 3 launches without a new checkpoint\n" in capsys.readouterr().out
