"""The memory of a node for the ranks of a job: of its GPUs, or that of the host under its limits.

No import of torch and no GPU context: nvidia-smi, the scheduler's variables and Linux are asked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from megatron_distill.launching.node import asked_of_gpus, gpus_listed

__all__ = ["NodeMemory", "gpu_memory", "host_memory"]

_MIB: Final = 2**20
# Of a job of Slurm in MiB, and the variable with the number on a node that it is a part of.
_SLURM_LIMITS: Final = (
    ("SLURM_MEM_PER_NODE", None),
    ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
    ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
)


@dataclass(frozen=True)
class NodeMemory:
    """Memory of a device in bytes: of one GPU, or of the host, which all ranks of a node share.

    title: of the device, in messages. is_limit: a process beyond it ends, as on a GPU or under a
    limit of the job; without one a host may swap.
    """

    title: str
    count: int
    is_limit: bool


def gpu_memory() -> NodeMemory | None:
    """Return the largest GPU that nvidia-smi lists; None: there is none of a known size.

    Ranks compare their own GPU, so that no smaller one here refuses what would run. Raises
    TrainingError: nvidia-smi hangs.
    """
    if not gpus_listed():
        return None
    found = []
    table = asked_of_gpus("--query-gpu=memory.total,name", "--format=csv,noheader,nounits")
    for line in table.splitlines():
        size, _, name = (part.strip() for part in line.partition(","))
        if size.isdecimal():  # GPUs that share the host's memory have `[N/A]`
            found.append(NodeMemory(name, int(size) * _MIB, is_limit=True))
    return max(found, key=lambda gpu: gpu.count, default=None)


def host_memory() -> NodeMemory:
    """Return the least of the host's memory and of the limits of this job and control group."""
    machine = NodeMemory("this machine", psutil.virtual_memory().total, is_limit=False)
    return min((machine, *_slurm_limits(), *_group_limits()), key=lambda one: one.count)


def _slurm_limits() -> Iterator[NodeMemory]:
    for name, parts in _SLURM_LIMITS:
        size = os.environ.get(name, "")
        count = "1" if parts is None else os.environ.get(parts, "")
        # 0 stands for all memory of the node.
        if size.isdecimal() and count.isdecimal() and int(size) * int(count):
            yield NodeMemory(f"this job ({name}={size})", int(size) * int(count) * _MIB, True)


def _group_limits(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[NodeMemory]:
    """Yield the limits of this process's control groups and of those above, version 1 and 2."""
    lines = []
    with suppress(OSError):
        lines = own.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        folder, name = root, "memory.max"
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            folder, name = root / "memory", "memory.limit_in_bytes"
        place = Path(path.lstrip("/"))
        for group in (place, *place.parents):
            with suppress(OSError):  # the path may be that of the host, outside of a container
                size = (folder / group / name).read_text().strip()
                if size.isdecimal():
                    yield NodeMemory(f"this control group ({name})", int(size), is_limit=True)
