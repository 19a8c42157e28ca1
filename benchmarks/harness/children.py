"""Measuring processes: one, or as many as there are ranks, each with its share of the cores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

import psutil

from benchmarks.harness.environment import ROOT
from megatron_distill.runtime.torchrun import (
    keep_threads_awake,
    threads_per_process,
    torchrun_command,
)

__all__ = ["ChildFailed", "run_child", "run_to_end"]

_LAST_CHARACTERS = 4000  # of the output of a child that failed
_END_SECONDS = 10.0  # of killed processes


class ChildFailed(SystemExit):
    """A measuring process that failed, or that was ended because its time was over.

    Attributes:
        result: written before; None: nothing was.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


def run_child(
    worker: str,
    words: Sequence[str],
    *,
    processes: int,
    name: str,
    seconds: float,
    threads: int | None = None,
) -> Any:
    """Run a script, a path under benchmarks, which writes its result to the file of ``--result``.

    Each process has its share of the cores, or `threads`.

    Raises ChildFailed with the end of its output if it fails or does not end in time.
    """
    script = str(ROOT / "benchmarks" / worker)
    keep_threads_awake()  # as a command does; a peer's threads have it too
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        result = Path(folder) / "result.json"
        told = [*words, "--result", str(result)]
        command = [sys.executable, script, *told]
        if processes > 1:
            command = torchrun_command(script, told, processes=processes)
        share = str(threads or threads_per_process(processes))
        status = run_to_end(
            command,
            environment={"OMP_NUM_THREADS": share},
            output=subprocess.DEVNULL,
            errors=errors,
            seconds=seconds,
        )
        if status != 0:
            ending = f"not ended after {seconds:.0f} s" if status is None else "failed"
            errors.seek(0)
            output = errors.read()[-_LAST_CHARACTERS:]
            raise ChildFailed(f"{name}: {ending}\n{output}", _written(result))
        return json.loads(result.read_text(encoding="utf-8"))


def run_to_end(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: IO[str] | int,
    errors: IO[str] | int,
    seconds: float,
) -> int | None:
    """Run a command from the tree; return its status, None if its time was over.

    It is ended with all processes that it has started: what it leaves would disturb the next one.
    SIGTERM does so too, and ends this process. Call it from the main thread.
    """
    before = signal.signal(signal.SIGTERM, _leave)
    child = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": _paths(), **environment},
        cwd=ROOT,
        stdout=output,
        stderr=errors,
        start_new_session=True,
    )
    try:
        return child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        _wait_for_group(child.pid)
        signal.signal(signal.SIGTERM, before)


def _paths() -> str:
    """The tree before the user's own paths."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _wait_for_group(group: int) -> None:
    """Wait some seconds for killed processes: until its end each has its memory of a GPU."""
    deadline = time.monotonic() + _END_SECONDS
    while any(_is_in(process, group) for process in psutil.process_iter()):
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _is_in(process: psutil.Process, group: int) -> bool:
    with suppress(psutil.Error, ProcessLookupError, PermissionError):
        is_left = process.status() != psutil.STATUS_ZOMBIE
        return is_left and os.getpgid(process.pid) == group
    return False


def _leave(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _written(result: Path) -> Any:
    """Return the result of a child that failed; None: it has none, or not a whole one."""
    try:
        return json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
