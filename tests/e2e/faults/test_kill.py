"""A run that is killed or asked to stop, at any moment, loses no step that was saved."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.distributed.pool import Pool
from tests.e2e.evaluation.test_evaluation import DROPOUT, evaluations, saved
from tests.e2e.processes import SIGNALLING_TORCHRUN, Hold, Started, torchrun
from tests.e2e.runs import Inputs, checkpoints, course, records, run, step_records
from tests.e2e.tokenizers.test_several_tokenizers import write_config
from tests.e2e.training.test_resume import data_place

STEPS = 60
OVERRIDES = (f"train.steps={STEPS}", "checkpoint.save=true", "checkpoint.interval=3")

Course = list[tuple[float, ...]]


def undisturbed_course(pool: Pool, inputs: Inputs, name: str, *overrides: str) -> Course:
    """A configuration's course without any signal."""
    output = inputs.folder / "-".join(("undisturbed", name, *overrides))
    return course(run(pool, 2, inputs.folder / f"{name}.yaml", output, *OVERRIDES, *overrides))


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, inputs: Inputs) -> Course:
    """The result that every run here must have in the end, bit by bit."""
    return undisturbed_course(pool, inputs, "dense")


def steps_done(output: Path) -> int:
    """Number of whole lines in the log."""
    log = output / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def has_steps(output: Path, number: int) -> Callable[[], bool]:
    return lambda: steps_done(output) >= number


def held(output: Path, lines: int, **given: float) -> Hold:
    """A run that a test interrupts before it comes to so many lines."""
    return Hold(output / "metrics.jsonl", lines, **given)


def is_saving(output: Path, after: int) -> Callable[[], bool]:
    """Whether a checkpoint is being written, once `after` steps are done."""
    folder = output / "checkpoints"
    return lambda: steps_done(output) >= after and any(folder.glob("step_???????.partial/*"))


def send_to_all(started: Started, number: int) -> None:
    """A signal to every process that torchrun was seen to start, and that is still there."""
    for process in started.seen:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def hold_during_a_save(started: Started, output: Path, after: int) -> None:
    """Stop the processes where a save is half done: one that was seen may be over by now."""
    saving = is_saving(output, after)
    while True:
        started.wait_until(saving)
        send_to_all(started, signal.SIGSTOP)
        if saving():
            return
        send_to_all(started, signal.SIGCONT)


def arguments(inputs: Inputs, output: Path, *overrides: str, name: str = "dense") -> list[str]:
    config = inputs.folder / f"{name}.yaml"
    return ["--config", str(config), f"output={output}", *OVERRIDES, *overrides]


def kill_everything(started: Started) -> None:
    """SIGKILL to torchrun and to all it was seen to start, at once."""
    send_to_all(started, signal.SIGKILL)
    started.process.kill()
    started.wait()
    started.wait_for_all()


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_killed_during_a_save_it_goes_on_from_the_last_complete_checkpoint(
    pool: Pool, inputs: Inputs, tmp_path: Path, undisturbed: Course, asynchronous: str
) -> None:
    output = tmp_path / "run"
    saving = f"checkpoint.asynchronous={asynchronous}"
    slow = held(output, 12, seconds=0.5)  # saves that are noticed too late are followed by others
    with torchrun(tmp_path, arguments(inputs, output, saving), hold=slow) as started:
        started.wait_until(has_steps(output, 7))
        hold_during_a_save(started, output, after=7)
        kill_everything(started)
    done = steps_done(output)
    assert 7 <= done < STEPS, started.log.read_text()
    left = checkpoints(output)
    complete = [name for name in left if "." not in name]
    assert left != complete
    newest = int(complete[-1].removeprefix("step_"))
    assert done - 6 <= newest <= done
    after = run(pool, 2, inputs.folder / "dense.yaml", output, *OVERRIDES, saving)
    assert course(after) == undisturbed
    assert checkpoints(output) == [f"step_{STEPS - 3:07d}", f"step_{STEPS:07d}"]


def to_the_last_rank(started: Started, number: int) -> None:
    started.ranks()[-1].send_signal(number)


