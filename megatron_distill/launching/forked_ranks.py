"""Ranks of this machine, forked from one process that has made the imports they need.

A rank that starts anew imports for seconds, which is most of a short run. One that is forked
starts at once, and its imports are in memory once. Ranks may use CUDA, and the process that forks
them may not.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess, SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

__all__ = ["TIME_LIMIT", "ForkedRanks"]

TIME_LIMIT: Final = 124  # the status of ranks that were killed for it, as of `timeout`

_END_SECONDS: Final = 10.0  # of the process that forks, or of a rank, once it is asked to end


@dataclass(frozen=True)
class _Call:
    """One call in all ranks; `port`: of the store at which they meet."""

    work: Callable[..., int | None]
    arguments: tuple[object, ...]
    ranks: int
    threads: int
    port: int
    output: str
    seconds: float


class ForkedRanks:
    """A process that runs `prepare`, and then forks the ranks of each call; a context manager.

    prepare: a function of a module. It imports, and starts no threads: they would not be there
    after the fork. method: fork, where this process has the imports, and neither threads nor CUDA.
    """

    def __init__(
        self, prepare: Callable[[], None], *, method: Literal["spawn", "fork"] = "spawn"
    ) -> None:
        self._connection, self._theirs = Pipe()
        ends = (self._theirs, self._connection)
        kind = ForkProcess if method == "fork" else SpawnProcess
        self._process = kind(target=_fork_ranks, args=(*ends, prepare))
        self.cpu_seconds = 0.0  # that it and its ranks have worked, as of the newest answer

    def __enter__(self) -> ForkedRanks:
        self._process.start()
        self._theirs.close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._process.terminate()
        self._connection.close()
        self._process.join(_END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def stop(self) -> None:
        """End the ranks of a call, and the process that forks them."""
        self._process.terminate()
        self._process.join(_END_SECONDS)

    def wait(self) -> None:
        """Wait until the imports are done. Raises EOFError: they failed, with their traceback."""
        self._connection.send(None)
        _, self.cpu_seconds = self._connection.recv()

    def run(
        self,
        work: Callable[..., int | None],
        *arguments: object,
        ranks: int,
        threads: int,
        output: Path,
        seconds: float,
    ) -> int:
        """Run `work(*arguments)` in ranks with torchrun's variables; return their exit status.

        work: a function of a module, that returns a status or None. output: the file of what they
        write. seconds: after which they are killed, with the status `TIME_LIMIT`.
        """
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        call = _Call(work, arguments, ranks, threads, store.port, str(output), seconds)
        self._connection.send(call)
        status: int
        status, self.cpu_seconds = self._connection.recv()
        return status


def _fork_ranks(connection: Connection, theirs: Connection, prepare: Callable[[], None]) -> None:
    """Prepare, and then answer each call with its ranks' exit status and the CPU seconds so far.

    theirs: the other end, which has to be open in the other process alone.
    """
    theirs.close()
    _prctl_pr_set_pdeathsig(signal.SIGTERM)  # a call does not look whether the other one is there
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's; the other process ends this one
    _leave_at_signals()
    prepare()
    with suppress(EOFError):
        while True:
            call = connection.recv()
            status = None if call is None else _status_of(call)
            connection.send((status, sum(os.times()[:4])))
    os._exit(0)  # the modules that were imported would take a second to leave


def _leave_at_signals() -> None:
    """Leave at a signal, through the end of the ranks: they have sessions of their own.

    A second one, as that of the other process's end, changes nothing.
    """
    numbers = signal.SIGTERM, signal.SIGHUP

    def leave(number: int, _: object) -> None:
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in numbers:
        signal.signal(number, leave)


def _status_of(call: _Call) -> int:
    """Fork the ranks, and wait for them; when one fails, the others are killed."""
    context = get_context("fork")
    ranks = [context.Process(target=_rank, args=(call, rank)) for rank in range(call.ranks)]
    running = list(ranks)
    try:
        for one in ranks:
            one.start()
        end = time.monotonic() + call.seconds
        while running:
            ended = wait([one.sentinel for one in running], max(0.0, end - time.monotonic()))
            running = [one for one in running if one.sentinel not in ended]
            failed = _failure([one for one in ranks if one not in running])
            if failed or not ended:
                return failed or TIME_LIMIT
        return 0
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # another one would leave ranks behind
        begun = [one for one in ranks if one.pid is not None]
        for one in begun:
            one.kill()
        end = time.monotonic() + _END_SECONDS
        for one in begun:  # one that waits for a broken GPU cannot be killed
            one.join(max(0.1, end - time.monotonic()))
        _leave_at_signals()


def _failure(ended: Sequence[ForkProcess]) -> int:
    """Return the first exit status that is not zero."""
    for one in ended:
        one.join()
    return next((abs(one.exitcode) for one in ended if one.exitcode), 0)


def _rank(call: _Call, rank: int) -> None:
    # As torchrun starts ranks. Where Linux groups processes by session, those of one session wake
    # each other later: messages took 1.1 to 1.4 times as long.
    os.setsid()
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(call.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.update(
        OMP_NUM_THREADS=str(call.threads),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(call.ranks),
        LOCAL_WORLD_SIZE=str(call.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(call.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    torch.set_num_threads(call.threads)  # the variable was read at the import
    sys.exit(call.work(*call.arguments) or 0)
