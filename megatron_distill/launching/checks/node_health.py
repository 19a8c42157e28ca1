"""Checks of one node before the ranks start.

python -m megatron_distill.launching.checks.node_health, once per node. Each node
writes its problems into the launch's folder, so that a node without an answer does not share the
folder, hangs, or is gone. No import of torch: the check takes a second.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megatron_distill.errors import TrainingError, counted
from megatron_distill.launching.checks.node_view import seen_files, versions
from megatron_distill.launching.node import HIDDEN_GPUS, asked_of_gpus, gpus_listed, node_name
from megatron_distill.launching.ports import TRIED_PORTS, free_port
from megatron_distill.launching.records import LaunchRecord, read_record, write_record

__all__ = ["Health", "command_problems", "gpu_problems", "main", "own_problems", "verdict"]

_LEAST_OPEN_FILES: Final = 4096  # sockets and files of a rank's peers
_LEAST_BYTES: Final = 100_000_000  # in the folder of temporary files
_ECC: Final = "ecc.errors.uncorrected.volatile.total"
# The driver sets the last one after events (XID) that a GPU does not recover from by itself.
_GPU_FIELDS: Final = (_ECC, "remapped_rows.failure", "gpu_recovery_action")
_ACTION: Final = re.compile("reset|reboot|drain|recover", re.IGNORECASE)


@dataclass(frozen=True)
class Health:
    """The problems of one node, and its view, which is compared with those of others.

    versions: of its software, and the number of its GPUs where no scheduler allots them. files:
    what it sees under the paths of the settings. port: a free one for the rendezvous. store_port:
    one for sums with other nodes. gpus: all that nvidia-smi lists; None: it has not answered.
    """

    node: str
    problems: list[str]
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    port: int | None = None
    store_port: int | None = None
    gpus: int | None = None


def verdict(health: Health) -> str:
    """Return the text about a node without problems, with what it has."""
    found = [] if health.gpus is None else [counted(health.gpus, "GPU")]
    if "torch" in health.versions:
        found.append(f"torch {health.versions['torch']}")
    if health.port is not None:
        found.append(f"port {health.port} free")
    return f"healthy: {', '.join(found)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check this node, record the result, and return 0; 1 where it cannot be recorded."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--launch", required=True, help="folder of the launch")
    parser.add_argument(
        "--gpus", type=int, help="GPUs that a node must have (default: as allotted)"
    )
    parser.add_argument(
        "--ranks-per-node", type=int, help="ranks of a node; GPUs beyond them may differ"
    )
    parser.add_argument("--command", help="shell command; the node is bad if it fails")
    parser.add_argument("--command-seconds", type=float, default=40.0)
    given = parser.parse_args(arguments)
    folder = Path(given.launch)
    node = node_name()
    launch = read_record(folder / "launch.json", LaunchRecord)
    software = versions()
    tried = [] if launch is None else _tried_ports(launch, node)
    half = len(tried) // 2
    port, store_port = free_port(tried), free_port([*tried[half:], *tried[:half]])
    wanted = _wanted_gpus(given)
    gpus, own = own_problems(wanted, given.ranks_per_node)
    if gpus is not None and not wanted:  # a node with fewer than others would have fewer ranks
        software["GPUs"] = str(min(gpus, given.ranks_per_node or gpus))
    problems = [*_of_launch(folder, launch, port), *own]
    if given.command is not None and not problems:  # a bad node may let it hang
        problems += command_problems(given.command, given.command_seconds)
    try:
        files = {} if launch is None else seen_files(launch.paths)
        health = Health(node, problems, software, files, port, store_port, gpus)
        write_record(folder / "health" / f"{node}.json", health)
    except OSError as error:
        problem = f"cannot write in {folder}: {error.strerror}"
        if not folder.exists():
            problem = f"does not see {folder}: share it with all nodes, and mount it in a container"
        sys.stderr.write(f"{node}: {problem}\n")
        return 1
    return 0


def _tried_ports(launch: LaunchRecord, node: str) -> list[int]:
    """Return the ports of a launch from another one on for each node: some may be one machine."""
    place = launch.nodes.index(node) if node in launch.nodes else 0
    return [*launch.ports[place % TRIED_PORTS :], *launch.ports[: place % TRIED_PORTS]]


def own_problems(wanted: int, ranks: int | None) -> tuple[int | None, list[str]]:
    """Return the number of this node's GPUs, None where it is unknown, and what is wrong with it.

    Looked at are its limits, its folder of temporary files, and the GPUs of the ranks. wanted: GPUs
    that it must have. ranks: None: as many as there are GPUs.
    """
    gpus, problems = _of_gpus(wanted, ranks)
    return gpus, [*_of_limits(), *problems]


def _of_launch(folder: Path, launch: LaunchRecord | None, port: int | None) -> Iterator[str]:
    if launch is None:
        yield f"does not see {folder / 'launch.json'}: the run's folder must be shared"
    else:
        yield from _of_first_node(launch)
        if launch.ports and port is None:
            ports = ", ".join(map(str, launch.ports))
            yield f"has no free port for the rendezvous: others use {ports}"


def _of_limits() -> Iterator[str]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < _LEAST_OPEN_FILES:
        yield f"allows {most} open files, fewer than {_LEAST_OPEN_FILES} (ulimit -H -n)"
    temporary = tempfile.gettempdir()
    free = shutil.disk_usage(temporary).free
    if free < _LEAST_BYTES:
        yield f"has {free / 1e6:.0f} MB left in {temporary}"


def _of_first_node(launch: LaunchRecord) -> Iterator[str]:
    """Look for the node where ranks meet; they would try for two minutes to find it."""
    node, address = launch.nodes[0], launch.addresses[0]
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        yield (
            f"finds no {address}, by which ranks reach {node} ({error.strerror}); a name of "
            f"~/.ssh/config alone needs its address, --hosts {node}=10.0.0.1"
        )


def _wanted_gpus(given: argparse.Namespace) -> int:
    """Return the GPUs that this node must have: those given, else those that Slurm allots."""
    allotted = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return given.gpus or (int(allotted) if allotted.isdecimal() else 0)


def _of_gpus(wanted: int, ranks: int | None) -> tuple[int | None, list[str]]:
    """Return the number of GPUs and the problems of those of the ranks, as of `own_problems`."""
    if wanted and shutil.which("nvidia-smi") is None:
        return None, [f"has no nvidia-smi, and {counted(wanted, 'GPU')} per node must be checked"]
    found, problems = None, []
    try:
        found = gpus_listed()
        if found < wanted:
            problems.append(f"has {found} of {counted(wanted, 'GPU')}")
        if found:
            problems += gpu_problems("\n".join(_gpu_table().splitlines()[:ranks]))
    except TrainingError as error:
        problems.append(str(error))
    return found, problems


def _gpu_table() -> str:
    """Return the answer about all fields that the driver knows; it refuses a query with others.

    Of the GPUs that CUDA has, where its variable names some.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in HIDDEN_GPUS:
        return ""
    chosen = [] if visible is None else [f"--id={visible}"]
    table = ""
    for count in range(len(_GPU_FIELDS), 0, -1):
        query = f"--query-gpu={','.join(('index', *_GPU_FIELDS[:count]))}"
        table = asked_of_gpus(query, "--format=csv,noheader,nounits", *chosen)
        if table[:1].isdecimal():
            break
    return table


