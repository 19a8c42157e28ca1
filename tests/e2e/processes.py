"""A real torchrun of the entry script, watched, signalled and always ended."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.e2e.forked_launches import ForkedLaunch, rank_of, run_forked
from tests.e2e.runs import environment

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "pretrain_distill.py"
WRAPPER = ROOT / "launch" / "torchrun.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SIGNALLING_TORCHRUN = (sys.executable, str(WRAPPER))
RANKS = 2
PATIENCE = 600.0  # nothing takes that long but a hang

# A run that a test interrupts comes to no end before, however late the test is. Once a file has
# some lines, each question for a signal takes some seconds, until there is one or a go.
HOLD = """\
import os, pathlib, sys, time
if "HOLD_FILE" in os.environ:
    from megatron_distill.runtime.termination import TerminationRequest
    usual = TerminationRequest.received.fget
    file, go = (pathlib.Path(os.environ[name]) for name in ("HOLD_FILE", "HOLD_GO"))
    lines, seconds = (float(os.environ[name]) for name in ("HOLD_LINES", "HOLD_SECONDS"))
    def is_held(request):
        if usual(request) or go.exists() or not file.exists():
            return False
        return file.read_bytes().count(b"\\n") >= lines
    def received(request):
        end = time.monotonic() + seconds
        if sys._getframe(1).f_code.co_name != "_remember":  # not the handler of the signal itself
            while is_held(request) and time.monotonic() < end:
                time.sleep(0.01)
        return usual(request)
    TerminationRequest.received = property(received)
"""


@dataclass(frozen=True)
class Hold:
    """Where a run slows down: once a file is there with so many lines."""

    file: Path
    lines: int = 0
    seconds: float = PATIENCE  # of each question for a signal

    def variables(self, folder: Path) -> dict[str, str]:
        """Return the variables of `HOLD`; the run goes on when `go` is in the folder."""
        return {
            "HOLD_FILE": str(self.file),
            "HOLD_LINES": str(self.lines),
            "HOLD_SECONDS": str(self.seconds),
            "HOLD_GO": str(folder / "go"),
        }


# Runs the script given first and keeps its exit status, which torchrun does not tell.
_RECORDER = f"""\
{HOLD}
import os, pathlib, runpy, sys
folder, script, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = script
sys.path[0] = os.path.dirname(script)
place = pathlib.Path(folder) / ("status" + os.environ["RANK"])
place.unlink(missing_ok=True)
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    place.write_text(str(end.code))
    raise
"""


@dataclass
class Started:
    """A torchrun and every process that it was seen to start."""

    process: ForkedLaunch
    log: Path
    folder: Path
    seen: set[psutil.Process] = field(default_factory=set)

    def look(self) -> set[psutil.Process]:
        """Return the processes below torchrun, and remember them."""
        try:
            now = set(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            now = set()
        self.seen |= now
        return now

    def ranks(self) -> list[psutil.Process]:
        """Return the rank processes, by their number."""
        numbered = {rank_of(process): process for process in self.look()}
        return [numbered[rank] for rank in sorted(rank for rank in numbered if rank is not None)]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to happen while the run is alive, and return at once when it does."""
        self.look()
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.002)
        self.look()

    def wait(self) -> int:
        """Return torchrun's exit status."""
        return self.process.wait(timeout=PATIENCE)

    def let_go(self) -> None:
        """End the hold of the run."""
        (self.folder / "go").touch()

    def wait_for_all(self) -> None:
        """Wait until nothing is left of what torchrun started."""
        gone, alive = psutil.wait_procs(self.seen, timeout=PATIENCE)
        alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert not alive, [process.cmdline() for process in alive]

    def statuses(self) -> list[str]:
        """Return what each rank ended with; a rank that was killed ended with nothing."""
        places = [self.folder / f"status{rank}" for rank in range(RANKS)]
        return [place.read_text() if place.exists() else "killed" for place in places]

    def end(self) -> None:
        """Kill whatever is left."""
        for process in self.look() | self.seen:
            if process.is_running():
                process.kill()
        self.process.kill()
        self.process.wait()


@contextmanager
def torchrun(
    folder: Path,
    arguments: Sequence[str],
    *,
    launcher: Sequence[str] = TORCHRUN,
    script: Path = SCRIPT,
    hold: Hold | None = None,
) -> Iterator[Started]:
    """Start a script on two ranks; whatever happens, nothing of it is left at the end."""
    recorder = folder / "recorder.py"
    recorder.write_text(_RECORDER)
    for place in (*folder.glob("status*"), *folder.glob("go")):
        place.unlink()
    log = folder / "torchrun.log"
    command = [*launcher, "--standalone", f"--nproc-per-node={RANKS}", str(recorder), str(folder)]
    variables = {} if hold is None else hold.variables(folder)
    words = [*command, str(script), *arguments]
    process = ForkedLaunch.start(words, environment(**variables), log)
    started = Started(process, log, folder)
    try:
        yield started
    finally:
        started.end()


def wait_until(condition: Callable[[], bool], during: subprocess.Popen[str] | None = None) -> None:
    """Wait for something, while a process is alive if one is given."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert during is None or during.poll() is None, during.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run_from_imports(*words: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run Python on a CPU in the project's folder until it ends well, from a forked start."""
    done = run_forked([*words], environment(), ROOT, seconds=seconds)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return done


def run_python(*words: str, seconds: float) -> str:
    """Run Python in the project's folder until it ends well, and return what it printed."""
    return run_program(sys.executable, *words, seconds=seconds).stdout


def run_program(*words: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a program in the project's folder until it ends well."""
    done = subprocess.run(
        list(words), env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=seconds,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return done
