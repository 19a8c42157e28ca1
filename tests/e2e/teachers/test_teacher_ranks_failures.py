"""A rank of either role that fails ends the launch, and one line names it; SIGTERM saves."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import time
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from tests.distributed.pool import Pool
from tests.e2e.faults.test_kill import held, hold_during_a_save, send_to_all
from tests.e2e.faults.test_lone_failures import command, descendants_of, started
from tests.e2e.forked_launches import rank_of
from tests.e2e.processes import HOLD, SIGNALLING_TORCHRUN, Started, torchrun
from tests.e2e.runs import Inputs, checkpoints, course, run, step_records
from tests.e2e.teachers.test_several_teacher_ranks import apart
from tests.e2e.teachers.test_several_teachers import write_several
from tests.e2e.teachers.test_teacher_ranks import FEATURES, SENT, TOP_K, run_apart, train_in_roles

APART = "teacher.ranks=1"
# The law is a minute, by looks: tests/unit/runtime/test_lone_failure.py. The bound has another one
# for a slow machine; without the watch it is four.
SECONDS_TO_THE_END = 120.0
# More than a start and a step wait for a rank that stands for some seconds.
SILENT_SECONDS = 12

# Python imports this in every process; one rank fails at a message of one kind.
FAULTY_RANK = """
import os
if os.environ.get("RANK") == "RANK_NUMBER":
    import signal, sys, time
    from pathlib import Path
    from megatron_distill.runtime.bridge import Bridge
    usual, asked = Bridge.METHOD, 0
    def exhaust_memory():
        import resource, torch
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 2**28
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        held = []
        while True:
            held.append(torch.ones(2**24, dtype=torch.uint8))
    def failing(self, tensor, peer, *, tag):
        global asked
        asked += tag == KIND
        if asked == int(os.environ["FAULT_MESSAGE"]):
            Path(os.environ["FAULT_FILE"]).write_text(f"{os.getpid()} {time.time()}")
            FAULT
        return usual(self, tensor, peer, tag=tag)
    Bridge.METHOD = failing
"""


def hook(rank: int, method: str, kind: int) -> str:
    """The module for a rank that fails when it sends or receives a message of a kind."""
    named = FAULTY_RANK.replace("RANK_NUMBER", str(rank)).replace("METHOD", method)
    return named.replace("KIND", str(kind))


# Looks at the signs of life of other ranks each second.
QUICK_WATCH = """
if "RANK" in os.environ:
    from megatron_distill.runtime import lone_failure
    lone_failure._WATCH_SECONDS = 1.0
"""
COMMAND, ROWS, CREDIT = 1, 3, 6
HOOKS = {"student": hook(0, "send", COMMAND), "teacher": hook(1, "receive", COMMAND)}
HOOKS = {role: own + QUICK_WATCH for role, own in HOOKS.items()}
# After a second every other rank waits.
KILLED = "time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)"
EXHAUSTED = "exhaust_memory()"


@dataclass(frozen=True)
class Failure:
    """A rank that fails at one of its messages, and the place that the report names.

    With `ranks` of each role. The first command is of step 1; the sixth is of step 6, one ahead,
    after a checkpoint of step 2. A failing rank names its own step and unit, of a killed one
    another rank names those at which it waits.
    """

    name: str
    hook: str
    message: int
    fault: str
    at: str
    ranks: int = 1
    layout: Sequence[str] = ()


TP2_AND_DP2 = ("parallel.tensor=2", "teacher.parallel={tensor: 1}")
# A step has four units. While a command is sent no unit is under way at the student.
FAILURES = {
    "student at step 1": Failure("student.0", HOOKS["student"], 1, KILLED, "at step 1, or "),
    "teacher at step 1": Failure("teacher.0", HOOKS["teacher"], 1, KILLED, "at step 1, unit 0, or"),
    "memory of the student": Failure(
        "student.0", hook(0, "send", CREDIT) + QUICK_WATCH, 6, EXHAUSTED, "at step [3-6]: "
    ),
    "memory of the teacher": Failure(
        "teacher.0", HOOKS["teacher"], 6, EXHAUSTED, r"at step 5, unit \d: "
    ),
    "second of the teacher": Failure(
        # With the usual time between looks at other ranks. The other rank of the teacher may wait
        # for the data of the step ahead, in no unit.
        "teacher.1", hook(3, "receive", COMMAND), 6, KILLED, r"at step [4-7](, unit \d)?, or",
        2, TP2_AND_DP2,
    ),
    "second of the teacher at step 1": Failure(
        "teacher.1", hook(3, "receive", COMMAND) + QUICK_WATCH, 1, KILLED,
        r"at step 1(, unit \d)?, or ", 2,
    ),
    # It offers its slots for a round; the teacher may have computed the step ahead.
    "second of the student at step 1": Failure(
        "student.1", hook(1, "send", CREDIT) + QUICK_WATCH, 1, KILLED,
        r"at step [12](, unit \d)?, or ", 2,
    ),
    "second of the student": Failure(
        "student.1", hook(1, "send", CREDIT) + QUICK_WATCH, 6, KILLED,
        r"at step [4-6](, unit \d)?, or ", 2,
    ),
}  # fmt: skip
# Between two meetings of a start: the teacher has its model and opens its data, or the student
# has its own and has not yet told the teacher where it begins. Its second rank offers its slots
# before it has a model.
FAULTY_START = """
import os
if os.environ.get("RANK") == "RANK_NUMBER":
    import signal, time
    from pathlib import Path
    from megatron_distill.runtime import heartbeats, lone_failure
    from megatron_distill.runtime.bridge import Bridge
    usual = Bridge.METHOD
    def failing(self, name, *value):
        if name == "PLACE":
            Path(os.environ["FAULT_FILE"]).write_text(f"{os.getpid()} {time.time()}")
            FAULT
        return usual(self, name, *value)
    Bridge.METHOD = failing
