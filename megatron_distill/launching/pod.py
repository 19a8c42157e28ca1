"""One pod of a JobSet of Kubernetes: python -m megatron_distill.launching.pod, one per node.

Exit status: 0 done or stopped by a user, 75 saved and more to do, 1 a failure. 78 is an error in
the settings, no folder to write in, or no progress. The manifest of `launching.kubernetes` restarts
all pods after 75 and 1, and ends the job after 78.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from megatron_distill import log
from megatron_distill.errors import ConfigError
from megatron_distill.launching.node import NodePart, node_index, ranks_here
from megatron_distill.launching.outcomes import report
from megatron_distill.launching.program import JobRanks, Program, add_folder
from megatron_distill.launching.records import (
    EXIT_STATUS,
    Launches,
    LaunchRecord,
    Outcome,
    Status,
    disk_errors,
    write_record,
)
from megatron_distill.log import get_logger

__all__ = ["main"]

_LOGGER = get_logger(__name__)
_PORT = 29400


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this pod's ranks and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--job", required=True, help="name of the job")
    parser.add_argument(
        "--attempt", type=int, required=True, help="number of earlier launches of the job"
    )
    parser.add_argument(
        "--pods", required=True, metavar="A,B", help="addresses of the pods, in order"
    )
    parser.add_argument("--port", type=int, default=_PORT, help="port of the rendezvous")
    parser.add_argument("--ranks-per-node", type=int, help="default: one per GPU, else 1")
    parser.add_argument("--max-starts", type=int, default=3)
    parser.add_argument("--stop-seconds", type=float, default=300.0)
    add_folder(parser)
    parser.add_argument("program", nargs=argparse.REMAINDER, help="-- COMMAND, words")
    given = parser.parse_args(arguments)
    log.configure(0, name=f"pod {node_index()}")
    try:
        return _run(given)
    except ConfigError as error:
        _LOGGER.error("error: %s", error)
        return EXIT_STATUS[Status.MISCONFIGURED]
    except OSError as error:  # after the ranks; if it stays, the next start names the folder
        _LOGGER.error("error: %s", error)
        return EXIT_STATUS[Status.FAILED]


def _run(given: argparse.Namespace) -> int:
    words = given.program[1:] if given.program[:1] == ["--"] else given.program
    program = Program.of(words, given.folder)
    asked = JobRanks(len(given.pods.split(",")), given.ranks_per_node)
    launches, index = program.launches([sys.executable], ranks=asked), node_index()
    # All pods start again after a failure, and without records nothing counts these starts.
    with disk_errors(launches):
        if (objection := launches.objection()) is not None:
            _LOGGER.info("%s", objection)
            return EXIT_STATUS[Status.DONE]
        launch = _begin(given, program, launches, index)
    folder, pods = launches.of(launch).resolve(), launch.addresses
    endpoint = f"{pods[0]}:{given.port}"
    ranks = given.ranks_per_node or ranks_here(announce=index == 0)
    part = NodePart(folder, launch, index, endpoint, program.torchrun_words)
    outcome = part.run(ranks=ranks, stop_seconds=given.stop_seconds)
    if outcome.status in (Status.FAILED, Status.MISCONFIGURED):
        report([outcome], folder, shows_traceback=outcome.status is Status.FAILED)
    elif outcome.message is not None:
        _LOGGER.error("%s", outcome.message)
    status = Status.UNFINISHED if outcome.status is Status.ENDED else outcome.status
    if index == 0:
        _record(launches, launch, status, outcome.message)
    return EXIT_STATUS[status]


def _begin(
    given: argparse.Namespace, program: Program, launches: Launches, index: int
) -> LaunchRecord:
    """Record the launch, as the first pod; raises OSError, and ConfigError after the last start."""
    # Later ones are of a JobSet of the same name that was deleted.
    starts = launches.starts_without_progress(given.job, before=given.attempt)
    progress = launches.progress
    if given.attempt and starts >= given.max_starts and index == 0:
        raise ConfigError(f"{launches.useless(starts)}; see the logs in {launches.folder}")
    pods = given.pods.split(",")
    launch = LaunchRecord(
        job=given.job,
        restart=given.attempt,
        submission=given.job,
        command=program.spelled,
        nodes=[pod.partition(".")[0] for pod in pods],
        addresses=pods,
        progress=progress,
        started=time.time(),
    )
    folder = launches.of(launch)
    if index == 0:
        (folder / "outcome.json").unlink(missing_ok=True)
        launches.begin(launch)
    (folder / "nodes").mkdir(parents=True, exist_ok=True)
    return launch


def _record(launches: Launches, launch: LaunchRecord, status: Status, message: str | None) -> None:
    """Record the outcome of the launch as the first pod has it."""
    progress = launches.progress
    if status is Status.DONE:
        launches.mark_done()
    text = "no further launch"
    if status in (Status.UNFINISHED, Status.FAILED):
        text = f"goes on from {launches.unit} {progress}"
        if launches.stop_file.exists():
            text = f"no further launch: {launches.stop_file} exists"
    outcome = Outcome(status, message or status.value, progress, time.time(), text)
    write_record(launches.of(launch) / "outcome.json", outcome)


if __name__ == "__main__":
    sys.exit(main())
