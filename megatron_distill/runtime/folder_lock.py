"""A lock on a folder of results, which ends with its process, however that ends."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from megatron_distill.errors import ConfigError
from megatron_distill.log import get_logger
from megatron_distill.runtime.termination import is_requested, when_requested

__all__ = [
    "LAUNCH_VARIABLE",
    "LOCK_FILE",
    "FolderLock",
    "holder_of",
    "is_locked",
    "is_released_here",
    "refuse_holder",
    "take_lock",
]

_LOGGER = get_logger(__name__)
LOCK_FILE: Final = ".lock"  # of a run, and of rollouts
LAUNCH_VARIABLE: Final = "DISTILL_LAUNCH"  # of ranks: the folder of their launch's records
# A process that is about to end may not have written so yet.
_MOMENT_SECONDS: Final = 3.0
# Ranks that were told to stop finish their step and save; a restart waits for them.
_PATIENCE_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.2
_ENDING: Final = "ending"  # the second line of a holder's file
_OF_LAUNCH: Final = re.compile(r"process \d+ of launch \S+ on ")


class FolderLock:
    """A lock that is held: its holder is in the file, and a second line once it is to end."""

    def __init__(self, descriptor: int, holder: str) -> None:
        self._descriptor = descriptor
        self._line = f"{holder}\n".encode()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, self._line, 0)
        self._forget = when_requested(self._tell_ending)

    def _tell_ending(self) -> None:
        with suppress(OSError):  # a full disk
            os.pwrite(self._descriptor, f"{_ENDING}\n".encode(), len(self._line))

    def close(self) -> None:
        """Let another process have the lock."""
        self._forget()
        os.close(self._descriptor)


def take_lock(
    path: Path, *, named: str, holder: str = "", patience_seconds: float | None = None
) -> FolderLock:
    """Lock a file, until the lock is closed or the process ends.

    Waits a moment for another process, and longer for one that is to end; until a signal to stop.
    `named` is the key and value of the folder, for messages; `holder` this process, by default its
    number, launch and host. Raises ConfigError: another run holds the lock; OSError: the file
    cannot be created.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    began, is_announced = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            patience, ends = patience_seconds, _is_to_end(descriptor)
            if patience is None:
                patience = _PATIENCE_SECONDS if ends else _MOMENT_SECONDS
            waited = time.monotonic() - began
            if waited > patience or is_requested():
                refusal = _refusal(descriptor, named, waited=waited if is_announced else None)
                os.close(descriptor)
                raise refusal from None
            if ends and not is_announced:
                _LOGGER.warning(
                    "%s: waiting %.0f s at most for another run (%s), which is ending",
                    *(named, patience, holder_of(descriptor)),
                )
            is_announced |= ends
            time.sleep(_POLL_SECONDS)
        except OSError as error:
            # Some network file systems have no locks.
            _LOGGER.warning("%s: cannot be locked (%s)", path, error.strerror)
            break
    return FolderLock(descriptor, holder or f"process {os.getpid()}{_launch()}{_here()}")


def refuse_holder(path: Path, named: str) -> None:
    """Raise ConfigError if a process that goes on holds the lock of a file.

    Before the slow part of a start, which takes the lock later. Of a process that is to end
    `take_lock` waits for the end.
    """
    deadline = time.monotonic() + _MOMENT_SECONDS
    with suppress(OSError):  # there is no such file, or no lock; `take_lock` names any other reason
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while not _shares(descriptor) and not _is_to_end(descriptor):
                if time.monotonic() > deadline or is_requested():
                    raise _refusal(descriptor, named, waited=None)
                time.sleep(_POLL_SECONDS)
        finally:
            os.close(descriptor)


def _shares(descriptor: int) -> bool:
    """Return whether no other process holds the lock; raises OSError without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _refusal(descriptor: int, named: str, *, waited: float | None) -> ConfigError:
    still = "" if waited is None else f", still after a wait of {waited:.0f} s"
    return ConfigError(
        f"{named}: another run ({holder_of(descriptor)}) is writing there{still}; wait for "
        "its end, stop it, or name another folder"
    )


def _is_to_end(descriptor: int) -> bool:
    """Return whether the holder was told to end, or its launch was ended before this one's.

    A launch begins where no other one of the folder goes on: a rank of one that still holds the
    lock is about to leave. So is a process of this job of Slurm before it was requeued.
    """
    holder, *more = _lines(descriptor)
    if _ENDING in more:
        return True
    if LAUNCH_VARIABLE in os.environ:
        return _OF_LAUNCH.match(holder) is not None
    is_requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    return is_requeued and f"{_launch()} on " in holder


def holder_of(descriptor: int) -> str:
    """Return the last holder of a lock, as it has written itself into the file."""
    return _lines(descriptor)[0]


def _lines(descriptor: int) -> list[str]:
    return os.pread(descriptor, 500, 0).decode(errors="replace").splitlines() or [""]


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds the lock of a file; None: the file system has no locks.

    Harmless beside a process that waits for the lock. Raises OSError: there is no such file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return not _shares(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def is_released_here(path: Path) -> bool:
    """Return whether the last holder of a file's lock was a process of this host that has ended.

    Locks of a network file system may end at their host. Raises OSError: there is no such file.
    """
    holder = path.read_text(errors="replace").partition("\n")[0]
    return holder.endswith(_here()) and is_locked(path) is False


def _launch() -> str:
    """Return the launch or the job of Slurm that this process is of, empty without one."""
    if folder := os.environ.get(LAUNCH_VARIABLE):
        return f" of launch {Path(folder).name}"
    job = os.environ.get("SLURM_JOB_ID")
    return f" of Slurm job {job}" if job else ""


def _here() -> str:
    return f" on {socket.gethostname()}"