if "RANK" in os.environ:
    from megatron_distill.runtime import heartbeats, lone_failure
    heartbeats.SILENT_SECONDS, lone_failure._WATCH_SECONDS = 4.0, 1.0
"""


def start_hook(rank: int, method: str, place: str = "start") -> str:
    """The module for a rank that fails when it names a place of the start to the launch."""
    named = FAULTY_START.replace("RANK_NUMBER", str(rank)).replace("METHOD", method)
    return named.replace("PLACE", place)


STARTS = {
    "student.0": start_hook(0, "publish"),
    "student.1": start_hook(1, "publish", "slots/teacher/1"),
    "teacher.0": start_hook(1, "published"),
    "teacher.1": start_hook(3, "published"),
}
# The numbers of these ranks, and how many each role has.
PLACES = {"student.0": (0, 1), "student.1": (1, 2), "teacher.0": (1, 1), "teacher.1": (3, 2)}


def words(inputs: Inputs, output: Path, *overrides: str, ranks: int = 1) -> list[str]:
    """The command line of a student and a teacher with as many ranks each."""
    own = f"teacher.ranks={ranks}"
    given = command("processes", inputs.folder / "dense.yaml", output, own, *overrides)
    given[given.index("--processes") + 1] = str(2 * ranks)
    return given


def fail(
    inputs: Inputs,
    folder: Path,
    fault: str,
    *overrides: str,
    hook: str,
    message: int = 3,
    ranks: int = 1,
) -> tuple[str, float]:
    """Run until a role's fault has ended it; returns the output and the seconds to the end."""
    given = words(inputs, folder / "run", *overrides, ranks=ranks)
    return ended(folder, given, fault, hook=hook, message=message)


def ended(
    folder: Path, given: Sequence[str], fault: str, *, hook: str, message: int
) -> tuple[str, float]:
    """The same with a command line."""
    with started(folder, given, fault, hook=hook, FAULT_MESSAGE=str(message)) as launch:
        launch.wait_for_the_fault()
        assert launch.process.wait(timeout=240) != 0
        failed = float(launch.fault.read_text().split()[1])
        return launch.output(), time.time() - failed


def cause_of(text: str) -> str:
    """The only line of an error."""
    (cause,) = [line for line in text.splitlines() if line.startswith("error: ")]
    return cause


@pytest.mark.slow
def test_a_silent_teacher_is_named_with_unit_and_route(inputs: Inputs, tmp_path: Path) -> None:
    stages = 2  # the first one waits longer than the last, which alone has the route to tell
    short = (f"runtime.timeout_seconds={SILENT_SECONDS}", f"parallel.pipeline={stages}")
    text, seconds = fail(
        *(inputs, tmp_path, "time.sleep(600)", *short, "teacher.parallel={pipeline: 1}"),
        hook=hook(stages, "receive", COMMAND), ranks=stages,
    )  # fmt: skip
    assert seconds < SECONDS_TO_THE_END, text
    cause, last = cause_of(text), f"student.{stages - 1}"
    assert re.search(r"no answer for unit \d of step \d within 9.6 s, 80% of ", cause), text
    assert f"route teacher.0 to {last}" in cause
    assert cause.startswith(f"error: {last} on {socket.gethostname()} failed at step ")


