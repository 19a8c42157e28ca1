"""A child run of the quickstart: made once, continued, or refused."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_distill.errors import ConfigError, TrainingError
from megatron_distill.evaluation import child_runs
from megatron_distill.evaluation.child_runs import ChildRun, RunStoppedError, ask, make
from megatron_distill.runtime.torchrun import ChildOutcome

STEPS = 5


class Children:
    """In place of real children: each call writes metrics up to `reach`, and ends as told."""

    def __init__(self) -> None:
        self.commands: list[Sequence[str]] = []
        self.environments: list[dict[str, str]] = []
        self.reach = STEPS
        self.outcome = ChildOutcome(0, None)
        self.folder = Path()

    def __call__(self, command: Sequence[str], *, environment: dict[str, str]) -> ChildOutcome:
        self.commands.append(command)
        self.environments.append(environment)
        self.folder.mkdir(parents=True, exist_ok=True)
        records = [
            {"step": step, "tokens": step * 10, "ce_loss": 3.0} for step in range(1, self.reach + 1)
        ]
        lines = [json.dumps(record) + "\n" for record in records]
        (self.folder / "metrics.jsonl").write_text("".join(lines))
        return self.outcome


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Children:
    stand_in = Children()
    stand_in.folder = tmp_path / "place" / "teacher"
    monkeypatch.setattr(child_runs, "run_child", stand_in)
    return stand_in


def a_run(tmp_path: Path, settings: str = "a: 1\nb: 2\n") -> ChildRun:
    return ChildRun(
        name="teacher",
        label="the teacher",
        place=tmp_path / "place",
        script=Path("launch/pretrain_distill.py"),
        arguments=("--config", "x.yaml"),
        settings=settings,
        steps=STEPS,
        processes=4,
    )


def test_a_run_is_made_once_under_torchrun_with_the_cores_shared_out(
    tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_distill.runtime.torchrun.available_cores", lambda: 8)
    run = a_run(tmp_path)
    make(run)
    make(run)
    (command,) = children.commands
    assert command[-4:] == [
        *("--nproc-per-node=4", "launch/pretrain_distill.py"),
        *("--config", "x.yaml"),
    ]
    assert children.environments[0]["OMP_NUM_THREADS"] == "2"
    assert run.finished
    assert json.loads(run.summary_file.read_text())["tokens"] == 50
    assert run.settings_file.read_text() == run.settings


def test_a_stopped_run_is_continued_by_the_same_call(tmp_path: Path, children: Children) -> None:
    run = a_run(tmp_path)
    children.reach = 3
    with pytest.raises(RunStoppedError, match="the teacher: stopped at step 3 of 5"):
        make(run)
    assert not run.finished
    children.reach = STEPS
    make(run)
    assert run.finished
    assert children.commands[0] == children.commands[1]


@pytest.mark.parametrize("reach", [3, STEPS])
def test_a_run_is_not_continued_under_other_settings(
    tmp_path: Path, children: Children, reach: int
) -> None:
    children.reach = reach
    with suppress(RunStoppedError):
        make(a_run(tmp_path))
    with pytest.raises(
        ConfigError, match=r"teacher\.yaml.*it has 'b: 2', this call has 'b: 3'.*--fresh.*--output"
    ):
        make(a_run(tmp_path, settings="a: 1\nb: 3\n"))
    assert len(children.commands) == 1
    assert a_run(tmp_path).settings_file.read_text() == "a: 1\nb: 2\n"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, children: Children) -> None:
    (tmp_path / "place").write_text("a file")
    with pytest.raises(ConfigError, match=r"--output .*place: cannot write there"):
        make(a_run(tmp_path))
    assert not children.commands


def test_an_answer_is_asked_for_once_and_a_failure_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = tmp_path / "answer.txt"
    status, calls = 1, []

    def answering(command: Sequence[str], *, environment: dict[str, str]) -> ChildOutcome:
        calls.append(command[1:])
        if status == 0:
            answer.write_text("an answer")
        return ChildOutcome(status, None)

    monkeypatch.setattr(child_runs, "run_child", answering)
    with pytest.raises(TrainingError, match=r"speak\.py: failed with exit status 1"):
        ask(Path("launch/speak.py"), ["--x"], answer=answer)
    status = 0
    assert ask(Path("launch/speak.py"), ["--x"], answer=answer) == "an answer"
    assert ask(Path("launch/speak.py"), ["--x"], answer=answer) == "an answer"
    assert calls == [["launch/speak.py", "--x"]] * 2
