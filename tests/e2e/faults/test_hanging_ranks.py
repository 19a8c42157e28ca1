"""A rank whose main thread hangs ends the launch within a minute; one that reads or saves does not.

The process of a rank that hangs runs: it gives signs of life, and no connection closes.
"""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import pytest

from tests.e2e.faults.test_lone_failures import command, started
from tests.e2e.runs import Inputs, step_records

# The law is a minute, by looks: tests/unit/runtime/test_lone_failure.py and test_hang_watch.py
# there. The bound has another minute for a slow machine; without the watch it is four.
SECONDS_TO_THE_END = 120.0

# Python imports this in every process. One rank hangs at one of its forward passes, of steps or of
# validations.
FAULTY_RANK = """
import os
if os.environ.get("RANK") == os.environ["FAULTY_RANK"]:
    import time
    from pathlib import Path
    from megatron_distill.train.phase_timers import PhaseTimers
    enter, forward = PhaseTimers.enter, 0
    def entering(self, phase):
        global forward
        enter(self, phase)
        of_steps = os.environ["FAULT_STEPS"] == "yes"
        forward += self._runs == of_steps and phase == "forward"
        if forward == int(os.environ["FAULT_UNIT"]):
            Path(os.environ["FAULT_FILE"]).write_text(f"{os.getpid()} {time.time()}")
            FAULT
    PhaseTimers.enter = entering
"""
# With limits of a few seconds.
SHORT = """
if "RANK" in os.environ:
    from megatron_distill.runtime import hang_watch, lone_failure
    lone_failure._WATCH_SECONDS, hang_watch._LOOK_SECONDS = 1.0, 0.2
    hang_watch.FLOOR_SECONDS, hang_watch._QUIET_SECONDS = 3.0, 2.0
"""
# The rank, its forward pass, the place of this and the limits. A step has four units, of which two
# ranks without a teacher beside them have two each.
HANGS = {
    "a rank, in the first step": (1, "rank 1", "1", "1", SHORT),
    "a rank, with the usual limits": (1, "rank 1", "8", "4", ""),
    "a rank, in a validation": (1, "rank 1", "validation", "3", SHORT),
    "a teacher": (1, "teacher.0", "14", "4, unit 1", SHORT),
    "a teacher, with the usual limits": (1, "teacher.0", "14", "4, unit 1", ""),
    "a student": (0, "student.0", "14", "4, unit 0", SHORT),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HANGS)
def test_a_main_thread_that_sleeps_ends_the_launch_with_its_place(
    inputs: Inputs, tmp_path: Path, case: str
) -> None:
    rank, name, forward, place, limits = HANGS[case]
    own = ("teacher.ranks=1",) if "unit" in place else ()
    validates = forward == "validation"
    own += ("validation.samples=16", "validation.interval=3") if validates else ()
    words = command("processes", inputs.folder / "dense.yaml", tmp_path / "run", *own)
    variables = {"FAULTY_RANK": str(rank), "FAULT_UNIT": "1" if validates else forward}
    variables["FAULT_STEPS"] = "no" if validates else "yes"
    with started(tmp_path, words, "time.sleep(600)", hook=FAULTY_RANK + limits, **variables) as run:
        run.wait_for_the_fault()
        assert run.process.wait(timeout=240) == 1
        failed = float(run.fault.read_text().split()[1])
        seconds, text = time.time() - failed, run.output()
    assert seconds < SECONDS_TO_THE_END, text
    (cause,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert text.rstrip().endswith(cause), text
    where = rf"error: {name} on {socket.gethostname()} at step {place} hangs in entering, "
    assert re.match(rf"{where}sitecustomize\.py:\d+: \d+ s without progress, ", cause), text
    assert f"Main thread of {name} (most recent call last):" in text
    assert "time.sleep(600)" in text  # the last of its calls


# Times in one run until the other rank has asked for the reason: it reads, is between two steps as
# for a save, and computes.
SLOW_RANK = """
import os
if os.environ.get("RANK") == "1":
    import time
    from pathlib import Path
    from megatron_distill.train.phase_timers import PhaseTimers
    start, enter, step = PhaseTimers.start_step, PhaseTimers.enter, 0
    def has_asked():
        file = Path(os.environ["FAULT_FILE"])
        return file.exists() and str(step) in file.read_text().split()
    def until_asked(pause):
        end = time.monotonic() + 120
        while not has_asked() and time.monotonic() < end:
            pause()
    def standing():
        time.sleep(0.1)
    def computing():
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            pass
    def starting(self, number=None):
        global step
        step = number
        if step == 5:
            until_asked(standing)
        start(self, number)
    def entering(self, phase):
        enter(self, phase)
        if step == 4 and phase == "data":
            until_asked(standing)
        if step == 6 and phase == "optimizer":
            until_asked(computing)
    PhaseTimers.start_step, PhaseTimers.enter = starting, entering
"""
NOTED = """
    from pathlib import Path
    collected = hang_watch.HangWatch._collected
    def noting(self, number):
        found = collected(self, number)
        with Path(os.environ["FAULT_FILE"]).open("a") as file:
            file.write(f"{self._progress.step}\\n")
        return found
    hang_watch.HangWatch._collected = noting
"""


@pytest.mark.slow
def test_a_rank_that_reads_saves_or_computes_for_long_goes_on(
    inputs: Inputs, tmp_path: Path
) -> None:
    output, steps = tmp_path / "run", 8
    # With a save after each step both ranks would wait outside of steps.
    own = (f"train.steps={steps}", "checkpoint.interval=0")
    words = command("processes", inputs.folder / "dense.yaml", output, *own)
    with started(tmp_path, words, "pass", hook=SLOW_RANK + SHORT + NOTED) as run:
        assert run.process.wait(timeout=240) == 0, run.output()
        asked = {int(line) for line in run.fault.read_text().split()}
    assert len(step_records(output)) == steps
    assert asked >= {4, 5, 6}
