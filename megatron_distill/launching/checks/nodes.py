"""The checks of all nodes of a launch from the first one: each node's own, then their sums."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Final

from megatron_distill.errors import counted
from megatron_distill.launching.checks.node_health import Health, verdict
from megatron_distill.launching.checks.node_view import node_differences
from megatron_distill.launching.checks.pairs import (
    NodeSums,
    bad_sums,
    broken_pairs,
    sums_file,
    untried_pairs,
)
from megatron_distill.launching.policy import Policy
from megatron_distill.launching.records import (
    BadNode,
    LaunchRecord,
    local_time,
    read_record,
)
from megatron_distill.launching.scheduler import Scheduler
from megatron_distill.log import get_logger

__all__ = ["bad_nodes"]

_LOGGER = get_logger(__name__)
_END_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.2
_WRITE_SECONDS: Final = 3.0  # for a node to record a sum that it has ended
# For sums on GPUs at least: imports, and in each sum the start of CUDA and NCCL.
_GPU_SECONDS: Final = 75.0
_SLOW: Final = 0.5  # of the median speed


def bad_nodes(
    job: Scheduler,
    policy: Policy,
    launch: LaunchRecord,
    folder: Path,
    *,
    is_stopped: Callable[[], bool],
) -> tuple[list[BadNode], list[str]]:
    """Check all nodes at once; return the bad ones, and the names of those to exclude.

    Nodes that pass the first check sum then, and each check has the policy's time. A node without
    an answer to the first is bad. Where all nodes fail a check, it is more likely wrong, and none
    is excluded for it. None is bad where the job is stopped meanwhile, which ends the checks.
    """
    bad, found = _by_health(job, policy, launch, folder, is_stopped)
    failed = [one.node for one in bad]
    excluded = failed if len(failed) < len(launch.nodes) else []
    sound = {node: one for node, one in found.items() if node not in failed}
    if not is_stopped() and _wants_sums(policy, sound):
        more = _by_sums(job, policy, launch, folder, sound, is_stopped)
        bad = [*bad, *more]
        excluded = [*excluded, *(one.node for one in more if len(more) < len(sound))]
    return ([], []) if is_stopped() else (bad, excluded)


def _by_health(
    job: Scheduler,
    policy: Policy,
    launch: LaunchRecord,
    folder: Path,
    is_stopped: Callable[[], bool],
) -> tuple[list[BadNode], dict[str, Health]]:
    """Let each node check itself; return the bad ones, and what those that answer have found."""
    words = ["--launch", str(folder.resolve())]
    if policy.health_command is not None:
        words += ["--command", policy.health_command]
        words += ["--command-seconds", str(0.8 * policy.health_seconds)]
    if policy.ranks_per_node is not None:
        words += ["--ranks-per-node", str(policy.ranks_per_node)]
    silence = "has written no answer: its own message is above"
    seconds = policy.health_seconds
    if not _has_ended(job, policy, launch.nodes, "node_health", words, seconds, is_stopped):
        silence = f"has not answered within {policy.health_seconds:.0f} s"
    took = time.time() - launch.started
    _LOGGER.info("%s checked in %.0f s", counted(len(launch.nodes), "node"), took)
    files = {node: folder / "health" / f"{node}.json" for node in launch.nodes}
    read = {node: read_record(file, Health) for node, file in files.items()}
    found = {node: one for node, one in read.items() if one is not None}
    unlike = node_differences({node: vars(one) for node, one in found.items()})
    bad = []
    for node, health in read.items():
        if health is None:
            bad.append(BadNode(local_time(), node, silence, is_silent=True))
        elif problems := [*health.problems, *unlike.get(node, [])]:
            bad.append(BadNode(local_time(), node, "; ".join(problems)))
        else:
            _LOGGER.info("node %s: %s", node, verdict(health))
    return bad, found


def _has_ended(
    job: Scheduler,
    policy: Policy,
    nodes: Sequence[str],
    module: str,
    words: Sequence[str],
    seconds: float,
    is_stopped: Callable[[], bool],
) -> bool:
    """Run a module of this folder on nodes; end it, and return False, after so many seconds."""
    start = [*job.on_nodes(nodes, waits=0), policy.python, "-m"]
    command = [*start, f"megatron_distill.launching.checks.{module}", *words]
    step = subprocess.Popen(command, start_new_session=True)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not is_stopped():
        with suppress(subprocess.TimeoutExpired):
            step.wait(timeout=_POLL_SECONDS)
            return True
    step.terminate()
    try:
        step.wait(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        step.kill()
        step.wait()
    return False


def _wants_sums(policy: Policy, sound: Mapping[str, Health]) -> bool:
    """Return whether these nodes sum: with GPUs always, else if asked, and several only."""
    if policy.all_reduce_check == "never" or not sound:
        return False
    if any(one.store_port is None for one in sound.values()):
        return False
    if any(health.gpus for health in sound.values()):
        return True
    return policy.all_reduce_check == "always" and len(sound) > 1


def _by_sums(
    job: Scheduler,
    policy: Policy,
    launch: LaunchRecord,
    folder: Path,
    sound: Mapping[str, Health],
    is_stopped: Callable[[], bool],
) -> list[BadNode]:
    """Let the nodes sum; return the bad ones, and log what was seen."""
    began, nodes = time.time(), list(sound)
    limit = policy.health_seconds
    if any(health.gpus for health in sound.values()):
        limit = max(limit, _GPU_SECONDS)
    seconds = max(0.0, limit - _WRITE_SECONDS)
    addresses = dict(zip(launch.nodes, launch.addresses, strict=True))
    words = ["--launch", str(folder.resolve()), "--nodes", ",".join(nodes)]
    words += ["--stores", ",".join(f"{addresses[node]}:{sound[node].store_port}" for node in nodes)]
    words += ["--seconds", f"{seconds:.1f}", "--until", f"{began + seconds:.1f}"]
    words += job.node_options
    if policy.all_reduce_check == "always":
        words.append("--always")
    if policy.ranks_per_node is not None:
        words += ["--ranks-per-node", str(policy.ranks_per_node)]
    has_ended = _has_ended(job, policy, nodes, "all_reduce", words, limit, is_stopped)
    read = {node: read_record(sums_file(folder, node), NodeSums) for node in nodes}
    found = {node: one for node, one in read.items() if one is not None}
    late = [node for node in nodes if node not in found]
    if late and (found or not has_ended):
        text = "has begun no all-reduce, and is taken as it is: it came late, or says why above"
        _LOGGER.warning("node %s: %s", ", ".join(late), text)
    bad = bad_sums(nodes, found)
    for text in broken_pairs(nodes, found, bad):
        _LOGGER.warning("%s; both go on, as they succeed with other nodes", text)
    untried = untried_pairs(nodes, found, bad)
    if found and untried:
        pairs = ", ".join(" and ".join(pair) for pair in untried)
        _LOGGER.warning("no all-reduce of %s: one of them came too late", pairs)
    if found:
        took = time.time() - began
        _LOGGER.info("all-reduces took %.0f s%s", took, "".join(_speeds(found)))
    for node, other, speed, usual in _slow(found):
        text = "its own ranks" if node == other else f"the ranks of {other} and its own"
        _LOGGER.warning(
            "node %s: an all-reduce of %s has %.3g GB/s, the median is %.3g",
            *(node, text, speed, usual),
        )
    return [
        BadNode(local_time(), node, one.reason, is_silent=one.is_wait) for node, one in bad.items()
    ]


def _by_kind(found: Mapping[str, NodeSums]) -> tuple[dict[tuple[str, str], float], ...]:
    """Return the speeds of nodes alone, and of pairs, each by its two nodes."""
    alone: dict[tuple[str, str], float] = {}
    pairs: dict[tuple[str, str], float] = {}
    for node, sums in found.items():
        for other, speed in sums.speeds.items():
            if speed == 0.0:  # of a single rank
                continue
            if node == other:
                alone[node, node] = speed
            elif (other, node) not in pairs:
                pairs[node, other] = speed
    return alone, pairs


def _speeds(found: Mapping[str, NodeSums]) -> Iterator[str]:
    """Yield the range of the nodes' own speeds, and that of pairs."""
    for text, speeds in zip(("within a node", "between two nodes"), _by_kind(found), strict=True):
        if speeds:
            least, most = min(speeds.values()), max(speeds.values())
            both = f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
            yield f"; {both} GB/s {text}"


def _slow(found: Mapping[str, NodeSums]) -> Iterator[tuple[str, str, float, float]]:
    """Yield the nodes or pairs that are far slower than most, their speed and the median."""
    for speeds in _by_kind(found):
        usual = median(speeds.values()) if len(speeds) > 2 else 0.0
        for (node, other), speed in speeds.items():
            if speed < _SLOW * usual:
                yield node, other, speed, usual