@pytest.mark.slow
def test_a_student_that_hangs_ends_the_launch_with_the_place(
    inputs: Inputs, tmp_path: Path
) -> None:
    short, hangs = f"runtime.timeout_seconds={SILENT_SECONDS}", HOOKS["student"]
    text, seconds = fail(inputs, tmp_path, "time.sleep(600)", short, hook=hangs)
    assert SILENT_SECONDS < seconds < SECONDS_TO_THE_END, text
    cause = cause_of(text)
    assert cause.startswith(f"error: student.0 on {socket.gethostname()} failed at step 2: "), text
    assert "its main thread has waited in failing, sitecustomize.py:" in cause
    assert f"for runtime.timeout_seconds = {SILENT_SECONDS} s" in cause
    assert "time.sleep(600)" in text  # the last of its calls


# With the default of `runtime.timeout_seconds`.
SHORT_SILENCE = f"""
    from megatron_distill.runtime import heartbeats
    heartbeats.SILENT_SECONDS = {SILENT_SECONDS}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("role", "peer"), [("student", "teacher"), ("teacher", "student")])
def test_a_stopped_rank_is_named_by_the_other_role(
    inputs: Inputs, tmp_path: Path, role: str, peer: str
) -> None:
    given, quick = words(inputs, tmp_path / "run"), HOOKS[role] + SHORT_SILENCE
    stopped = "os.kill(os.getpid(), signal.SIGSTOP)"
    with started(tmp_path, given, stopped, hook=quick, FAULT_MESSAGE="3") as launch:
        process = psutil.Process(launch.wait_for_the_fault())
        # A teacher waits for the next command; a wait of its own would have no limit.
        number, _ = PLACES[f"{peer}.0"]
        (waiting,) = (one for one in descendants_of(launch.process.pid) if rank_of(one) == number)
        gone, _ = psutil.wait_procs([waiting], timeout=SECONDS_TO_THE_END)
        assert gone, launch.output()
        process.kill()  # the launcher would give it half a minute
        assert launch.process.wait(timeout=240) != 0
    cause = cause_of(launch.output())
    assert cause.startswith(f"error: {role}.0 on "), cause
    assert f"no sign of life for {SILENT_SECONDS} s, and " in cause
    assert f"{peer}.0 ends" in cause


SENT_VALUES: dict[str, Sequence[str]] = {
    "hidden states": (),
    "top-k": (SENT, TOP_K),
    "layers alone": (FEATURES, "objective.terms=[]"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SENT_VALUES)
def test_values_that_are_not_finite_end_the_launch(
    inputs: Inputs, tmp_path: Path, case: str
) -> None:
    given = ("teacher.architecture.embedding_scale=1.0e+39", *SENT_VALUES[case])
    # The seconds are from the teacher's wait for its first command.
    text, seconds = fail(inputs, tmp_path, "pass", *given, hook=HOOKS["teacher"], message=1)
    assert seconds < SECONDS_TO_THE_END, text
    cause = cause_of(text)
    place = f"error: student.0 on {socket.gethostname()} failed at step 1, unit 0: AnswerError: "
    assert cause.startswith(f"{place}unit 0 of step 1 from teacher.0 to student.0 has "), text
    assert "values that are not finite" in cause


@pytest.mark.slow
def test_a_teacher_without_a_checkpoint_is_reported_once(inputs: Inputs, tmp_path: Path) -> None:
    given = words(inputs, tmp_path / "run", "teacher.checkpoint=runs/nothing")
    with started(tmp_path, given, "pass", hook="FAULT\n") as launch:
        assert launch.process.wait(timeout=240) == 1
    assert "runs/nothing contains no complete checkpoint" in cause_of(launch.output())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1], ids=["student", "teacher"])
def test_asked_to_stop_it_saves_and_goes_on_on_shared_ranks(
    pool: Pool, inputs: Inputs, tmp_path: Path, rank: int
) -> None:
    config, output = inputs.folder / "dense.yaml", tmp_path / "run"
    steps = ("train.steps=40", "checkpoint.save=true")
    given = ["--config", str(config), f"output={output}", APART, *steps]
    hold = held(output, 20)
    with torchrun(tmp_path, given, launcher=SIGNALLING_TORCHRUN, hold=hold) as launch:
        launch.wait_until(lambda: (output / "metrics.jsonl").exists())
        os.kill(launch.ranks()[rank].pid, signal.SIGTERM)
        launch.let_go()  # the other rank, which has no signal
        assert launch.wait() == 0
        assert launch.statuses() == ["0", "0"]
    (saved,) = checkpoints(output)
    assert int(saved.removeprefix("step_")) < 40
    after = run(pool, 1, config, output, *steps)
    shared = inputs.folder / "undisturbed-shared"
    if not shared.exists():  # it is there after the first case
        run(pool, 1, config, shared, *steps)
    expected = step_records(shared)
    assert course(after) == course(expected)


STEPS = ("checkpoint.asynchronous=false", "checkpoint.interval=2", "train.steps=10")


def goes_on(
    pool: Pool, inputs: Inputs, folder: Path, *layout: str, ranks: int = 1, steps: int = 10
) -> bool:
    """Whether a further start comes to the end that an undisturbed run has."""
    config = inputs.folder / "dense.yaml"
    given = ("checkpoint.save=true", *STEPS, f"train.steps={steps}", *layout)
    undisturbed = inputs.folder / f"undisturbed-{ranks}-{zlib.crc32(repr(given).encode())}"
    run_apart(pool, ranks, ranks, config, folder / "run", *given)
    if not undisturbed.exists():  # it is there after a layout's first case
        run_apart(pool, ranks, ranks, config, undisturbed, *given)
    found, expected = (course(step_records(output)) for output in (folder / "run", undisturbed))
    return len(expected) == steps and found == expected


@pytest.mark.slow
@pytest.mark.parametrize("case", FAILURES)
def test_a_failed_rank_ends_the_launch_and_the_next_start_gives_the_same_bits(
    pool: Pool, inputs: Inputs, tmp_path: Path, case: str
) -> None:
    one = FAILURES[case]
    own = ("teacher.transfer.backend=ipc", *STEPS, *one.layout)
    text, seconds = fail(
        inputs, tmp_path, one.fault, *own, hook=one.hook, message=one.message, ranks=one.ranks
    )
    assert seconds < SECONDS_TO_THE_END, text
    cause = cause_of(text)
    assert text.rstrip().endswith(cause), text
    assert f"{one.name} on {socket.gethostname()}" in cause, text
    assert re.search(one.at, cause), text
    assert ("can't allocate memory" if one.fault == EXHAUSTED else "died of SIGKILL") in cause
    assert bool(checkpoints(tmp_path / "run")) == (one.message > 1)
    assert goes_on(pool, inputs, tmp_path, *one.layout, ranks=one.ranks)


@pytest.mark.slow
def test_a_killed_rank_of_one_of_several_teachers_ends_the_launch(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    own = ("teachers.code.ranks=1", "teachers.law.ranks=1", *STEPS)
    output, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    given = command("processes", write_several(inputs), output, *own)
    given[given.index("--processes") + 1] = "3"
    # The student waits for an answer then, and the other teacher for a command.
    text, seconds = ended(
        tmp_path, given, KILLED, hook=hook(2, "receive", COMMAND) + QUICK_WATCH, message=6
    )
    assert seconds < SECONDS_TO_THE_END, text
    cause = cause_of(text)
    assert text.rstrip().endswith(cause), text
    assert cause.startswith("error: rank 2 died of SIGKILL; "), text
    assert f"No answer from teachers.law.0 on {socket.gethostname()}" in cause, text
    assert re.search(r"at step [4-7], unit \d, or ", cause), text
    assert checkpoints(output)
    for folder in (output, undisturbed):
        apart(pool, 3, write_several(inputs), folder, "checkpoint.save=true", *own)
    found, expected = (course(step_records(folder)) for folder in (output, undisturbed))
    assert len(expected) == 10
    assert found == expected


# Between the header and the rows of a unit of step 5, which go over the network.
BETWEEN = {"student": hook(0, "receive", ROWS), "teacher": hook(1, "send", ROWS)}
BETWEEN = {role: own + QUICK_WATCH for role, own in BETWEEN.items()}


@pytest.mark.slow
@pytest.mark.parametrize("role", BETWEEN)
def test_killed_between_messages_over_the_network_it_starts_again(
    pool: Pool, inputs: Inputs, tmp_path: Path, role: str
) -> None:
    own = ("teacher.transfer.backend=gloo", *STEPS)
    text, seconds = fail(inputs, tmp_path, KILLED, *own, hook=BETWEEN[role], message=18)
    assert seconds < SECONDS_TO_THE_END, text
    cause = cause_of(text)
    assert text.rstrip().endswith(cause), text
    assert cause.startswith(f"error: rank {list(BETWEEN).index(role)} died of SIGKILL; "), text
    assert f"No answer from {role}.0 on {socket.gethostname()}" in cause, text
    # The teacher is a step ahead of the student.
    assert re.search(r"at step [4-6], unit \d, or ", cause), text
    assert goes_on(pool, inputs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_killed_while_it_loads_it_starts_again(
    pool: Pool, inputs: Inputs, tmp_path: Path, name: str
) -> None:
    rank, ranks = PLACES[name]
    text, seconds = fail(inputs, tmp_path, KILLED, *STEPS, hook=STARTS[name], ranks=ranks)
    assert seconds < SECONDS_TO_THE_END, text
    cause = cause_of(text)
    assert cause.startswith(f"error: rank {rank} died of SIGKILL; "), text
    assert f"No answer from {name} on " in cause, text
    assert goes_on(pool, inputs, tmp_path, ranks=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_killed_during_a_save_it_goes_on_from_the_checkpoint_before(
    pool: Pool, inputs: Inputs, tmp_path: Path, name: str
) -> None:
    output, steps, (rank, count) = tmp_path / "run", 24, PLACES[name]
    given = words(inputs, output, *STEPS, f"train.steps={steps}", ranks=count)
    slow = held(output, 12, seconds=0.5).variables(tmp_path)
    with started(tmp_path, given, "pass", hook=HOLD, **slow) as launch:
        ranks = Started(launch.process, launch.log, tmp_path)
        hold_during_a_save(ranks, output, after=7)
        failed = time.monotonic()
        ranks.let_go()
        ranks.ranks()[rank].kill()
        send_to_all(ranks, signal.SIGCONT)
        assert launch.process.wait(timeout=240) != 0
        seconds = time.monotonic() - failed
    text = launch.output()
    assert seconds < SECONDS_TO_THE_END, text
    cause = cause_of(text)
    assert cause.startswith(f"error: rank {rank} died of SIGKILL; "), text
    # Between two steps the other role is in no unit.
    assert re.search(rf"at step \d+(, unit \d+)?, or .* No answer from {name} on ", cause), text
    assert goes_on(pool, inputs, tmp_path, ranks=count, steps=steps)


@pytest.mark.slow
def test_asked_to_stop_while_the_teacher_loads_it_waits_for_it(
    inputs: Inputs, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    given = words(inputs, output, "train.steps=60")
    # Longer than ranks that give signs of life may be without one, which is more than a rank
    # stands on a busy machine.
    hook = STARTS["teacher.0"].replace("_WATCH_SECONDS = 4.0", "_WATCH_SECONDS = 10.0")
    with started(tmp_path, given, "time.sleep(15)", hook=hook) as launch:
        launch.wait_for_the_fault()
        launch.process.send_signal(signal.SIGTERM)
        assert launch.process.wait(timeout=240) == 0, launch.output()
    assert "error" not in launch.output()
    assert checkpoints(output) == ["step_0000001"]


def refusal(rank: int, world: int, config: Path, changes: Sequence[str], full: int | None) -> str:
    """The ConfigError that a start ends with; shared memory is full on the rank `full`."""
    from megatron_distill.errors import ConfigError

    no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    memory = patch("os.posix_fallocate", side_effect=no_space) if rank == full else nullcontext()
    with memory, pytest.raises(ConfigError) as found:
        train_in_roles(rank, world, config, changes, None)
    return str(found.value)


ALIGNED = ("parallel.tensor=2", "teacher.parallel={tensor: 1}")  # the loss has messages then
REFUSED = {
    "NCCL": ("dense", (), "nccl", None, "'nccl' needs GPUs, and this machine has none"),
    "shared memory full": ("aligned", ALIGNED, "ipc", 1, "of shared memory (No space left"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_way_of_answers_that_is_not_there_ends_all_ranks(
    pool: Pool, inputs: Inputs, tmp_path: Path, case: str
) -> None:
    name, layout, backend, full, expected = REFUSED[case]
    changes = [f"output={tmp_path}/run", APART, f"teacher.transfer.backend={backend}", *layout]
    config, world = inputs.folder / f"{name}.yaml", 3 if layout else 2
    found = pool.run(world, refusal, config, changes, full, timeout=SECONDS_TO_THE_END)
    assert len(set(found)) == 1
    assert expected in found[0]
    assert "teacher.transfer.backend" in found[0]
