"""A rank that fails alone ends the run within seconds, with its name and the reason."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.forked_launches import ForkedLaunch, rank_of
from tests.e2e.processes import SCRIPT, TORCHRUN
from tests.e2e.runs import Inputs, environment, step_records

RANK, STEP = 1, 3
# Without a watch it is four minutes. An idle machine takes seven seconds, most of them waits of the
# watch; the bound is for one that is many times as slow.
SECONDS_TO_THE_END = 120.0
# More than a start and a step wait for a rank that stands for some seconds.
SILENT_SECONDS = 12

# Python imports this in every process; in one rank the loop's question for a signal fails. Others
# ask too: rank 0 does while it waits for the lock of the output folder.
FAULTY_RANK = f"""
import os, sys
rank = os.environ.get("RANK")
if rank == "{RANK}" or rank == "0" and "BUSY" in os.environ:
    import signal, time
    from pathlib import Path
    from megatron_distill.runtime.termination import TerminationRequest
    asked = 0
    def received(self):
        global asked
        if sys._getframe(1).f_code.co_name != "_vote":
            return False
        asked += 1
        if asked == {STEP} and rank == "0":
            time.sleep(600)
        if asked == {STEP}:
            Path(os.environ["FAULT_FILE"]).write_text(f"{{os.getpid()}} {{time.time()}}")
            FAULT
        return False
    TerminationRequest.received = property(received)
"""
FAULTS = {
    "exception": "raise LookupError('no such thing')",
    "memory": "raise MemoryError",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
}
STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"
OVERRIDES = (
    "train.steps=2000", "checkpoint.save=true", "checkpoint.asynchronous=true",
    "checkpoint.interval=1",
)  # fmt: skip


@dataclass
class Faulty:
    """A run of two ranks, one of which fails."""

    process: ForkedLaunch
    log: Path
    fault: Path

    def output(self) -> str:
        """Everything that the run has written."""
        return self.log.read_text()

    def wait(self) -> int:
        """Return the exit status, which must be there soon after the fault."""
        status = self.process.wait(timeout=240)
        failed = float(self.fault.read_text().split()[1])
        assert time.time() - failed < SECONDS_TO_THE_END, self.output()
        return status

    def wait_for_the_fault(self) -> int:
        """Return the number of the process with the fault, once it has come; it may be gone."""
        deadline = time.monotonic() + 240
        while not (self.fault.exists() and self.fault.read_text()):
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)
        return int(self.fault.read_text().split()[0])


def command(launcher: str, config: Path, output: Path, *overrides: str) -> list[str]:
    """The command line of a run of two ranks."""
    changes = [f"output={output}", *OVERRIDES, *overrides]
    if launcher == "torchrun":
        two = ["--standalone", "--nproc-per-node=2", str(SCRIPT)]
        return [*TORCHRUN, *two, "--config", str(config), *changes]
    train = [sys.executable, "-m", "megatron_distill.cli", "train", str(config)]
    return [*train, "--processes", "2", *changes]


@contextmanager
def started(
    folder: Path, words: Sequence[str], fault: str, *, hook: str = FAULTY_RANK, **variables: str
) -> Iterator[Faulty]:
    """Start a run with a fault, which `hook` brings about; nothing of it is left at the end."""
    faults = folder / "faults"
    faults.mkdir()
    (faults / "sitecustomize.py").write_text(hook.replace("FAULT\n", f"{fault}\n"))
    shared = environment(FAULT_FILE=str(folder / "fault"), **variables)
    shared["PYTHONPATH"] = f"{faults}{os.pathsep}{shared['PYTHONPATH']}"
    log = folder / "log"
    process = ForkedLaunch.start(words, shared, log)
    try:
        yield Faulty(process, log, folder / "fault")
    finally:
        process.end()


def descendants_of(launcher: int) -> list[psutil.Process]:
    """The processes below a launcher; none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(launcher).children(recursive=True)
    return []


# A rank that torchrun has started again does not fail.
ONCE = FAULTY_RANK.replace(
    "asked += 1\n", "asked += os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
)


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_go_on(inputs: Inputs, tmp_path: Path) -> None:
    output = tmp_path / "run"
    words = command("torchrun", inputs.folder / "dense.yaml", output, "train.steps=6")
    place = words.index("--standalone")
    words[place:place] = ["--max-restarts=1"]
    with started(tmp_path, words, FAULTS["exception"], hook=ONCE) as run:
        assert run.process.wait(timeout=240) == 0, run.output()
    assert [record["step"] for record in step_records(output)] == list(range(1, 7))
    assert f"failed at step {STEP}: LookupError" in run.output()


CASES = (
    "exception torchrun", "memory torchrun", "memory processes", "killed torchrun",
    "killed processes",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_fails_alone_ends_the_run(inputs: Inputs, tmp_path: Path, case: str) -> None:
    fault, launcher = case.split()
    words = command(launcher, inputs.folder / "dense.yaml", tmp_path / "run")
    with started(tmp_path, words, FAULTS[fault]) as run:
        run.wait_for_the_fault()
        ranks = descendants_of(run.process.pid)
        status = run.wait()
        _, alive = psutil.wait_procs(ranks, timeout=SECONDS_TO_THE_END)
        assert alive == []
    text = run.output()
    if fault == "killed":
        assert status == (1 if launcher == "torchrun" else 128 + signal.SIGKILL), text
        assert ("SIGKILL" if launcher == "processes" else "Signal 9 (SIGKILL)") in text
        return
    assert status == 1, text
    name = {"exception": "LookupError: no such thing", "memory": "MemoryError"}[fault]
    assert "in received" in text  # the traceback, with the line that failed
    place = f"rank 1 on {socket.gethostname()} failed at step {STEP}"
    assert f"error: {place}: {name}; its traceback is above" in text
    if launcher == "processes":
        assert text.rstrip().endswith("its traceback is above")


@pytest.mark.slow
def test_a_peer_outside_of_collectives_ends_too(inputs: Inputs, tmp_path: Path) -> None:
    words = command("torchrun", inputs.folder / "dense.yaml", tmp_path / "run")
    with started(tmp_path, words, FAULTS["exception"], BUSY="yes") as run:
        assert run.wait() == 1
    assert "rank 0 ends, because rank 1 has failed" in run.output()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "processes"])
def test_a_rank_that_stops_answering_is_named(
    inputs: Inputs, tmp_path: Path, launcher: str
) -> None:
    short = f"runtime.timeout_seconds={SILENT_SECONDS}"
    words = command(launcher, inputs.folder / "dense.yaml", tmp_path / "run", short)
    with started(tmp_path, words, STOPPED) as run:
        stopped = psutil.Process(run.wait_for_the_fault())
        (other,) = [
            process for process in descendants_of(run.process.pid) if rank_of(process) == 1 - RANK
        ]
        gone, _ = psutil.wait_procs([other], timeout=SECONDS_TO_THE_END)
        assert gone, run.output()
        # torchrun gives the stopped rank half a minute; this test does not.
        stopped.kill()
        status = run.wait()
    text = run.output()
    assert status != 0, text
    assert f"rank 0 at step {STEP} waited in all_reduce (begin_highest, collectives.py:" in text
    silent = f"No answer from rank 1 on {socket.gethostname()}: look at its output and its machine"
    assert silent in text
