"""Run a job on machines without a scheduler, from here, over ssh."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Mapping
from typing import Final

from megatron_distill import log
from megatron_distill.commands.command import Command
from megatron_distill.commands.submitted_layout import (
    add_command,
    add_variables,
    check_submission,
    empty_health,
    variables_of,
    wrong_variable,
    wrong_words,
)
from megatron_distill.errors import ConfigError, counted
from megatron_distill.launching.batch_script import python_path
from megatron_distill.launching.grace import USUAL_SECONDS, grace_seconds
from megatron_distill.launching.option_numbers import number, whole_number
from megatron_distill.launching.policy import (
    AllReduceCheck,
    Policy,
    add_all_reduce_check,
    add_health_check,
)
from megatron_distill.launching.ports import PORTS
from megatron_distill.launching.program import NoAnswerError, Program
from megatron_distill.launching.records import EXIT_STATUS, Status
from megatron_distill.launching.ssh import FIRST_PAUSE, SSH, Hosts, command_on, ranks_on
from megatron_distill.launching.supervisor import supervise
from megatron_distill.log import get_logger

_LOGGER = get_logger(__name__)
_DESCRIPTION = """Run a job on machines without a scheduler, and start it again after a failure.

    megatron-distill submit ssh llama31_8b_to_1b.yaml output=runs/a --hosts a,b
    megatron-distill submit ssh tiny.yaml --hosts a=10.0.0.1,b=10.0.0.2 --ranks-per-node 4
    megatron-distill submit ssh cache.yaml --command capture --hosts a,b --dry-run

