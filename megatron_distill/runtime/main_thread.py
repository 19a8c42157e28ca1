"""Whether the main thread of this process runs, as another thread sees it."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from concurrent.futures import Future, wait
from typing import Final, TypeVar

__all__ = ["MainThread", "awake_until"]

T = TypeVar("T")
_PAUSE_SECONDS: Final = 1.0


class MainThread:
    """The main thread, looked at again and again.

    It runs if it has used the processor since the look before, however little. So a computation
    runs, a read of many files, and a loop that sleeps between two looks at something. A single wait
    does not run: for a lock, a message, a process, a disk.
    """

    def __init__(self) -> None:
        number = threading.main_thread().ident
        assert number is not None, "it has started"
        self._number = number
        self._clock = time.pthread_getcpuclockid(number)
        self._seconds = -1.0
        self._idle = 0

    def idle_looks(self) -> int:
        """Return the number of looks since the one after which it ran last."""
        seconds = time.clock_gettime(self._clock)
        self._idle = self._idle + 1 if seconds == self._seconds else 0
        self._seconds = seconds
        return self._idle

    def stack(self) -> traceback.StackSummary:
        """Return the calls that it is in, the last one last."""
        return traceback.extract_stack(sys._current_frames()[self._number])  # noqa: SLF001


def awake_until(future: Future[T]) -> T:
    """Return a future's result; a main thread that waits here runs every second."""
    while not future.done():
        wait([future], timeout=_PAUSE_SECONDS)
    return future.result()
