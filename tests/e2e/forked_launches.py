"""Launches of real processes, forked from one that has imported what ranks need.

Imports take most of a short launch, of its launcher and of each rank. Processes here have the
parents, sessions, streams, variables and `sitecustomize` that real starts give them. A process of a
launch has a twin, forked before it does anything: further processes of Python are forked from that,
so that none has the threads of its parent, and the kernel makes them children of the parent.

Starts of torchrun, of the command and of the quickstart as users type them, with all imports:
tests/e2e/commands/test_command_line.py, test_quickstart.py there, and tests/e2e/clusters.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from tests.distributed.pool import start_forked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.process import BaseProcess

_RANK = "rank "  # begins the name of a forked rank's main thread
_LONGEST = 2**17  # bytes of a program and its variables
_SET_DEATH_SIGNAL, _SET_NAME, _SET_SUBREAPER = 1, 15, 36  # of prctl(2)


def rank_of(process: psutil.Process) -> int | None:
    """A process's number in a forked launch, None for what is no rank or has ended."""
    with suppress(psutil.NoSuchProcess):
        name = process.name()
        if name.startswith(_RANK) and process.status() != psutil.STATUS_ZOMBIE:
            return int(name.removeprefix(_RANK))
    return None


@dataclass(frozen=True)
class ForkedLaunch:
    """A launch that runs, with the methods of `subprocess.Popen` that tests use."""

    process: BaseProcess

    @classmethod
    def start(
        cls,
        words: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
        *,
        errors: Path | None = None,
        folder: Path | None = None,
    ) -> ForkedLaunch:
        """Start a command of Python in a session of its own.

        log: file of both streams, or of the first with `errors`. folder: where it starts.
        """
        place = None if folder is None else str(folder)
        program = _Program(tuple(words[1:]), dict(variables), place, starts_session=True)
        return cls(
            start_forked(_launch, program, str(log), None if errors is None else str(errors))
        )

    @property
    def pid(self) -> int:
        """Number of the process."""
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once the process has ended."""
        self.process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill the process and its descendants, unless it has ended."""
        if self.poll() is None:
            family = [psutil.Process(self.pid)]
            family += family[0].children(recursive=True)
            for member in family:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            self.wait()


@dataclass(frozen=True)
class _Program:
    """A command of Python without the interpreter, and where it runs."""

    words: tuple[str, ...]
    variables: dict[str, str]
    folder: str | None
    starts_session: bool


def run_forked(
    words: Sequence[str],
    variables: Mapping[str, str],
    folder: Path,
    *,
    seconds: float,
) -> subprocess.CompletedProcess[str]:
    """Run a command of Python to its end in a folder; nothing of it is left after an error."""
    with tempfile.TemporaryDirectory() as place:
        log, errors = Path(place) / "log", Path(place) / "errors"
        launch = ForkedLaunch.start(words, variables, log, errors=errors, folder=folder)
        try:
            status = launch.wait(seconds)
        finally:
            launch.end()
        return subprocess.CompletedProcess(words, status, log.read_text(), errors.read_text())


def _launch(program: _Program, log: str, errors: str | None) -> None:
    files = [os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)]
    if errors is not None:
        files.append(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
    _run(program, (0, files[0], files[-1]))


def _run(program: _Program, streams: Sequence[int]) -> None:
    """Run a program in this process, which has begun and will end with it."""
    for number, stream in enumerate(streams):
        if stream != number:
            os.dup2(stream, number)
    for stream in set(streams) - {0, 1, 2}:
        os.close(stream)
    if program.starts_session:
        os.setsid()
    if program.folder is not None:
        os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.variables)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # imported for CPUs
    _forget_parents()
    rank = program.variables.get("RANK")
    if rank is None:
        _start_twin()
    else:
        _control(_SET_NAME, f"{_RANK}{rank}".encode())
    for folder in reversed(program.variables.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
    importlib.invalidate_caches()
    sys.modules.pop("sitecustomize", None)
    with suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    _execute([word for word in program.words if word != "-u"])


def _execute(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def _forget_parents() -> None:
    """Let streams, and modules that keep state of a process, be those of a new one."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), line_buffering=True)
        for number in (1, 2)
    )
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)
    for state in (forkserver._forkserver, resource_tracker._resource_tracker):
        type(state).__init__(state)


def _start_twin() -> None:
    """Fork this process's twin, and let it start what `subprocess` would start of Python."""
    connection, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        connection.close()
        _control(_SET_DEATH_SIGNAL, signal.SIGKILL)
        _serve(its, parent)
    its.close()
    usual = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def start(popen: Any, *given: Any) -> None:
        named = dict(zip(_NAMES, given, strict=True))
        words = named["args"]
        is_python = isinstance(words, list | tuple) and words[0] == sys.executable
        if not is_python or "-c" in words[:3] or named["preexec_fn"] or named["pass_fds"]:
            usual(popen, *given)
            return
        program = _Program(
            tuple(map(str, words[1:])),
            dict(os.environ if named["env"] is None else named["env"]),
            named["cwd"],
            named["start_new_session"],
        )
        streams = [named[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [number if found == -1 else found for number, found in enumerate(streams)]
        with _inheriting():
            try:
                socket.send_fds(connection, [pickle.dumps(program)], streams)
                popen.pid = int(connection.recv(_LONGEST))
            except OSError:  # the twin had a signal that ended it
                usual(popen, *given)
                return
        popen._child_created = True
        popen._close_pipe_fds(*(named[name] for name in _NAMES[10:16]))

    subprocess.Popen._execute_child = start  # type: ignore[attr-defined]


# Parameters of `Popen._execute_child` behind the first.
_CODE = subprocess.Popen._execute_child.__code__  # type: ignore[attr-defined]
_NAMES = _CODE.co_varnames[1 : _CODE.co_argcount]


def _serve(connection: socket.socket, parent: int) -> NoReturn:
    """Fork a child of `parent` for each program that it asks for."""
    while True:
        message, streams, _, _ = socket.recv_fds(connection, _LONGEST, 3)
        if not message:
            os._exit(0)
        answer, number = os.pipe()
        # The child of a process that has ended is one of the nearest ancestor that asks for it.
        if os.fork() == 0:
            if (child := os.fork()) != 0:
                os.write(number, str(child).encode())
                os._exit(0)
            for file in (answer, number, connection.detach()):
                os.close(file)
            while os.getppid() != parent:
                if not psutil.pid_exists(parent):  # it was killed meanwhile
                    os._exit(1)
                time.sleep(0.001)
            _run(pickle.loads(message), streams)
            raise SystemExit(0)
        os.wait()
        connection.send(os.read(answer, 32))
        for file in (answer, number, *streams):
            os.close(file)


@contextmanager
def _inheriting() -> Iterator[None]:
    """A block in which this process gets the children of descendants that end."""
    _control(_SET_SUBREAPER, 1)
    try:
        yield
    finally:
        _control(_SET_SUBREAPER, 0)


def _control(option: int, value: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
