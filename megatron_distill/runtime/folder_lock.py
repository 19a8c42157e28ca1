"""A lock on a folder of results, which ends with its process, however that ends."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Final

from megatron_distill.errors import ConfigError
from megatron_distill.log import get_logger
from megatron_distill.runtime.termination import is_requested

__all__ = ["holder_of", "is_locked", "is_released_here", "take_lock"]

_LOGGER = get_logger(__name__)
# Ranks whose torchrun was killed finish their step and save; a restart waits for them.
_PATIENCE_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.2


def take_lock(
    path: Path, *, named: str, holder: str = "", patience_seconds: float | None = None
) -> int:
    """Return a descriptor that locks a file; the lock ends with it or with the process.

    Waits some time for another process, until a signal to stop. `named` is the key and value of the
    folder, for messages; `holder` this process, by default its number and host. Raises ConfigError:
    another run holds the lock; OSError: the file cannot be created.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    patience = _PATIENCE_SECONDS if patience_seconds is None else patience_seconds
    deadline = time.monotonic() + patience
    waited = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            other = holder_of(descriptor)
            if time.monotonic() > deadline or is_requested():
                os.close(descriptor)
                raise ConfigError(
                    f"{named}: another run ({other}) is writing there; wait for its end or name "
                    "another folder"
                ) from None
            if not waited:
                _LOGGER.warning(
                    "%s: waiting %.0f s at most for another run (%s) to end", named, patience, other
                )
            waited = True
            time.sleep(_POLL_SECONDS)
        except OSError as error:
            # Some network file systems have no locks.
            _LOGGER.warning("%s: cannot be locked (%s)", path, error.strerror)
            break
    os.ftruncate(descriptor, 0)
    holder = holder or f"process {os.getpid()}{_here()}"
    os.pwrite(descriptor, f"{holder}\n".encode(), 0)
    return descriptor


def holder_of(descriptor: int) -> str:
    """Return the last holder of a lock, as it has written itself into the file."""
    return os.pread(descriptor, 200, 0).decode(errors="replace").strip()


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds the lock of a file; None: the file system has no locks.

    Harmless beside a process that waits for the lock. Raises OSError: there is no such file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def is_released_here(path: Path) -> bool:
    """Return whether the last holder of a file's lock was a process of this host that has ended.

    Locks of a network file system may end at their host. Raises OSError: there is no such file.
    """
    return path.read_text(errors="replace").strip().endswith(_here()) and is_locked(path) is False


def _here() -> str:
    return f" on {socket.gethostname()}"
