"""Worker processes that compute a function of items, in order."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Final, Generic, TypeVar

from megatron_distill.errors import DataError

__all__ = ["WorkerPool", "worker_map"]

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD: Final = 4  # results per worker that may wait for an earlier one
_END_SECONDS: Final = 5.0


@contextmanager
def worker_map(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int
) -> Iterator[Iterator[Result]]:
    """Yield an iterator over `function(item)` in order, computed in `workers` processes; 0: here.

    See `WorkerPool`, which it has for itself.
    """
    with WorkerPool(function, workers).results(items) as results:
        yield results


class WorkerPool(Generic[Item, Result]):
    """Worker processes that compute a function for several streams of items.

    `function` is pickled once per worker. The workers start with the first stream and end with the
    last one, and also if this process is killed. 0 workers: the function runs in this process. All
    streams are read by one thread.
    """

    def __init__(self, function: Callable[[Item], Result], workers: int) -> None:
        self.workers = workers
        self._function = function
        self._streams: dict[int, _Stream[Item, Result]] = {}
        self._opened = 0
        self._processes: list[SpawnProcess] = []
        self._ends: list[Connection] = []
        self._idle: list[Connection] = []

    @contextmanager
    def results(self, items: Iterable[Item]) -> Iterator[Iterator[Result]]:
        """Yield an iterator over the results of a stream's items, in order.

        At most `4 * workers` items of a stream are in flight. The iterator raises the errors of
        `items`, a DataError of the function, and DataError if a worker ends early.
        """
        if self.workers == 0:
            yield map(self._function, items)
            return
        number = self._opened
        self._opened += 1
        stream = _Stream(self, number, items)
        try:
            if not self._streams:
                self._start()
            self._streams[number] = stream
            yield iter(stream)
        finally:
            self._streams.pop(number, None)
            if not self._streams:
                self._stop()

    @property
    def has_idle(self) -> bool:
        """Whether a worker has no work."""
        return bool(self._idle)

    def send(self, stream: int, number: int, item: Item) -> None:
        """Give a stream's item to an idle worker. Raises DataError if that has ended early."""
        end = self._idle.pop()
        try:
            end.send((stream, number, item))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise _gone() from error

    def collect(self) -> None:
        """Wait for a worker, and give finished results to their streams."""
        for end in wait([end for end in self._ends if end not in self._idle]):
            assert isinstance(end, Connection)
            try:
                stream, number, result = end.recv()
            except (EOFError, ConnectionResetError) as error:
                raise _gone() from error
            self._idle.append(end)
            if stream in self._streams:  # else it was closed meanwhile
                self._streams[stream].done[number] = result

    def _start(self) -> None:
        # Spawned, not forked: this process has threads, and perhaps a GPU.
        context = get_context("spawn")
        for number in range(self.workers):
            ours, theirs = context.Pipe()
            self._ends.append(ours)
            process = context.Process(
                target=_work,
                args=(theirs, self._function),
                name=f"data-worker-{number}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
        self._idle = list(self._ends)

    def _stop(self) -> None:
        for end in self._ends:
            # Where pool and stream are garbage together, an end may have been closed before.
            with suppress(OSError):
                end.close()
        for process in self._processes:
            process.join(_END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        self._ends, self._processes, self._idle = [], [], []


def _work(end: Connection, function: Callable[[Item], Result]) -> None:
    """Process items until the parent closes the connection."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent ends its workers
    # The workers already use all cores, and idle threads of the tokenizers library spin.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while True:
        try:
            stream, number, item = end.recv()
            result: Result | DataError
            try:
                result = function(item)
            except DataError as error:
                result = error
            end.send((stream, number, result))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


class _Stream(Generic[Item, Result]):
    """Sends a stream's items to idle workers of a pool and yields the results in order."""

    def __init__(self, pool: WorkerPool[Item, Result], number: int, items: Iterable[Item]) -> None:
        self.done: dict[int, Result | DataError] = {}
        self._pool = pool
        self._number = number
        self._items = enumerate(items)
        self._sent = self._given = 0
        self._is_exhausted = False

    def __iter__(self) -> Iterator[Result]:
        while True:
            self._hand_out()
            if self._given in self.done:
                self._given += 1
                result = self.done.pop(self._given - 1)
                if isinstance(result, DataError):
                    raise result
                yield result
            elif self._is_exhausted and self._given == self._sent:
                return
            else:
                self._pool.collect()

    def _hand_out(self) -> None:
        while (
            self._pool.has_idle
            and not self._is_exhausted
            and self._sent - self._given < _AHEAD * self._pool.workers
        ):
            try:
                item = next(self._items, None)
            except DataError as error:  # it has its turn after the results before it
                self.done[self._sent] = error
                self._sent += 1
                item = None
            if item is None:
                self._is_exhausted = True
                return
            self._pool.send(self._number, *item)
            self._sent += 1


def _gone() -> DataError:
    return DataError(
        "data.workers: a worker process ended early, perhaps out of memory; lower data.workers, "
        "or set it to 0 to see the error"
    )