def to_torchrun(started: Started, number: int) -> None:
    os.kill(started.process.pid, number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "number", "status"),
    [
        pytest.param(to_the_last_rank, signal.SIGTERM, 0, id="rank TERM"),
        # torchrun itself ends with 1, but its ranks are given the time to end well. It hands on
        # SIGTERM in the same way, which the ranks get here in any case.
        pytest.param(to_torchrun, signal.SIGINT, 1, id="torchrun INT"),
        pytest.param(to_torchrun, signal.SIGKILL, -signal.SIGKILL, id="torchrun KILL"),
    ],
)
def test_asked_to_stop_the_ranks_finish_their_step_save_and_leave(
    pool: Pool,
    inputs: Inputs,
    tmp_path: Path,
    undisturbed: Course,
    to: Callable[[Started, int], None],
    number: int,
    status: int,
) -> None:
    output = tmp_path / "run"
    with torchrun(tmp_path, arguments(inputs, output), hold=held(output, STEPS // 2)) as started:
        started.wait_until(has_steps(output, 4))
        to(started, number)
        if to is to_the_last_rank:
            started.let_go()  # the other rank, which has no signal
        assert started.wait() == status
        started.wait_for_all()
    assert_ended_well(started, output)
    assert course(run(pool, 2, inputs.folder / "dense.yaml", output, *OVERRIDES)) == undisturbed


def assert_ended_well(started: Started, output: Path) -> None:
    """Every rank left with 0, and the last step is saved."""
    text = started.log.read_text()
    assert started.statuses() == ["0", "0"], text
    done = len(step_records(output))
    assert 4 <= done < STEPS
    assert checkpoints(output)[-1] == f"step_{done:07d}"
    assert f"stopped by a signal after step {done}" in text


@pytest.mark.slow
def test_the_own_launcher_ends_with_zero(inputs: Inputs, tmp_path: Path) -> None:
    output = tmp_path / "run"
    given, hold = arguments(inputs, output), held(output, STEPS // 2)
    with torchrun(tmp_path, given, launcher=SIGNALLING_TORCHRUN, hold=hold) as started:
        started.wait_until(has_steps(output, 4))
        to_torchrun(started, signal.SIGTERM)
        assert started.wait() == 0
        started.wait_for_all()
    assert_ended_well(started, output)


def scoring_of_minutes(folder: Path, kind: str) -> tuple[str, ...]:
    """Settings of an evaluation after every step, of texts to write or of answers to score."""
    rows = [{"q": f"def f{n}", "options": ["a", "b"], "right": 0} for n in range(6_000)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "write.yaml").write_text(
        "kind: generation\nquestion: '{{ q }}'\nanswer: q\ngraders: [exact]\n"
        f"max_new_tokens: 4000\nlimit: 600\nfolder: {folder}\nfiles: [rows.jsonl]\n"
    )
    (folder / "score.yaml").write_text(
        "kind: multiple_choice\nquestion: '{{ q }}'\nchoices: options\nanswer: right\n"
        f"folder: {folder}\nfiles: [rows.jsonl]\n"
    )
    return (
        f"evaluation.tasks=[{folder / f'{kind}.yaml'}]",
        "evaluation.interval=1",
        "evaluation.at_start=false",
        "evaluation.teacher=false",
        "evaluation.batch_tokens=8",  # many waves of one request
        "student.architecture.max_position_embeddings=4096",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("write", ()), ("score", ("parallel.pipeline=2",))],
    ids=["write", "score PP2"],
)
def test_a_signal_to_one_rank_ends_an_evaluation_of_minutes(
    inputs: Inputs, tmp_path: Path, kind: str, layout: tuple[str, ...]
) -> None:
    """Its step is saved, and all ranks leave with 0 before the evaluation is done."""
    output, overrides = tmp_path / "run", (*scoring_of_minutes(tmp_path, kind), *layout)
    with torchrun(tmp_path, arguments(inputs, output, *overrides)) as started:
        started.wait_until(has_steps(output, 1))
        to_the_last_rank(started, signal.SIGTERM)
        assert started.wait() == 0, started.log.read_text()
        started.wait_for_all()
    assert started.statuses() == ["0", "0"]
    assert ["evaluation" in record for record in records(output)] == [False]
    assert checkpoints(output) == ["step_0000001"]


@pytest.mark.slow
def test_killed_during_an_evaluation_it_goes_on_bit_by_bit(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    output, overrides = tmp_path / "run", scoring_of_minutes(tmp_path, "score")
    often = (*overrides, "checkpoint.interval=1", "evaluation.interval=2", DROPOUT)
    with torchrun(tmp_path, arguments(inputs, output, *often)) as started:
        started.wait_until(has_steps(output, 2))
        time.sleep(1.0)
        started.look()
        kill_everything(started)
    assert ["evaluation" in record for record in records(output)] == [False] * 2
    assert checkpoints(output) == ["step_0000001"]
    given = (*OVERRIDES, *often, "evaluation.limit=20", "train.steps=5")
    config, whole = inputs.folder / "dense.yaml", tmp_path / "whole"
    expected = run(pool, 2, config, whole, *given)
    assert course(run(pool, 2, config, output, *given)) == course(expected)
    assert saved(output, 5) == saved(whole, 5)
    assert [step for step, _ in evaluations(output)] == [2, 4, 5]
    assert evaluations(output) == evaluations(whole)


@pytest.mark.slow
def test_a_restart_waits_for_the_ranks_of_a_killed_torchrun(
    pool: Pool, inputs: Inputs, tmp_path: Path, undisturbed: Course
) -> None:
    output = tmp_path / "run"
    with torchrun(tmp_path, arguments(inputs, output), hold=held(output, STEPS // 2)) as started:
        started.wait_until(has_steps(output, 4))
        started.process.kill()
        started.wait()
        found = run(pool, 2, inputs.folder / "dense.yaml", output, *OVERRIDES)
        started.wait_for_all()
    assert course(found) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps", "overrides"),
    [
        ("dense", STEPS, ["checkpoint.asynchronous=true"]),
        ("several_tokenizers", 24, ["data.workers=2", "parallel.tensor=2"]),
    ],
    ids=["dense", "several tokenizers"],
)
def test_killed_again_and_again_it_arrives(
    pool: Pool, inputs: Inputs, tmp_path: Path, name: str, steps: int, overrides: list[str]
) -> None:
    overrides = [*overrides, f"train.steps={steps}"]
    if name == "several_tokenizers":
        write_config(inputs)
    undisturbed = undisturbed_course(pool, inputs, name, *overrides)
    output = tmp_path / "run"
    chance = random.Random(5)
    given = arguments(inputs, output, *overrides, name=name)
    for _ in range(3):
        before = steps_done(output)
        hold = held(output, before + steps // 4)
        with torchrun(tmp_path, given, hold=hold) as started:
            if chance.random() < 0.7:
                started.wait_until(lambda before=before: steps_done(output) != before)  # type: ignore[misc]
            time.sleep(chance.uniform(0.0, 1.0))
            started.look()
            kill_everything(started)
    with torchrun(tmp_path, given) as started:
        assert started.wait() == 0, started.log.read_text()
    assert course(step_records(output)) == undisturbed
    assert checkpoints(output) == [f"step_{steps - 3:07d}", f"step_{steps:07d}"]
    assert data_place(output, steps)["epoch"] == 0  # so each kill was inside an epoch
