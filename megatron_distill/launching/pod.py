"""One pod of a JobSet of Kubernetes: python -m megatron_distill.launching.pod, one per node.

Exit status: 0 done or stopped by a user, 75 saved and more to do, 1 a failure. 78 is an error in
the settings, no folder to write in, or no progress. The manifest of `launching.kubernetes` restarts
all pods after 75 and 1, and ends the job after 78.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_distill import log
from megatron_distill.errors import ConfigError
from megatron_distill.launching.checks.node_health import (
    Health,
    command_problems,
    own_problems,
    verdict,
)
from megatron_distill.launching.checks.node_view import versions
from megatron_distill.launching.kubernetes import NODE_VARIABLE
from megatron_distill.launching.node import NodePart, node_index, ranks_here
from megatron_distill.launching.outcomes import report
from megatron_distill.launching.policy import HEALTH_SECONDS
from megatron_distill.launching.program import JobRanks, Program, add_folder
from megatron_distill.launching.records import (
    EXIT_STATUS,
    BadNode,
    Launches,
    LaunchRecord,
    NodeOutcome,
    Outcome,
    Status,
    disk_errors,
    local_time,
    read_record,
    write_record,
)
from megatron_distill.log import get_logger

__all__ = ["main"]

_LOGGER = get_logger(__name__)
_PORT = 29400
_POLL_SECONDS = 0.5


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
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that the node must have")
    parser.add_argument("--health-command", help="shell command; the node is bad if it fails")
    parser.add_argument("--health-seconds", type=float, default=HEALTH_SECONDS)
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
        bad = _checked(given, launches, launch, index)
    folder, pods = launches.of(launch).resolve(), launch.addresses
    if bad is None:
        endpoint = f"{pods[0]}:{given.port}"
        ranks = given.ranks_per_node or ranks_here(announce=index == 0)
        part = NodePart(folder, launch, index, endpoint, program.torchrun_words)
        outcome = part.run(ranks=ranks, stop_seconds=given.stop_seconds)
    else:
        message = f"error: node {bad.node}: {bad.reason}; `kubectl cordon` keeps pods away from it"
        outcome = NodeOutcome(
            launch.nodes[index], index, Status.FAILED, time.time(), order=9, message=message
        )
        write_record(folder / "nodes" / f"{index}.json", outcome)
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
    (folder / "health" / f"{launch.nodes[index]}.json").unlink(missing_ok=True)
    if index == 0:
        (folder / "outcome.json").unlink(missing_ok=True)
        launches.begin(launch)
    for name in ("nodes", "health"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return launch


def _checked(
    given: argparse.Namespace, launches: Launches, launch: LaunchRecord, index: int
) -> BadNode | None:
    """Check this pod's node and record the result; return what is wrong with it, None: nothing.

    A node that is recorded as bad is left out by the next submission. Raises OSError.
    """
    pod, folder = launch.nodes[index], launches.of(launch) / "health"
    node = os.environ.get(NODE_VARIABLE, pod)
    gpus, problems = own_problems(given.gpus, given.ranks_per_node)
    if given.health_command is not None and not problems:  # a bad node may let it hang
        problems += command_problems(given.health_command, 0.8 * given.health_seconds)
    health = Health(pod, problems, versions(), gpus=gpus)
    write_record(folder / f"{pod}.json", health)
    if not problems:
        _LOGGER.info("node %s: %s", node, verdict(health))
        return None
    bad = BadNode(local_time(), node, "; ".join(problems))
    others = [folder / f"{other}.json" for other in launch.nodes if other != pod]
    if _is_one_healthy(others, given.health_seconds):
        launches.add_bad_nodes([bad])
    return bad


def _is_one_healthy(files: Sequence[Path], seconds: float) -> bool:
    """Wait for a pod without problems; where none has passed the check, it is more likely wrong."""
    deadline = time.monotonic() + seconds
    while True:
        found = [read_record(file, Health) for file in files]
        if any(one is not None and not one.problems for one in found):
            return True
        if all(one is not None for one in found) or time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)


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