ssh must log in without a password, and all machines must have this folder and this Python under the
same paths. The command stays here; Ctrl-C lets the ranks save and leave. Its exit status is 0
(done), 75 (saved, and more to do), 78 (an error in the settings) or 1 (a failure)."""

_CHECKED: Final[dict[AllReduceCheck, str]] = {
    "gpus": "between hosts with GPUs, before the ranks",
    "always": "between all hosts, before the ranks",
    "never": "none",
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hosts",
        required=True,
        metavar="A,B",
        help="[USER@]NAME or [USER@]NAME=ADDRESS of each machine",
    )
    parser.add_argument(
        "--ranks-per-node", type=whole_number("8"), metavar="N", help="default: one per GPU"
    )
    parser.add_argument(
        "--max-starts", type=whole_number("3"), metavar="N",
        help=f"launches without a new checkpoint before the end (default: {Policy.max_starts})",
    )  # fmt: skip
    parser.add_argument(
        "--pause", type=number("15"), metavar="SECONDS",
        help="wait before the next launch; four times as long after each without a new checkpoint, "
        f"at most 15 minutes (default: {FIRST_PAUSE:g})",
    )  # fmt: skip
    parser.add_argument("--no-requeue", action="store_true", help="launch once")
    parser.add_argument(
        "--spare-hosts",
        type=whole_number("1"),
        default=0,
        metavar="N",
        help="hosts kept to replace bad ones: the last of --hosts",
    )
    add_health_check(parser, "host")
    add_all_reduce_check(parser)
    add_variables(parser)
    parser.add_argument(
        "--shell", default=SSH, help="command that runs a line on {host} (default: %(default)s)"
    )
    add_command(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="show rules and remote commands, stop"
    )


def _objection(given: argparse.Namespace) -> str | None:
    names = [host.partition("=")[0] for host in given.hosts.split(",")]
    wrong = _hosts_objection(given.hosts) or _shell_objection(given.shell)
    if wrong is not None:
        return wrong
    if not 0 <= given.spare_hosts < len(names):
        return f"--spare-hosts {given.spare_hosts}: must be from 0 to {len(names) - 1}"
    for name in ("max_starts", "ranks_per_node"):
        count = getattr(given, name)
        if count is not None and count < 1:
            return f"--{name.replace('_', '-')} {count}: must be 1 or more"
    if given.pause is not None and not 0 <= given.pause < math.inf:
        return f"--pause {given.pause:g}: must be a finite number of seconds, 0 or more"
    if not 0 < given.health_seconds < math.inf:
        seconds = f"{given.health_seconds:g}"
        return f"--health-seconds {seconds}: must be a finite number of seconds above 0"
    return wrong_variable(given) or empty_health(given) or wrong_words(given)


def _hosts_objection(text: str) -> str | None:
    pairs = [host.partition("=") for host in text.split(",")]
    for name, equals, address in pairs:
        host = f"{name}{equals}{address}"
        if any(map(str.isspace, host)):
            return (
                f"--hosts {text!r}: {host!r} has a space; write only commas between hosts, as a,b"
            )
        if equals and not address:
            return f"--hosts {text}: {host} has no address after =; write NAME=ADDRESS, or {name}"
    names = [name for name, _, _ in pairs]
    if not all(name.rpartition("@")[2] for name in names) or len(set(names)) < len(names):
        return f"--hosts {text}: write different names with commas between them"
    return None


def _shell_objection(shell: str) -> str | None:
    """Return the objection to a remote shell that would not know its host."""
    try:
        words = shlex.split(shell)
    except ValueError as error:
        return f"--shell {shell!r}: cannot be read ({error}); close the quotation"
    if any("{host}" in word for word in words[1:]):
        return None
    return f"--shell {shell!r}: has no {{host}} after a program; write it as in 'rsh {{host}}'"


def _warn(given: argparse.Namespace) -> None:
    """Warn of options without effect."""
    options = {"--max-starts": given.max_starts, "--pause": given.pause}
    unused = [f"{name} {value:g}" for name, value in options.items() if value is not None]
    if given.no_requeue and unused:
        has = "has" if len(unused) == 1 else "have"
        _LOGGER.warning(
            "%s: %s no effect with --no-requeue, which launches once; leave one of them out",
            " and ".join(unused), has,
        )  # fmt: skip


def _run(given: argparse.Namespace) -> int:
    log.configure(0, name="job")
    _warn(given)
    program = Program(given.command, tuple(given.words), given.folder)
    hosts = _hosts(given)
    policy = Policy(
        python=sys.executable,
        submission=hosts.job,
        ranks_per_node=given.ranks_per_node,
        wanted_nodes=hosts.wanted,
        max_starts=Policy.max_starts if given.max_starts is None else given.max_starts,
        requeues=not given.no_requeue,
        health_command=given.health_command,
        health_seconds=given.health_seconds,
        all_reduce_check=given.all_reduce_check or Policy.all_reduce_check,
    )
    try:
        _check(hosts, program, given)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_STATUS[Status.MISCONFIGURED]
    if given.dry_run:
        sys.stdout.write(_shown(hosts, program, policy))
        return EXIT_STATUS[Status.DONE]
    while True:
        hosts.again = False
        status = supervise(hosts, program, policy)
        if not hosts.again:
            return status


def _shown(hosts: Hosts, program: Program, policy: Policy) -> str:
    """Return what will run: the rules of the job, and the command of each host with ranks."""
    launches = program.launches([sys.executable])
    ranked, spare = hosts.names[: hosts.wanted], hosts.names[hosts.wanted :]
    address, count = hosts.address(ranked[0]), policy.ranks_per_node
    starts = counted(policy.max_starts, "launch", plural="launches")
    health = policy.health_command
    rules = {
        "hosts": ", ".join(ranked) + (f"; spare: {', '.join(spare)}" if spare else ""),
        "ranks per host": "one per GPU, else 1, counted there" if count is None else str(count),
        "rendezvous": f"{address}, at a PORT from {PORTS[0]} to {PORTS[-1]}, new in each launch",
        "max starts": f"{starts} without a new checkpoint" if policy.requeues else "1 launch",
        "health command": "none" if health is None else f"{health}, on each host before the ranks",
        "all-reduce check": _CHECKED[policy.all_reduce_check],
        "records and logs": f"{launches.folder}, a folder LAUNCH for each launch",
    }
    words = program.on_node(
        launches.folder.resolve() / "LAUNCH",
        endpoint=f"{address}:PORT",
        stop_seconds=max(USUAL_SECONDS, grace_seconds(launches.measured) or 0.0),
        options=hosts.node_options,
        ranks_per_node=count,
    )
    variables = [f"{name}={value}" for name, value in hosts.environment.items()]
    lines = [f"# {name}: {text}" for name, text in rules.items()]
    for index, host in enumerate(ranked):
        command = command_on(host, index, variables, [policy.python, *words], shell=hosts.shell)
        lines.append(shlex.join(command))
    return "".join(f"{line}\n" for line in lines)


def _hosts(given: argparse.Namespace) -> Hosts:
    """Return the machines; the name of a user in front of one is for the remote shell alone."""
    pairs = [host.partition("=") for host in given.hosts.split(",")]
    return Hosts(
        names=[name for name, _, _ in pairs],
        wanted=len(pairs) - given.spare_hosts,
        addresses={name: (address or name).rpartition("@")[2] for name, _, address in pairs},
        shell=given.shell,
        environment=_environment(variables_of(given)),
        first_pause=FIRST_PAUSE if given.pause is None else given.pause,
    )


def _check(hosts: Hosts, program: Program, given: argparse.Namespace) -> None:
    """Compare the layout with the ranks, as the first host with an answer sees models and GPUs.

    Silent hosts before it become the last ones: no launch begins there, and the checks of the nodes
    ask them again. Raises ConfigError where more are silent than are spare.
    """
    if given.dry_run:
        run = [sys.executable]
        ranks = given.ranks_per_node
        check_submission(program, nodes=hosts.wanted, ranks=ranks, run=run, device=given.device)
        return
    silent: dict[str, str] = {}
    for host in hosts.names:
        run = [*hosts.on_nodes([host]), sys.executable]
        try:
            ranks = ranks_on(run, given=given.ranks_per_node)
            count, device = hosts.wanted, given.device
            check_submission(program, nodes=count, ranks=ranks, run=run, device=device)
            break
        except NoAnswerError as error:
            silent[host] = error.last_line
        if len(hosts.names) - len(silent) < hosts.wanted:
            answers = ", ".join(f"{name} ({answer})" for name, answer in silent.items())
            raise ConfigError(
                f"--hosts {given.hosts}: no answer from {answers}. A host needs a login without a "
                "password, and this folder and this Python under the same paths. Repair it, leave "
                "it out, or name another host and --spare-hosts"
            )
    for host, answer in silent.items():
        _LOGGER.warning("host %s gives no answer (%s): a spare one takes its place", host, answer)
    hosts.names = sorted(hosts.names, key=lambda name: name in silent)


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the ranks: those given, and where to import the package from."""
    path = python_path()
    own = {} if path is None else {"PYTHONPATH": path}
    return own | {**given}


COMMAND = Command(
    description=_DESCRIPTION,
    add_arguments=_add_arguments,
    run=_run,
    check=_objection,
    passes_on=True,
)
