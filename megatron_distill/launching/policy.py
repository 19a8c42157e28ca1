"""The rules of a job, which `megatron-distill submit` takes as options."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Final, Literal, get_args

from megatron_distill.launching.option_numbers import number

__all__ = [
    "HEALTH_SECONDS",
    "AllReduceCheck",
    "Policy",
    "add_all_reduce_check",
    "add_health_check",
]

HEALTH_SECONDS: Final = 50.0  # a minute with what begins and ends the step
AllReduceCheck = Literal["gpus", "always", "never"]


@dataclass(frozen=True)
class Policy:
    """The rules of a job.

    Attributes:
        python: the interpreter on the nodes.
        submission: launches of the same one are counted together.
        ranks_per_node: None: one per GPU, else 1.
        wanted_nodes: for ranks; further ones of the job are spare. None: all.
        max_starts: launches without a new checkpoint before the job ends.
        requeues: whether a job that may go on asks for that itself.
        health_command: of a shell; a node where it fails is bad.
        health_seconds: for each node's own checks, and again for sums of all nodes.
        all_reduce_check: on which nodes ranks sum before those of a run: with GPUs, all, or none.
        grace_seconds: for a save before the end of the job's time; None: as measured.
    """

    python: str
    submission: str
    ranks_per_node: int | None = None
    wanted_nodes: int | None = None
    max_starts: int = 3
    requeues: bool = True
    health_command: str | None = None
    health_seconds: float = HEALTH_SECONDS
    all_reduce_check: AllReduceCheck = "gpus"
    grace_seconds: float | None = None


def add_health_check(parser: argparse.ArgumentParser, machine: str) -> None:
    """Add the options of each machine's own check; `machine`: a host or a node."""
    parser.add_argument(
        "--health-command", metavar="COMMAND", help=f"shell command; a {machine} is bad if it fails"
    )
    parser.add_argument(
        "--health-seconds", type=number("120"), default=HEALTH_SECONDS, metavar="S",
        help=f"time limit of the {machine} checks (default: %(default)g)",
    )  # fmt: skip


def add_all_reduce_check(parser: argparse.ArgumentParser) -> None:
    """Add the option of the check by messages."""
    parser.add_argument(
        "--all-reduce-check",
        choices=get_args(AllReduceCheck),
        help="nodes whose ranks sum before those of the run: with GPUs, always, or never (default: "
        f"{Policy.all_reduce_check})",
    )
