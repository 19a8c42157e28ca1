"""The main thread of this process as another thread sees it: its work, its calls, its waits."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Final, TypeVar

__all__ = ["Activity", "MainThread", "Progress", "awake_until", "place_of"]

T = TypeVar("T")
_PAUSE_SECONDS: Final = 1.0
_DISTRIBUTED: Final = f"torch{os.sep}distributed{os.sep}"
_ELASTIC: Final = f"{_DISTRIBUTED}elastic{os.sep}"  # may have called the script
_LIBRARY: Final = Path(sysconfig.get_path("stdlib"))
# `Work.wait` leaves no frame of its own.
_WAIT: Final = re.compile(r"\.wait\(")
_DEBUGGERS: Final = ("bdb.py", "pydevd.py")
# Calls that may take any time without a sign: a console, other processes, compilers.
_OF_LIBRARY: Final = ("code.py", "subprocess.py")
_PLACES: Final = tuple(
    name.replace("/", os.sep)
    for name in (
        "/debugpy/", "/IPython/", "/triton/", "/torch/_inductor/",
        "/torch/_dynamo/convert_frame.py",
    )
)  # fmt: skip
_MEASURED: Final = 32  # last steps
_FREE_STEPS: Final = 2  # of a launch: they connect ranks and compile


class Activity(Enum):
    """The kind of work that a main thread does."""

    BETWEEN = "between two steps"  # it saves, evaluates, logs: for any time
    READS = "reads data"
    COMPUTES = "computes"
    WAITS = "waits for another role"


@dataclass
class Progress:
    """The step of a rank, for messages of its failure, and what its main thread does in it.

    The main thread writes it, other threads read it. `step` is None before the first one, `unit`
    the last one of the step that has begun, of a teacher with its own ranks. `marks` counts the
    parts of steps that have begun or ended, `steps` those steps that this process has begun.
    """

    step: int | None = None
    unit: int | None = None
    activity: Activity = Activity.BETWEEN
    marks: int = 0
    steps: int = 0
    is_held_up: bool = False
    _seconds: float = 0.0
    _since: float = 0.0
    _measured: deque[float] = field(default_factory=lambda: deque(maxlen=_MEASURED))

    @property
    def longest_seconds(self) -> float:
        """The time of the longest of the last steps, without reading; 0: none is measured.

        The first two, which connect ranks and compile, and those that a rank outside of them held
        up are not.
        """
        return max(tuple(self._measured), default=0.0)

    def begin(self, step: int) -> None:
        """Note the begin of a step."""
        self.step, self.unit = step, None
        self.marks += 1

    def start_step(self, step: int | None) -> None:
        """Note the same of a step that is timed; its number may come later."""
        if step is not None:
            self.begin(step)
        self.steps += 1
        self._seconds, self.activity, self.is_held_up = 0.0, Activity.BETWEEN, False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Passes outside of steps, which may hang as in one; after an error they do not end."""
        self.change(Activity.COMPUTES)
        yield
        self.change(Activity.BETWEEN)

    def change(self, activity: Activity) -> None:
        """Note that a part of the step begins."""
        now = time.monotonic()
        if self.activity in (Activity.COMPUTES, Activity.WAITS):
            self._seconds += now - self._since
        self.activity, self._since = activity, now
        self.marks += 1

    def end_step(self) -> None:
        """Note the end of a timed step."""
        self.change(Activity.BETWEEN)
        if self.steps > _FREE_STEPS and not self.is_held_up:
            self._measured.append(self._seconds)

    @contextmanager
    def awaiting(self) -> Iterator[None]:
        """A block that waits for another role; outside of a step it may take any time."""
        before = self.activity
        if before is Activity.COMPUTES:
            self.activity = Activity.WAITS
        try:
            yield
        finally:
            self.activity = before


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
        return traceback.extract_stack(self._frame())

    def processor_seconds(self) -> float:
        """Return the time for which it has used the processor."""
        return time.clock_gettime(self._clock)

    def position(self) -> tuple[tuple[int, int], ...]:
        """Return the instruction of each call that it is in: two are equal while none advances."""
        return tuple((id(one.f_code), one.f_lasti) for one in _frames(self._frame()))

    def is_at_leisure(self) -> bool:
        """Whether it waits for files by `awake_until`, a debugger, a compiler or a process."""
        return any(
            one.f_code is awake_until.__code__ or _takes_any_time(one.f_code.co_filename)
            for one in _frames(self._frame())
        )

    def waits_for_ranks(self) -> bool:
        """Whether it is inside `torch.distributed`, or in the `wait` of a collective's handle."""
        frame = self._frame()
        if any(_is_distributed(one.f_code.co_filename) for one in _frames(frame)):
            return True
        if _is_library(frame.f_code.co_filename):
            return False
        expression = _expression(frame)  # without a source it may be any call
        return not expression or _WAIT.search(expression) is not None

    def _frame(self) -> FrameType:
        return sys._current_frames()[self._number]  # noqa: SLF001


def awake_until(future: Future[T]) -> T:
    """Return a future's result; a main thread that waits here runs every second."""
    while not future.done():
        wait([future], timeout=_PAUSE_SECONDS)
    return future.result()


def place_of(calls: traceback.StackSummary) -> str:
    """Return the collective that some calls are in, and the line that called it.

    Elsewhere it is the last of the calls outside of Python's own library.
    """
    frames, called = list(calls), None
    caller = next((one for one in reversed(frames) if not _is_library(one.filename)), frames[-1])
    for outer, frame in zip(frames, frames[1:], strict=False):
        if _is_distributed(frame.filename):
            caller = outer
            break
    for frame in frames:
        if frame.filename.endswith("distributed_c10d.py"):
            called = frame.name
            break
    where = f"{caller.name}, {Path(caller.filename).name}:{caller.lineno}"
    return where if called is None else f"{called} ({where})"


def _frames(last: FrameType | None) -> Iterator[FrameType]:
    while last is not None:
        yield last
        last = last.f_back


def _is_library(file: str) -> bool:
    path = Path(file)
    return path.is_relative_to(_LIBRARY) and "site-packages" not in path.parts


def _is_distributed(file: str) -> bool:
    return _DISTRIBUTED in file and _ELASTIC not in file


def _takes_any_time(file: str) -> bool:
    name = Path(file).name
    if name in _DEBUGGERS or any(one in file for one in _PLACES):
        return True
    return name in _OF_LIBRARY and _is_library(file)


def _expression(frame: FrameType) -> str:
    """Return the source of the expression that a frame evaluates; empty if it is unknown."""
    places = frame.f_code.co_positions()
    first, last, start, end = next(islice(places, frame.f_lasti // 2, None), (None,) * 4)
    if first is None or last is None or start is None or end is None:
        return ""
    name = frame.f_code.co_filename
    lines = [linecache.getline(name, line, frame.f_globals) for line in range(first, last + 1)]
    source = [line.encode() for line in lines]
    source[-1] = source[-1][:end]  # places count bytes
    source[0] = source[0][start:]
    return b"".join(source).decode()
