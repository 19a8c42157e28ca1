"""The ranks of one node: python -m megatron_distill.launching.node, once per node.

It reads the launch's record for addresses, runs torchrun, and records the outcome. SIGTERM, SIGINT
and SIGUSR1 let the ranks finish their step, save and leave, as does the end of standard input with
--stops-with-input. Its exit status is 0 once the outcome is recorded: a scheduler that ends all
nodes at the first failure would hide the cause.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron_distill.errors import TrainingError
from megatron_distill.launching.records import (
    LaunchRecord,
    NodeOutcome,
    Status,
    read_record,
    write_record,
)
from megatron_distill.runtime.torchrun import (
    ChildOutcome,
    protect_script_options,
    run_child,
    threads_per_process,
)

__all__ = [
    "HIDDEN_GPUS",
    "NodePart",
    "asked_of_gpus",
    "gpus_listed",
    "main",
    "node_index",
    "node_name",
    "ranks_here",
]

_STOPPING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
HIDDEN_GPUS: Final = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES
_GPU_SECONDS: Final = 30.0  # of a call of nvidia-smi


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks of this node; return 0, or 1 where the outcome cannot be recorded."""
    given = _parse(arguments)
    folder = Path(given.launch)
    launch = read_record(folder / "launch.json", LaunchRecord)
    index = node_index() if given.index is None else given.index
    if launch is None or index >= len(launch.nodes):
        sys.stderr.write(f"error: {folder}: no record of a launch with a node {index}\n")
        return 1
    if given.stops_with_input:
        threading.Thread(target=_stop_at_end_of_input, daemon=True).start()
    try:
        ranks = given.ranks_per_node or ranks_here(announce=index == 0)
    except TrainingError as error:  # the checks before the next launch find the node
        node = launch.nodes[index]
        message = f"error: {node}: {error}"
        outcome = NodeOutcome(node, index, Status.FAILED, time.time(), order=9, message=message)
        write_record(folder / "nodes" / f"{index}.json", outcome)
        return 0
    part = NodePart(folder, launch, index, given.endpoint, given.program)
    part.run(ranks=ranks, stop_seconds=given.stop_seconds, end=given.end)
    return 0


@dataclass(frozen=True)
class NodePart:
    """One node's part of a launch: the ranks of `program`, which is as torchrun takes it."""

    folder: Path
    launch: LaunchRecord
    index: int
    endpoint: str
    program: Sequence[str]

    def run(self, *, ranks: int, stop_seconds: float, end: float = math.inf) -> NodeOutcome:
        """Run so many ranks to their end, record the outcome, and return it; raises OSError.

        stop_seconds: for ranks to save after a signal, which `end`, seconds since the epoch, cuts
        short. Call it from the main thread.
        """
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        file = self.folder / "nodes" / f"{self.index}.json"
        file.unlink(missing_ok=True)  # of a JobSet of the same name that was deleted
        ended = run_child(
            self._command(ranks),
            environment={"OMP_NUM_THREADS": str(threads_per_process(ranks)), **os.environ},
            grace_seconds=stop_seconds,
            latest=end,
            signals=_STOPPING,
            second_kills=False,
        )
        if ended.is_late:
            name = self.launch.nodes[self.index]
            sys.stderr.write(f"{name}: its ranks were killed, since they had not saved in time\n")
        found = read_record(file, NodeOutcome)
        if found is None:
            found = self._outcome_of(ended)
            write_record(file, found)
        return found

    def _command(self, ranks: int) -> list[str]:
        node, address = self.launch.nodes[self.index], self.launch.addresses[self.index]
        words = [
            f"--nnodes={len(self.launch.nodes)}",
            f"--nproc-per-node={ranks}",
            "--max-restarts=0",
            f"--rdzv-id={self.launch.name}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.endpoint}",
            # torchrun compares host names to find the node of the store; aliases mislead it.
            f"--rdzv-conf=is_host={int(self.index == 0)}",
            f"--local-addr={address}",
            "--signals-to-handle=SIGQUIT",  # this process has the signals
            f"--log-dir={self.folder}",
            *self.program,
        ]
        module = [sys.executable, "-m", "megatron_distill.launching.ranks"]
        place = [str(self.folder), node, str(self.index), ",".join(self.launch.addresses)]
        return [*module, *place, *protect_script_options(words)]

    def _outcome_of(self, ended: ChildOutcome) -> NodeOutcome:
        """Return the outcome of a torchrun that ended without a record of its own."""
        was_asked = ended.interrupted_by is not None
        return NodeOutcome(
            self.launch.nodes[self.index],
            self.index,
            Status.ENDED if was_asked else Status.FAILED,
            time.time(),
            order=9,
            message=None if was_asked else f"error: torchrun ended with status {ended.status}",
        )


def node_index() -> int:
    """Return the place of this node, as the launcher of this process has it."""
    names = ("DISTILL_NODE_INDEX", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
    return int(next((os.environ[name] for name in names if name in os.environ), "0"))


def node_name() -> str:
    """Return the name of this node, as the launcher of this process has it."""
    names = ("DISTILL_NODE_NAME", "SLURMD_NODENAME")
    return next((os.environ[name] for name in names if name in os.environ), socket.gethostname())


def _stop_at_end_of_input() -> None:
    # Not through sys.stdin, whose lock would be held when the interpreter ends.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--launch", required=True, help="folder of the launch")
    parser.add_argument("--endpoint", required=True, help="HOST:PORT of the rendezvous")
    parser.add_argument("--index", type=int, help="place of this node (default: as launched)")
    parser.add_argument("--ranks-per-node", type=int, help="default: one per GPU, else 1")
    parser.add_argument(
        "--stop-seconds", type=float, default=300.0, help="time for ranks to save after a signal"
    )
    parser.add_argument(
        "--end", type=float, default=math.inf,
        help="when ranks that were told to save are killed, seconds since the epoch",
    )  # fmt: skip
    parser.add_argument("--stops-with-input", action="store_true")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="-- SCRIPT or -m MODULE, words")
    given = parser.parse_args(arguments)
    given.program = given.program[1:] if given.program[:1] == ["--"] else given.program
    return given


def ranks_here(*, announce: bool) -> int:
    """Return the number of ranks for this node: one per GPU of the job, or 1 without GPUs.

    Raises TrainingError: nvidia-smi hangs.
    """
    allotted = os.environ.get("SLURM_GPUS_ON_NODE", "")
    gpus = int(allotted) if allotted.isdecimal() else gpus_listed()
    if gpus == 0 and announce:
        sys.stderr.write(
            "no GPU on this node: 1 rank for each node; --ranks-per-node starts more\n"
        )
    return max(gpus, 1)


def gpus_listed() -> int:
    """Return the number of GPUs that nvidia-smi lists, or fewer that CUDA's variable leaves.

    0 where there is no such program. Raises TrainingError: it hangs.
    """
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = sum(line.startswith("GPU ") for line in asked_of_gpus("--list-gpus").splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or visible in HIDDEN_GPUS:
        return listed  # where none is visible, as many ranks compute on the CPU
    return min(listed, len(visible.split(",")))


def asked_of_gpus(*options: str) -> str:
    """Return what nvidia-smi writes; raises TrainingError where it hangs."""
    command = ["nvidia-smi", *options]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GPU_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise TrainingError(
            f"nvidia-smi has not answered within {_GPU_SECONDS:g} s; restart the machine"
        ) from None
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
