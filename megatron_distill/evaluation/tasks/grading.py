"""Grading in worker processes, each of which is ended when a text takes too long.

The processes ignore SIGTERM, SIGINT and SIGHUP, which torchrun and a terminal send to the whole
process group of a rank. They end with the call, or with the process that called.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from threading import Thread
from time import monotonic
from typing import Final

from megatron_distill.errors import DataError
from megatron_distill.evaluation.tasks.graders import Grade
from megatron_distill.runtime.termination import Interrupted

__all__ = ["Graded", "grade_texts"]

_SECONDS: Final = 10.0
_WORKERS: Final = 4
_STARTS: Final = 2
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Pair = tuple[str, str]


@dataclass(frozen=True)
class Graded:
    """The grades of one grader, and the texts that it did not grade in time, or at all.

    Those count as wrong.
    """

    right: tuple[bool, ...]
    timeouts: int
    failures: int


def grade_texts(
    grade: Grade,
    pairs: Sequence[Pair],
    *,
    seconds: float = _SECONDS,
    workers: int | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Graded:
    """Grade pairs of a generated text and the right answer, each within some seconds.

    `grade` is a function of a module, which the processes find by its name, or an object that can
    be pickled. A text whose
    process is killed is graded once more. Raises Interrupted where a stop is requested, and
    DataError where no process can be started.
    """
    count = min(len(pairs), workers or min(_WORKERS, os.cpu_count() or 1))
    tally = _Tally([None] * len(pairs), deque(range(len(pairs))))
    pool: list[_Worker] = []
    try:
        while tally.left or any(worker.is_busy for worker in pool):
            if stop_requested():
                raise Interrupted
            idle = [worker for worker in pool if not worker.is_busy]
            if len(tally.left) > len(idle) and len(pool) < count:
                pool.append(_Worker.start(grade))
                idle.append(pool[-1])
            for worker in idle[: len(tally.left)]:
                worker.give(tally.left.popleft(), pairs)
            busy = [worker for worker in pool if worker.is_busy]
            ready = wait([worker.end for worker in busy], timeout=0.1)
            for worker in busy:
                if worker.end in ready:
                    outcome = worker.take()
                elif monotonic() - worker.since > seconds:
                    outcome = _Lapse.LATE
                else:
                    continue
                tally.note(worker.index, outcome)
                worker.is_busy = False
                if isinstance(outcome, _Lapse) and outcome is not _Lapse.FAILED:
                    worker.stop()
                    pool.remove(worker)
    finally:
        for worker in pool:
            worker.stop()
    lapses = [outcome for outcome in tally.found if isinstance(outcome, _Lapse)]
    late = lapses.count(_Lapse.LATE)
    return Graded(tuple(one is True for one in tally.found), late, len(lapses) - late)


class _Lapse(Enum):
    """Why a text has no grade."""

    FAILED = "the grader raised an error"
    LATE = "it took too long"
    ENDED = "the process ended by itself"
    KILLED = "a signal ended the process"


@dataclass
class _Tally:
    """The outcome of each text, the texts left, and those that were given a second time."""

    found: list[bool | _Lapse | None]
    left: deque[int]
    repeated: set[int] = field(default_factory=set)

    def note(self, index: int, outcome: bool | _Lapse) -> None:
        """Note a text's outcome; it is left again after the first end by a signal."""
        if outcome is _Lapse.KILLED and index not in self.repeated:
            self.repeated.add(index)
            self.left.appendleft(index)
        else:
            self.found[index] = outcome


@dataclass
class _Worker:
    """A process that grades one pair at a time."""

    process: SpawnProcess
    end: Connection
    index: int = -1
    since: float = 0.0
    is_busy: bool = False

    @classmethod
    def start(cls, grade: Grade) -> _Worker:
        """Start a process, at most twice; it imports the grader before its first pair."""
        for _ in range(_STARTS):
            here, there = get_context("spawn").Pipe()
            process = get_context("spawn").Process(target=_work, args=(grade, there), daemon=True)
            with _signals_blocked():
                process.start()
            there.close()
            worker = cls(process, here)
            if not isinstance(worker.take(), _Lapse):
                return worker  # imports do not count as time of a text
            worker.stop()
        name = getattr(grade, "__name__", getattr(grade, "name", type(grade).__name__))
        raise DataError(
            f"the grader {name} cannot start: its process ended {_STARTS} times before the first "
            f"text, last with status {process.exitcode}. Free memory, or leave it out of the "
            "task's graders"
        )

    def give(self, index: int, pairs: Sequence[Pair]) -> None:
        """Send a pair."""
        self.index, self.since, self.is_busy = index, monotonic(), True
        with suppress(OSError):  # the process has ended, which `take` finds
            self.end.send(pairs[index])

    def take(self) -> bool | _Lapse:
        """Wait for the grade, or for the end of the process."""
        try:
            found: bool | None = self.end.recv()
        except (EOFError, OSError):
            self.process.join(_SECONDS)
            return _Lapse.KILLED if (self.process.exitcode or 0) < 0 else _Lapse.ENDED
        return _Lapse.FAILED if found is None else found

    def stop(self) -> None:
        """End the process, whatever it computes."""
        self.process.kill()
        self.process.join()
        self.end.close()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A block whose new processes never get a termination signal: they inherit the mask."""
    resource_tracker.ensure_running()  # starting it would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(grade: Grade, end: Connection) -> None:
    """Grade pairs until the other side ends."""
    Thread(target=_end_with_parent, daemon=True).start()
    _grade(grade, "", "")  # which imports the packages that it needs
    end.send(True)
    while True:
        try:
            text, answer = end.recv()
        except (EOFError, OSError):
            return
        end.send(_grade(grade, text, answer))


def _grade(grade: Grade, text: str, answer: str) -> bool | None:
    """Return the grade of a text, None where the grader raised an error."""
    try:
        return grade(text, answer)
    except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError):
        return None


def _end_with_parent() -> None:
    """End this process with its parent, also in the middle of a text."""
    parent = parent_process()
    assert parent is not None, "a grader is a child"
    wait([parent.sentinel])
    os._exit(1)
