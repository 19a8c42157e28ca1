"""Peak memory of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

__all__ = ["peak_memory_bytes"]

_PROCESS_STATUS = Path("/proc/self/status")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has held so far, in bytes.

    On a GPU: the allocator's peak on `device`. On a CPU: the peak resident set of the process,
    which includes the interpreter and its libraries.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _peak_resident_bytes()


def _peak_resident_bytes() -> int:
    """Return VmHWM where the kernel tells it, else `ru_maxrss`.

    `ru_maxrss` survives exec: a process started by a large parent reports the parent's peak.
    """
    if _PROCESS_STATUS.exists():
        for line in _PROCESS_STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
