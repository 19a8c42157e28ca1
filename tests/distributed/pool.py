"""A persistent pool of gloo workers: a start per test costs seconds, a pooled call milliseconds.

The workers are forked from one server, which has imported torch and Megatron-Core for all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD_SIZE = 4
# After one rank has failed, the remaining ranks get this long to notice and report a traceback.
GRACE_SECONDS = 5.0
START_SECONDS = 240.0
# Nothing takes that long but a hang, however busy the machine is.
PATIENCE = 240.0


def _loopback_interface() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


@contextlib.contextmanager
def _worker_environment() -> Iterator[None]:
    """Environment that must be in place before a worker imports torch."""
    values = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": _loopback_interface(),
        "CUDA_VISIBLE_DEVICES": "",
    }
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_forked(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Start a process from the server that has imported torch and Megatron-Core."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    with _worker_environment():
        # Not daemonic: sharded checkpoint saving starts child processes.
        process = context.Process(target=target, args=args, daemon=False)
        process.start()
    return process


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _forget_model_parallel_state() -> None:
    """Drop Megatron-Core's global groups, if the call made any: the next layout starts clean."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()


def _collect() -> None:
    """End the threads of the call's groups: each of them wakes up a hundred times a second."""
    gc.collect()
    tracemalloc.stop()  # beside those threads it can crash (python/cpython#128679)
    gc.freeze()  # remaining objects need no scan after every call


def meet(store: dist.Store, name: str, world_size: int, timeout: timedelta) -> None:
    """Wait until every rank has connected: one without a collective to run could leave before."""
    if store.add(name, 1) == world_size:
        store.set(f"{name}/all", b"")
    store.wait([f"{name}/all"], timeout)


def _call(rank: int, port: int, request: tuple[Any, ...]) -> tuple[bool, Any]:
    number, world_size, function, args, timeout = request
    try:
        client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"call{number}", client),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        meet(client, f"connected{number}", world_size, timedelta(seconds=timeout))
        try:
            return True, function(rank, world_size, *args)
        finally:
            _forget_model_parallel_state()
            dist.destroy_process_group()
            _collect()
    except BaseException:  # noqa: BLE001 - the traceback is the answer
        return False, traceback.format_exc()


def _work(rank: int, port: int, connection: Connection, stack_file: str) -> None:
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with Path(stack_file).open("w") as stacks:
        faulthandler.enable(file=stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        connection.send_bytes(b"ready")
        while True:
            try:
                request = connection.recv_bytes()
            except EOFError:
                return
            try:
                reply = pickle.dumps(_call(rank, port, pickle.loads(request)))
            except Exception:  # noqa: BLE001 - a function or result that does not pickle
                reply = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(reply)


@dataclass
class _Worker:
    rank: int
    process: BaseProcess
    connection: Connection
    stack_file: Path

    def kill(self) -> None:
        """End the worker and its child processes (it leads a separate process group)."""
        if self.process.pid is not None and self.process.is_alive():
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:  # not yet leader of its group
                self.process.kill()
        self.process.join()
        self.connection.close()

    def ending(self) -> str:
        """How the worker ended, and where its threads were if a signal such as SIGABRT did it."""
        self.process.join(1.0)
        stacks = self.stack_file.read_text()
        return f"process ended with exit code {self.process.exitcode}\n{stacks}".rstrip()

    def stack(self) -> str:
        """Where the worker's main thread is now."""
        if self.process.pid is None or not self.process.is_alive():
            return self.ending()
        os.kill(self.process.pid, signal.SIGUSR1)
        # The outermost frame is written last; a busy machine may take a while to begin.
        deadline = time.monotonic() + 10.0
        while not (stack := self.stack_file.read_text()).endswith("in <module>\n"):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return stack


class Pool:
    """Runs module-level functions on 1 to 4 gloo ranks; a failed call costs fresh workers."""

    def __init__(self, size: int = WORLD_SIZE) -> None:
        self.size = size
        self._workers: list[_Worker] = []
        self._calls = 0
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self._port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1",
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._folder = tempfile.TemporaryDirectory(prefix="gloo-pool-")
        # Registered after multiprocessing's own exit function, hence run before it joins children.
        atexit.register(self.close)

    def _start(self) -> None:
        for rank in range(self.size):
            ours, other = multiprocessing.Pipe()
            stack_file = Path(self._folder.name) / f"stack{rank}"
            process = start_forked(_work, rank, self._port, other, str(stack_file))
            other.close()
            self._workers.append(_Worker(rank, process, ours, stack_file))
        for worker in self._workers:
            if not worker.connection.poll(START_SECONDS):
                self.close()
                raise RuntimeError(f"worker {worker.rank} did not start in {START_SECONDS:.0f} s")
            worker.connection.recv_bytes()

    def close(self) -> None:
        """End every worker; the next call of `run` starts fresh ones."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = PATIENCE
    ) -> list[Any]:
        """Call `function(rank, world_size, *args)` on each rank of a fresh gloo group.

        Returns the results in rank order. Raises one AssertionError with every rank's traceback (or
        the stack of a rank that hangs) on failure, and restarts the workers then.
        """
        assert 1 <= world_size <= self.size, f"world size {world_size} of a pool of {self.size}"
        if not self._workers:
            self._start()
        self._calls += 1
        request = pickle.dumps((self._calls, world_size, function, args, timeout))
        workers = self._workers[:world_size]
        for worker in workers:
            worker.connection.send_bytes(request)
        try:
            replies = self._collect(workers, timeout)
            if all(succeeded for succeeded, _ in replies):
                return [value for _, value in replies]
        except BaseException:  # an interrupted test must not leave replies behind
            self.close()
            raise
        self.close()
        name = getattr(function, "__qualname__", repr(function))
        reports = "\n".join(
            f"--- rank {rank}: {'finished' if succeeded else value}"
            for rank, (succeeded, value) in enumerate(replies)
        )
        raise AssertionError(f"{name} failed on {world_size} ranks:\n{reports}")

    def _collect(self, workers: list[_Worker], timeout: float) -> list[tuple[bool, Any]]:
        replies: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(replies) < len(workers):
            pending = [worker for worker in workers if worker.rank not in replies]
            ready = wait(
                [worker.connection for worker in pending], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                break
            for worker in pending:
                if worker.connection not in ready:
                    continue
                try:
                    replies[worker.rank] = pickle.loads(worker.connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    replies[worker.rank] = (False, worker.ending())
                if not replies[worker.rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for worker in workers:
            if worker.rank not in replies:
                replies[worker.rank] = (False, f"no answer in time\n{worker.stack()}")
        return [replies[worker.rank] for worker in workers]
