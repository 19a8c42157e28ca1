"""The folder of a run: created, described, and locked by one run at a time."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron_distill.errors import ConfigError
from megatron_distill.log import get_logger
from megatron_distill.runtime.collectives import together

_LOGGER = get_logger(__name__)
_LOCK_FILE = ".lock"
# Ranks whose torchrun was killed finish their step and save; a restart waits for them.
_PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.2


@contextmanager
def run_folder(output: str) -> Iterator[Path]:
    """Create the folder, and lock it against other runs.

    The lock belongs to the operating system and ends with the process, however that ends.
    Raises ConfigError on all ranks: the folder cannot be written, or another run holds it.

    Collective: world, one all-gather of a short object per rank.
    """
    folder = Path(output)
    lock: int | None = None
    try:
        with together():
            if dist.get_rank() == 0:
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    lock = take_lock(folder / _LOCK_FILE, named=f"output={output}")
                except OSError as error:
                    raise ConfigError(
                        f"output={output}: cannot write there ({error.strerror}); name a folder "
                        "that can be written, on a disk with space left"
                    ) from error
        yield folder
    finally:
        if lock is not None:
            os.close(lock)


def take_lock(path: Path, *, named: str) -> int:
    """Return a descriptor that locks a file; the lock ends with it or with the process.

    Waits some time for another process. `named` is the key and value of the folder, for messages.
    Raises ConfigError: another run holds the lock; OSError: the file cannot be created.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    waited = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise ConfigError(
                    f"{named}: another run ({holder}) is writing there; wait for its end or name "
                    "another folder"
                ) from None
            if not waited:
                _LOGGER.warning("%s: waiting for another run (%s) to end", named, holder)
            waited = True
            time.sleep(_POLL_SECONDS)
        except OSError as error:
            # Some network file systems have no locks.
            _LOGGER.warning("%s: cannot be locked (%s)", path, error.strerror)
            break
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor
