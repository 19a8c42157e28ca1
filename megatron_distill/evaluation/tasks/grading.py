"""Grading in worker processes, each of which is ended when a text takes too long."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from time import monotonic
from typing import Final

from megatron_distill.evaluation.tasks.graders import Grade

__all__ = ["Graded", "grade_texts"]

_SECONDS: Final = 10.0
_WORKERS: Final = 4

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
    grade: Grade, pairs: Sequence[Pair], *, seconds: float = _SECONDS, workers: int | None = None
) -> Graded:
    """Grade pairs of a generated text and the right answer, each within some seconds.

    `grade` is a function of a module, so that the processes find it by its name.
    """
    count = min(len(pairs), workers or min(_WORKERS, os.cpu_count() or 1))
    found: list[bool | None] = [None] * len(pairs)
    late = broken = 0
    pool = [_Worker.start(grade) for _ in range(count)]
    try:
        left = iter(range(len(pairs)))
        busy: dict[Connection, _Worker] = {}
        for worker in pool:
            worker.give(next(left), pairs)
            busy[worker.end] = worker
        while busy:
            ready = wait(list(busy), timeout=0.1)
            now = monotonic()
            for end, worker in list(busy.items()):
                outcome: bool | None = False
                if end in ready:
                    outcome = worker.take()
                    broken += outcome is None
                elif worker.since is not None and now - worker.since > seconds:
                    late += 1
                else:
                    continue
                del busy[end]
                found[worker.index] = bool(outcome)
                following = next(left, None)
                if following is None:
                    continue
                if end not in ready or outcome is None:
                    worker.stop()
                    pool.remove(worker)
                    worker = _Worker.start(grade)
                    pool.append(worker)
                worker.give(following, pairs)
                busy[worker.end] = worker
    finally:
        for worker in pool:
            worker.stop()
    return Graded(tuple(bool(one) for one in found), late, broken)


@dataclass
class _Worker:
    """A process that grades one pair at a time."""

    process: SpawnProcess
    end: Connection
    index: int = -1
    since: float | None = None

    @classmethod
    def start(cls, grade: Grade) -> _Worker:
        """Start a process; it imports the grader before its first pair."""
        here, there = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=_work, args=(grade, there), daemon=True)
        process.start()
        there.close()
        worker = cls(process, here)
        worker.end.recv()  # so that the import does not count as time of a text
        return worker

    def give(self, index: int, pairs: Sequence[Pair]) -> None:
        """Send a pair."""
        self.index, self.since = index, monotonic()
        self.end.send(pairs[index])

    def take(self) -> bool | None:
        """Return the grade, None where the grader failed or its process ended."""
        self.since = None
        try:
            found: bool | None = self.end.recv()
        except (EOFError, OSError):
            return None
        return found

    def stop(self) -> None:
        """End the process, whatever it computes."""
        self.process.kill()
        self.process.join()
        self.end.close()


def _work(grade: Grade, end: Connection) -> None:
    """Grade pairs until the other side ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end.send(None)
    while True:
        try:
            text, answer = end.recv()
        except (EOFError, OSError):
            return
        try:
            found: bool | None = grade(text, answer)
        except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError):
            found = None
        end.send(found)