def gpu_problems(table: str) -> Iterator[str]:
    """Return the problems of GPUs from nvidia-smi's lines `0, 3, No, None`, or `0, 3`.

    These are uncorrected memory errors, rows of memory that could not be replaced, and what the
    driver asks for. Cards and drivers that do not know one of them have `[N/A]` there.
    """
    for line in table.splitlines():
        index, *values = (part.strip() for part in line.split(","))
        errors, failed, action = (*values, *[""] * len(_GPU_FIELDS))[: len(_GPU_FIELDS)]
        if errors.isdecimal() and int(errors) > 0:
            yield f"GPU {index} has {counted(int(errors), 'uncorrected memory error')}"
        if failed in ("Yes", "1"):
            yield f"GPU {index} has a bad row of memory and no spare one left"
        asked = next((text for text in (action, errors) if _ACTION.search(text)), None)
        if asked is not None:  # of older drivers, [GPU requires reset] is in the place of the count
            yield f"GPU {index} is not to be used before the driver's {asked!r} (nvidia-smi -q)"


def command_problems(command: str, seconds: float) -> Iterator[str]:
    """Run a shell command and yield that it has failed, or has not ended in the time."""
    # In a session of its own, so that its own children end with it.
    shell = subprocess.Popen(
        command,
        shell=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        text, _ = shell.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()
        yield f"{command!r} has not ended within {seconds:g} s"
        return
    if shell.returncode != 0:
        lines = text.strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        yield f"{command!r} failed with status {shell.returncode}{last}"


if __name__ == "__main__":
    sys.exit(main())
