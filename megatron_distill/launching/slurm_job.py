"""The work of a batch script of Slurm: python -m megatron_distill.launching.slurm_job.

Exit status: 0 done, 75 saved and more to do, 78 an error in the configuration, 1 a failure.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

from megatron_distill import log
from megatron_distill.errors import ConfigError
from megatron_distill.launching.option_numbers import number, whole_number
from megatron_distill.launching.policy import HEALTH_SECONDS, Policy, add_all_reduce_check
from megatron_distill.launching.program import Program, add_folder
from megatron_distill.launching.records import EXIT_STATUS, Status
from megatron_distill.launching.slurm import Container, SlurmJob
from megatron_distill.launching.supervisor import supervise

__all__ = ["add_arguments", "main"]

_IMPORT_SECONDS: Final = 300.0  # of the checks, in which pyxis imports the image on each node


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the rules of a job, which `megatron-distill submit slurm` has as well."""
    parser.add_argument(
        "--ranks-per-node", type=whole_number("8"), metavar="N", help="default: one per GPU, else 1"
    )
    parser.add_argument(
        "--max-starts", type=whole_number("3"), metavar="N", default=Policy.max_starts,
        help="launches without a new checkpoint before the job gives up (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--no-requeue", action="store_true", help="end with status 75 instead of going on"
    )
    parser.add_argument(
        "--health-command",
        metavar="COMMAND",
        help="shell command; a node on which it fails is excluded",
    )
    parser.add_argument(
        "--health-seconds", type=number("120"), metavar="S",
        help=f"time limit of the node checks (default: {HEALTH_SECONDS:g}, with --container "
        f"{_IMPORT_SECONDS:g}, which includes importing the image)",
    )  # fmt: skip
    add_all_reduce_check(parser)
    parser.add_argument(
        "--grace-seconds", type=number("600"), metavar="S",
        help="time kept for a save before the time limit (default: from measured steps and saves)",
    )  # fmt: skip
    parser.add_argument("--container", metavar="IMAGE", help="image that pyxis starts on each node")
    parser.add_argument(
        "--container-mounts", metavar="FROM:TO,...", help="mounts besides the work folder"
    )
    parser.add_argument(
        "--container-python", metavar="PYTHON",
        help=f"Python in the image (default: {Container.python})",
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one launch of this job and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_arguments(parser)
    add_folder(parser)
    parser.add_argument(
        "--wanted-nodes",
        type=whole_number("4"),
        metavar="N",
        help="nodes that run ranks; the others are spare",
    )
    parser.add_argument(
        "--submission", help="id of the submission; its launches are counted together"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="-- COMMAND, words")
    given = parser.parse_args(arguments)
    log.configure(0, name="job")
    words = given.program[1:] if given.program[:1] == ["--"] else given.program
    container = None
    if given.container is not None:
        python = given.container_python or Container.python
        container = Container(given.container, given.container_mounts, python)
    try:
        job = SlurmJob.from_environment(container)
        program = Program.of(words, given.folder)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_STATUS[Status.MISCONFIGURED]
    usual = HEALTH_SECONDS if container is None else _IMPORT_SECONDS
    policy = Policy(
        python=sys.executable if container is None else container.python,
        submission=given.submission or job.job,
        ranks_per_node=given.ranks_per_node,
        wanted_nodes=given.wanted_nodes,
        max_starts=given.max_starts,
        requeues=not given.no_requeue and "SLURM_ARRAY_JOB_ID" not in os.environ,
        health_command=given.health_command,
        health_seconds=given.health_seconds or usual,
        all_reduce_check=given.all_reduce_check or Policy.all_reduce_check,
        grace_seconds=given.grace_seconds,
    )
    return supervise(job, program, policy)


if __name__ == "__main__":
    sys.exit(main())
