"""Machines without a scheduler: one remote shell for each, and a launch after a failure."""

from __future__ import annotations

import argparse
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

from megatron_distill.launching.ports import PORTS, TRIED_PORTS
from megatron_distill.launching.program import NoAnswerError

__all__ = ["FIRST_PAUSE", "SSH", "Hosts", "command_on", "main", "ranks_on"]

SSH: Final = "ssh -o BatchMode=yes -o ServerAliveInterval=15 -o ConnectTimeout=20 {host}"
FIRST_PAUSE: Final = 15.0
_LONGEST_PAUSE: Final = 900.0
_POLL_SECONDS: Final = 0.2
_COUNT: Final = (
    "from megatron_distill.launching import node; print(node.ranks_here(announce=False))"
)
_ANSWER: Final = "import megatron_distill.launching.node; print({})"
_ERROR_CLASS: Final = re.compile(r"^[\w.]+Error: ")  # before the text, at the end of a traceback
_COUNT_SECONDS: Final = 120.0  # an import from a slow shared disk


@dataclass
class Hosts:
    """A job on some machines; its "requeue" lets `submit ssh` start the next launch.

    Attributes:
        names: of the machines. wanted: how many of them a launch needs.
        addresses: that they reach each other by.
        shell: a command that runs a line of a shell on {host}.
        environment: variables of the ranks.
        waited: seconds in a queue; there is none.
        first_pause: seconds before a launch that follows a new checkpoint, see `pause`.
        again: whether the launch asked for another one.
    """

    names: list[str]
    wanted: int
    addresses: dict[str, str]
    shell: str
    environment: dict[str, str]
    job: str = field(default_factory=lambda: time.strftime("%Y%m%d-%H%M%S"))
    restart: int = 0
    end: float | None = None
    waited: float | None = None
    node_options: tuple[str, ...] = ("--stops-with-input",)
    first_pause: float = FIRST_PAUSE
    again: bool = False

    @property
    def nodes(self) -> Sequence[str]:
        """The machines."""
        return self.names

    def on_nodes(self, nodes: Sequence[str], *, waits: int = 60) -> list[str]:
        """Return the start of a command that runs once on each machine."""
        words = [sys.executable, "-m", "megatron_distill.launching.ssh"]
        words += ["--shell", self.shell, "--hosts", ",".join(nodes), "--waits", str(waits)]
        variables = [f"--variable={name}={value}" for name, value in self.environment.items()]
        return [*words, *variables, "--"]

    def stop(self, step: subprocess.Popen[bytes]) -> None:
        """Tell the processes of a command of `on_nodes` to stop."""
        step.send_signal(signal.SIGUSR1)

    def address(self, node: str) -> str:
        """Return the address of a machine."""
        return self.addresses[node]

    @property
    def ports(self) -> Sequence[int]:
        """New ports for each launch."""
        return random.SystemRandom().sample(PORTS, TRIED_PORTS)

    def pause(self, starts: int) -> float:
        """Return the seconds before the next launch, four times as long after each useless one."""
        return min(self.first_pause * 4.0**starts, _LONGEST_PAUSE)

    def requeue(self, *, without: Sequence[str], silent: Sequence[str]) -> str | None:
        """Ask for another launch, on other machines than `without`.

        A silent one may be back after a restart, or when the connection is: it is tried again, but
        a launch begins on another one.
        """
        left = [name for name in self.names if name not in without or name in silent]
        if len(left) < self.wanted:
            return f"{len(left)} of {self.wanted} hosts are left: name more in --hosts"
        self.again, self.names = True, sorted(left, key=lambda name: name in silent)
        self.restart += 1
        return None

    def exclude_later(self, nodes: Sequence[str]) -> None:
        """Do nothing: no other job waits."""
        del nodes

    def is_running(self, job: str) -> bool:
        """Return whether another job runs; the lock of the folder answers that here."""
        del job
        return False


def ranks_on(run: Sequence[str], *, given: int | None = None) -> int:
    """Return the ranks of a host: those given, else one per GPU, else 1.

    run: starts Python there, which is asked in any case. Raises NoAnswerError: it does not.
    """
    command = [*run, "-c", _COUNT if given is None else _ANSWER.format(given)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COUNT_SECONDS, check=True
        )
        return int(done.stdout.splitlines()[-1])  # a login shell may have written something
    except subprocess.TimeoutExpired:
        raise NoAnswerError(command, f"has not ended within {_COUNT_SECONDS:.0f} s") from None
    except (subprocess.CalledProcessError, ValueError, IndexError) as error:
        reason = str(getattr(error, "stderr", None) or "").strip() or str(error)
        if isinstance(error, subprocess.CalledProcessError) and not error.stderr.strip():
            reason = f"ended with status {error.returncode} and no message"
        reason = _ERROR_CLASS.sub("", reason.splitlines()[-1])
        raise NoAnswerError(command, reason) from None


def command_on(
    host: str, index: int, variables: Sequence[str], words: Sequence[str], *, shell: str
) -> list[str]:
    """Return the command that runs words on a host, in the folder of this process.

    index: its place among the hosts. variables: of the environment, as NAME=VALUE.
    """
    own = [*variables, f"DISTILL_NODE_INDEX={index}", f"DISTILL_NODE_NAME={host}"]
    line = f"cd {shlex.quote(str(Path.cwd()))} && exec env {shlex.join([*own, *words])}"
    client = [part.replace("{host}", host) for part in shlex.split(shell)]
    return [*client, *_as_line(client, line)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command on all machines; return the first status that is not 0, or 0."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shell", required=True)
    parser.add_argument("--hosts", required=True)
    parser.add_argument("--waits", type=int, required=True)
    parser.add_argument("--variable", action="append", default=[])
    parser.add_argument("words", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    words = given.words[1:] if given.words[:1] == ["--"] else given.words
    clients: list[subprocess.Popen[bytes]] = []

    def tell(number: int, _: FrameType | None) -> None:
        """Close the input of the remote processes, which take that for a request to stop."""
        for client in clients:
            if client.stdin is not None:
                client.stdin.close()
            if number != signal.SIGUSR1:
                client.terminate()

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, tell)
    for index, host in enumerate(given.hosts.split(",")):
        command = command_on(host, index, [*given.variable], words, shell=given.shell)
        clients.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
    return _wait(clients, waits=given.waits)


def _as_line(shell: Sequence[str], line: str) -> list[str]:
    """Return a line of a shell as arguments; ssh itself gives it to the remote shell."""
    return [line] if Path(shell[0]).name == "ssh" else ["sh", "-c", line]


def _wait(clients: Sequence[subprocess.Popen[bytes]], *, waits: int) -> int:
    """Wait for all clients, some time after the first has ended; kill those that are left.

    waits: these seconds; 0: no client ends another one, not even by a failure.
    """
    first_end: float | None = None
    while any(client.poll() is None for client in clients):
        ended = [client for client in clients if client.poll() is not None]
        if ended and first_end is None:
            first_end = time.monotonic()
        is_late = first_end is not None and time.monotonic() > first_end + waits
        if waits and (is_late or any(client.returncode for client in ended)):
            _end(clients)
            break
        time.sleep(_POLL_SECONDS)
    return next((client.returncode for client in clients if client.returncode), 0)


def _end(clients: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the clients, whose remote processes then stop by themselves."""
    for client in clients:
        client.terminate()
        try:
            client.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            client.kill()
            client.wait()


if __name__ == "__main__":
    sys.exit(main())
