"""What a launch asks of the scheduler of its job."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Protocol

__all__ = ["Scheduler"]


class Scheduler(Protocol):
    """The scheduler's job: its nodes, a command on each of them, its end, its requeue."""

    @property
    def job(self) -> str:
        """The job's number or name."""
        ...

    @property
    def restart(self) -> int:
        """The number of launches of this job before this one."""
        ...

    @property
    def nodes(self) -> Sequence[str]:
        """The nodes of the job."""
        ...

    @property
    def end(self) -> float | None:
        """The end of the job's time, seconds since the epoch."""
        ...

    @property
    def waited(self) -> float | None:
        """The seconds in the queue before this launch; None: unknown, or there is none."""
        ...

    @property
    def node_options(self) -> Sequence[str]:
        """Further options of `launching.node` and `launching.checks.all_reduce`."""
        ...

    def on_nodes(self, nodes: Sequence[str], *, waits: int = 60) -> list[str]:
        """Return the start of a command that runs once on each node.

        waits: seconds for the last node after the first has ended, or at once after a failure; 0:
        no node ends another one.
        """
        ...

    def stop(self, step: subprocess.Popen[bytes]) -> None:
        """Tell the processes of such a command to stop."""
        ...

    def address(self, node: str) -> str:
        """Return the address of a node."""
        ...

    @property
    def ports(self) -> Sequence[int]:
        """Ports for the rendezvous, of which the first node takes the first free one."""
        ...

    def pause(self, starts: int) -> float:
        """Return the seconds before the next launch.

        starts: launches since the newest checkpoint.
        """
        ...

    def requeue(self, *, without: Sequence[str], silent: Sequence[str]) -> str | None:
        """Let the job start again; return the reason why it cannot.

        without: bad nodes. silent: nodes that gave no answer, some of them or others.
        """
        ...

    def exclude_later(self, nodes: Sequence[str]) -> None:
        """Let jobs of the same submission that wait start on other nodes than these."""
        ...

    def is_running(self, job: str) -> bool:
        """Return whether another job holds nodes now."""
        ...
