"""Memory that processes of one machine map, which has no name in a file system.

It ends with the last process that has mapped it, even a killed one. The size of /dev/shm, 64 MB in
many containers, does not limit it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Final

__all__ = ["allocate_shared", "memory_name", "shared_path"]

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES: Final = Path("/proc/self/ns/pid")


def memory_name() -> str:
    """Return a name that two processes have in common if one can map the other's memory.

    Containers of one machine differ in it, unless they see each other's processes. Empty where no
    other process can, as on systems without Linux's `memfd_create`.
    """
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        allocate_shared(1).close()  # some systems forbid it
        return f"{_BOOT.read_text().strip()}/{_PROCESSES.stat().st_ino}"
    except OSError:
        return ""


def allocate_shared(size: int) -> BinaryIO:
    """Allocate bytes of shared memory, which other processes can map until the result is closed.

    Raises OSError: there are not as many.
    """
    stream = os.fdopen(os.memfd_create("megatron-distill"), "r+b", buffering=0)
    try:
        os.posix_fallocate(stream.fileno(), 0, size)
    except OSError:
        stream.close()
        raise
    return stream


def shared_path(stream: BinaryIO) -> Path:
    """Return the path by which other processes open the memory of `allocate_shared`."""
    return Path(f"/proc/{os.getpid()}/fd/{stream.fileno()}")
