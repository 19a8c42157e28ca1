"""A terminal that is closed while a run shows its progress there: the run saves and ends."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.clusters.jobs import ENDLESS, steps_done
from tests.e2e.processes import PATIENCE
from tests.e2e.runs import Inputs, checkpoints, environment, step_records

pytestmark = pytest.mark.slow

# A terminal whose window is closed when a file appears; prints the exit status of its program.
WINDOW = """
import os, pty, select, signal, sys
pid, window = pty.fork()
if pid == 0:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    os.execv(sys.argv[2], sys.argv[2:])
while not os.path.exists(sys.argv[1]):
    if select.select([window], [], [], 0.05)[0]:
        os.read(window, 4096)
os.close(window)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def end_family(started: subprocess.Popen[str]) -> None:
    """Kill a process with its descendants, if they are left."""
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(started.pid).children(recursive=True):
            process.kill()
    started.kill()


@pytest.mark.parametrize("ranks", [(), ("--processes", "2")], ids=["alone", "processes"])
def test_a_run_in_a_closed_terminal_saves_and_ends(
    inputs: Inputs, tmp_path: Path, ranks: tuple[str, ...]
) -> None:
    output, closed = tmp_path / "run", tmp_path / "closed"
    words = ["train", str(inputs.folder / "dense.yaml"), f"output={output}", *ENDLESS, *ranks]
    command = [sys.executable, "-c", WINDOW, str(closed), sys.executable, "-m"]
    started = subprocess.Popen(
        [*command, "megatron_distill.cli", *words],
        env=environment(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + PATIENCE
        while steps_done(output) < 2:
            assert started.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        closed.touch()
        printed, _ = started.communicate(timeout=PATIENCE)
    finally:
        end_family(started)
    assert printed.split() == ["0"]
    last = len(step_records(output))
    assert checkpoints(output) == [f"step_{last:07d}"]
