"""Worker processes that compute a function of items, in order."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Final, Generic, TypeVar

from megatron_distill.errors import DataError

__all__ = ["worker_map"]

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD: Final = 4  # results per worker that may wait for an earlier one
_END_SECONDS: Final = 5.0


@contextmanager
def worker_map(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int
) -> Iterator[Iterator[Result]]:
    """Yield an iterator over `function(item)` in order, computed in `workers` processes; 0: here.

    `function` is pickled once per worker. At most `4 * workers` items are in flight. The workers
    end with the block, and also if this process is killed. The iterator raises the errors of
    `items`, a DataError of `function`, and DataError if a worker ends early.
    """
    if workers == 0:
        yield map(function, items)
        return
    # Spawned, not forked: this process has threads, and perhaps a GPU.
    context = get_context("spawn")
    ends: list[Connection] = []
    processes: list[SpawnProcess] = []
    try:
        for number in range(workers):
            ours, theirs = context.Pipe()
            ends.append(ours)
            process = context.Process(
                target=_work, args=(theirs, function), name=f"data-worker-{number}", daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
        yield iter(_Exchange(ends, items))
    finally:
        for end in ends:
            end.close()
        for process in processes:
            process.join(_END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


def _work(end: Connection, function: Callable[[Item], Result]) -> None:
    """Process items until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    # The workers already use all cores, and idle threads of the tokenizers library spin.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while True:
        try:
            number, item = end.recv()
            result: Result | DataError
            try:
                result = function(item)
            except DataError as error:
                result = error
            end.send((number, result))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


class _Exchange(Generic[Item, Result]):
    """Sends items to idle workers and yields the results in order."""

    def __init__(self, ends: list[Connection], items: Iterable[Item]) -> None:
        self._ends = ends
        self._items = enumerate(items)
        self._idle = list(ends)
        self._done: dict[int, Result | DataError] = {}
        self._sent = self._given = 0
        self._is_exhausted = False

    def __iter__(self) -> Iterator[Result]:
        while True:
            self._hand_out()
            if self._given in self._done:
                self._given += 1
                result = self._done.pop(self._given - 1)
                if isinstance(result, DataError):
                    raise result
                yield result
            elif self._is_exhausted and self._given == self._sent:
                return
            else:
                self._collect()

    def _hand_out(self) -> None:
        while (
            self._idle
            and not self._is_exhausted
            and self._sent - self._given < _AHEAD * len(self._ends)
        ):
            try:
                item = next(self._items, None)
            except DataError as error:  # it has its turn after the results before it
                self._done[self._sent] = error
                self._sent += 1
                item = None
            if item is None:
                self._is_exhausted = True
                return
            end = self._idle.pop()
            try:
                end.send(item)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise _gone() from error
            self._sent += 1

    def _collect(self) -> None:
        for end in wait([end for end in self._ends if end not in self._idle]):
            assert isinstance(end, Connection)
            try:
                number, result = end.recv()
            except (EOFError, ConnectionResetError) as error:
                raise _gone() from error
            self._done[number] = result
            self._idle.append(end)


def _gone() -> DataError:
    return DataError(
        "data.workers: a worker process ended early, perhaps out of memory; lower data.workers, "
        "or set it to 0 to see the error"
    )
