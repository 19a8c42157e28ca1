"""A torchrun child process: started, waited for, and ended with all its descendants."""

from __future__ import annotations

import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from megatron_distill.runtime.termination import stop_signals

__all__ = [
    "ChildOutcome",
    "available_cores",
    "keep_threads_awake",
    "processor_name",
    "protect_script_options",
    "run_child",
    "run_ranks",
    "shutdown_seconds",
    "threads_per_process",
    "torchrun_command",
]

# torchrun's options without a value; any other option takes one, as the next word or after `=`.
_FLAGS = (
    "-h",
    "-m",
    "--help",
    "--module",
    "--no-python",
    "--no_python",
    "--run-path",
    "--run_path",
    "--standalone",
    "--virtual-local-rank",
    "--virtual_local_rank",
)

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 120.0
_KILL_WAIT_SECONDS = 10.0
_LEAST_SECONDS = 5.0  # to save in; ranks that are asked later are left to the scheduler


@dataclass(frozen=True)
class ChildOutcome:
    """Outcome of a child: its exit status, and the signal that asked this process to stop.

    is_late: it was killed, since it had not ended in time after the signal.
    """

    status: int
    interrupted_by: int | None
    is_late: bool = False


def torchrun_command(script: str, arguments: Sequence[str], *, processes: int) -> list[str]:
    """Return the command that runs `script` in `processes` ranks on this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={processes}", script, *arguments]


def protect_script_options(arguments: Sequence[str]) -> list[str]:
    """Return torchrun's arguments with `--` before the script's name, if there is a script.

    torchrun parses abbreviated options even after the script's name: a script's `--run` is an
    error, since it could mean `--run-path`. `--` ends torchrun's own options.
    """
    takes_value = False
    for place, word in enumerate(arguments):
        if takes_value:
            takes_value = False
        elif word == "--":
            break
        elif not word.startswith("-") or word == "-":
            return [*arguments[:place], "--", *arguments[place:]]
        else:
            takes_value = "=" not in word and not _is_flag(word)
    return list(arguments)


def _is_flag(word: str) -> bool:
    """Return whether an option, which may be shortened, takes no value."""
    if not word.startswith("--"):
        return word in _FLAGS or len(word) > 2  # `-t3` contains its value
    return any(flag.startswith(word) for flag in _FLAGS)


def keep_threads_awake() -> None:
    """Let torch's threads on a CPU wait awake for the next operation; call before torch is loaded.

    Where a process has more of them than cores, as with one that reads data, libgomp lets them
    sleep after two microseconds. Waking one takes longer than a small operation. Awake they wait 20
    microseconds then, and else 3 milliseconds, its default. A user's own policy is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "active"
        os.environ.setdefault("GOMP_SPINCOUNT", "300000")


def threads_per_process(processes: int) -> int:
    """Return the number of threads per process that uses every core once."""
    return max(1, available_cores() // processes)


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    """Return the model of the CPU as Linux names it, elsewhere its architecture."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text(errors="replace").splitlines() if about.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or f"{platform.machine()} CPU"


def run_child(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    grace_seconds: float = _GRACE_SECONDS,
    latest: float = math.inf,
    signals: Sequence[signal.Signals] | None = None,
    second_kills: bool = True,
) -> ChildOutcome:
    """Run `command` to its end, with this process's standard streams; leave no process behind.

    The first of the signals, None: `stop_signals`, is sent to the command's direct children as
    SIGTERM. These are the ranks of torchrun, which finish their step, save and exit. A second one,
    unless a scheduler may repeat it (`second_kills`), or `grace_seconds` after the first, kills
    them. So does the time `latest`, seconds since the epoch, after a first one that comes some
    seconds before. Call it from the main thread.
    """
    # In a new session, so that Ctrl-C reaches the child only through this process: torchrun
    # would react by ending its ranks in the middle of a step.
    child = subprocess.Popen(command, env=dict(environment), start_new_session=True)
    family = _Family(child, second_kills=second_kills)
    handled = stop_signals() if signals is None else signals
    previous = {number: signal.signal(number, family.on_signal) for number in handled}
    try:
        status = family.wait(grace_seconds, latest)
    finally:
        family.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return ChildOutcome(status, family.interrupted_by, is_late=family.is_late)


def run_ranks(module: str, arguments: Sequence[str], *, processes: int) -> int:
    """Run `python -m module` in `processes` ranks on this machine and return their exit status.

    An error of the ranks is the last text on standard error. Signals end the ranks as in
    `run_child`. Call it from the main thread.
    """
    words = ["--standalone", f"--nproc-per-node={processes}", "-m", module, *arguments]
    launcher = [sys.executable, "-m", "megatron_distill.runtime.local_ranks"]
    threads = str(threads_per_process(processes))
    outcome = run_child(
        [*launcher, *protect_script_options(words)],
        environment={"OMP_NUM_THREADS": threads, **os.environ},
        grace_seconds=shutdown_seconds(),
    )
    status = outcome.status
    if status < 0:  # torchrun itself was ended, before its ranks started or with them
        sys.stderr.write("stopped\n")
        status = 128 - status
    if outcome.interrupted_by is not None and status == 128 + signal.SIGTERM:
        return 128 + outcome.interrupted_by  # the ranks got SIGTERM instead of this signal
    return status


def shutdown_seconds() -> float:
    """Return the seconds for ranks to finish their step and save, from torchrun's variable."""
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300"))


class _Family:
    """A child process and its descendants observed so far."""

    def __init__(self, child: subprocess.Popen[bytes], *, second_kills: bool) -> None:
        self._child = child
        self._second_kills = second_kills
        self._process = psutil.Process(child.pid)
        self._seen: set[psutil.Process] = set()
        self._kill_at: float | None = None
        self._signals = 0
        self.interrupted_by: int | None = None
        self.is_late = False

    def on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP and self._signals:
            return  # a terminal closed after Ctrl-C is not a second request
        self._signals += 1
        if self.interrupted_by is None:
            self.interrupted_by = number

    def wait(self, grace_seconds: float, latest: float) -> int:
        answered = 0
        while True:
            try:
                return self._child.wait(timeout=_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                self._look()
            if self._signals > answered:
                # Without `second_kills` two signals at once are one request.
                is_first = answered == 0 and (self._signals == 1 or not self._second_kills)
                answered = self._signals
                if is_first:
                    self._ask_to_stop()
                    left = latest - time.time()
                    cut = min(grace_seconds, left) if left > _LEAST_SECONDS else grace_seconds
                    self._kill_at = time.monotonic() + cut
                elif self._second_kills:
                    self.kill()
            elif self._kill_at is not None and time.monotonic() > self._kill_at:
                self.is_late = True
                self.kill()

    def kill(self) -> None:
        """Kill all processes that still run."""
        self._look()
        left = [process for process in self._seen if process.is_running()]
        for process in left:
            _signal(process, signal.SIGKILL)
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        psutil.wait_procs(left, timeout=_KILL_WAIT_SECONDS)

    def _ask_to_stop(self) -> None:
        ranks = self._children(recursive=False)
        for process in ranks or [self._process]:
            _signal(process, signal.SIGTERM)

    def _look(self) -> None:
        self._seen.update(self._children(recursive=True))

    def _children(self, *, recursive: bool) -> list[psutil.Process]:
        try:
            return self._process.children(recursive=recursive)
        except psutil.NoSuchProcess:
            return []


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
