"""Teachers on tasks: in their own tokens, on their own ranks, with resting or sharded weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.distributed.pool import Pool
from tests.e2e.evaluation.test_evaluation import _results, evaluations, quiz
from tests.e2e.failing import call_alone
from tests.e2e.processes import ROOT, wait_until
from tests.e2e.runs import (
    STUDENT,
    Inputs,
    course,
    log_of,
    logged,
    one_of_several,
    records,
    run,
    step_records,
    train_here,
)
from tests.e2e.teachers.roles import log_in_roles, run_apart, train_in_roles
from tests.e2e.tokenizers.test_several_tokenizers import write_config

SHORT = ("train.steps=1", "schedule.warmup_steps=1", "checkpoint.save=true")


@dataclass
class OnHost:
    """Weights that are there between `take` and `release` only, as `HostWeights` on a GPU."""

    resting: Sequence[torch.nn.Parameter]
    taken: int = 0
    _host: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._host = [parameter.data for parameter in self.resting]
        self.release()

    def begin(self) -> None:
        """Nothing is on its way."""

    def take(self) -> None:
        """Put the weights in their places, which on a GPU takes a copy."""
        self.taken += 1
        for parameter, host in zip(self.resting, self._host, strict=True):
            parameter.data = host

    def release(self) -> None:
        """Take the weights away."""
        for parameter in self.resting:
            parameter.data = torch.empty(0)


def _train_with_resting(rank: int, world: int, config: Path, overrides: Sequence[str]) -> list[int]:
    """Train in a pool worker, where the weights of a teacher with `offload` leave their places.

    Returns how often they were taken in each step.
    """
    from megatron_distill.train import loop
    from megatron_distill.train.teachers.resting import RestingTeacher

    made: list[OnHost] = []
    found: list[int] = []
    usual = loop._distil

    def distilled(*given: Any) -> Any:
        before = made[0].taken
        result = usual(*given)
        found.append(made[0].taken - before)
        return result

    def of(online: Any, *, key: str) -> RestingTeacher:
        head = online.model.head_weight()
        rest = [parameter for parameter in online.model.parameters() if parameter is not head]
        made.append(OnHost(rest))
        return RestingTeacher(online, made[0])  # type: ignore[arg-type]

    with patch.object(RestingTeacher, "of", of), patch.object(loop, "_distil", distilled):
        assert train_here(rank, world, config, overrides)
    return found


@pytest.mark.slow
def test_each_of_several_teachers_is_evaluated_in_its_own_tokens(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    """The baselines are those of runs with one of the teachers; the weights of one rest.

    They are copied once per step, which runs the student twice to weigh its losses.
    """
    config, tasks, output = write_config(inputs), quiz(tmp_path), tmp_path / "several"
    overrides = [f"output={output}", *SHORT, *tasks, "teachers.near.offload=true"]
    overrides += ["train.steps=2", "objective.balance.mode=gradient_norm"]
    assert pool.run(1, _train_with_resting, config, overrides) == [[1, 1]]
    (_, first), *_, (_, last) = evaluations(output)
    assert set(first) == {"student", "teachers.far", "teachers.near"}

    far = (*SHORT, *tasks, "evaluation.at_start=false")
    run(pool, 1, inputs.folder / "aligned.yaml", tmp_path / "far", *far)
    near = one_of_several("near", width=48).replace("  near:", "teacher:", 1).replace("\n  ", "\n")
    # A random teacher has the seed of the run and its own number among several.
    run(pool, 1, inputs.write("near", STUDENT, near), tmp_path / "near", *far, "seed=8")
    for name in ("far", "near"):
        (_, alone), *_ = evaluations(tmp_path / name)
        assert first[f"teachers.{name}"] == alone["teacher"], name
    assert first["teachers.far"]["quiz"] != first["teachers.near"]["quiz"]

    script, quiz_file = ROOT / "launch" / "evaluate.py", tmp_path / "quiz.yaml"
    items = tmp_path / "items.json"
    words = (output, "--tasks", quiz_file, "--teacher", "--items", items)
    ending = call_alone(pool, script, *words)
    assert ending.status == 0, ending.stderr
    found = json.loads(ending.stdout)
    assert set(found["results"]) == set(first)
    for role, results in found["results"].items():
        logged = last["student"] if role == "student" else first[role]
        for name in ("acc", "acc_norm", "prompt_hash"):
            assert results["quiz"][name] == logged["quiz"][name], (role, name)
    minus = found["student_minus"]["teachers.near"]["quiz"]["acc_norm"]
    near = first["teachers.near"]["quiz"]["acc_norm"]
    assert minus["difference"] == pytest.approx(last["student"]["quiz"]["acc_norm"] - near)
    assert minus["low"] <= minus["difference"] <= minus["high"]

    again = call_alone(pool, script, output, "--tasks", quiz_file, "--against", items)
    (same,) = json.loads(again.stdout)["student_minus"].values()
    assert same["quiz"]["acc"] == {"difference": 0, "stderr": 0, "low": 0, "high": 0, "n": 14}
    fewer = call_alone(pool, script, output, "--tasks", quiz_file, "--limit", 5, "--against", items)
    assert fewer.status == 1
    assert "its task quiz has other prompts or items; evaluate both models with" in fewer.stderr


@pytest.mark.slow
def test_baselines_of_another_teacher_or_other_tasks_are_measured_again(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    """Starts from the beginning in one folder, whose baselines.json stays."""
    tasks, output = quiz(tmp_path), tmp_path / "run"
    short = ("train.steps=1", "schedule.warmup_steps=1", *tasks)
    file, again = output / "baselines.json", "; it is evaluated again"

    def start(*changes: str) -> tuple[str, dict[str, Any]]:
        words = [f"output={output}", *short, *changes]
        (text,) = pool.run(1, logged, dense, words)
        return text, json.loads(file.read_text())["teacher"]["of"]

    text, first = start()
    assert again not in text
    text, same = start()
    assert (again in text, same) == (False, first)
    (_, before), (_, alone) = evaluations(output)
    assert (set(before), set(alone)) == ({"student", "teacher"}, {"student"})

    text, other = start("teacher.architecture.init_std=0.3")
    assert f"teacher: its results in {file} are of other weights{again}" in text
    assert {name for name in first if first[name] != other[name]} == {"weights"}
    (_, kept), (_, found), (_, last) = evaluations(output)
    assert kept == before
    assert found["teacher"]["prose"] != before["teacher"]["prose"]
    for results in (found["student"]["prose"], last["student"]["prose"]):
        minus = results["minus"]["teacher"]["bits_per_byte"]["difference"]
        expected = results["bits_per_byte"] - found["teacher"]["prose"]["bits_per_byte"]
        assert minus == pytest.approx(expected)

    rows = [json.loads(line) for line in (tmp_path / "quiz.jsonl").read_text().splitlines()]
    corrected = [{**row, "right": (row["right"] + 1) % 4} for row in rows]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in corrected))
    text, answered = start("teacher.architecture.init_std=0.3")
    assert f"are of other tasks{again}" in text
    changed = {name for name in other["tasks"] if answered["tasks"][name] != other["tasks"][name]}
    assert changed == {"quiz"}


@pytest.mark.slow
def test_the_teacher_of_a_finished_run_has_its_own_tokens(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    tasks, output = quiz(tmp_path), tmp_path / "run"
    run(pool, 1, inputs.folder / "aligned.yaml", output, *SHORT, *tasks)
    (_, first), *_ = evaluations(output)
    named = [str(tmp_path / f"{name}.yaml") for name in ("quiz", "write")]
    (found,) = pool.run(1, _results, str(output), [], named, True)
    for name, results in found["teacher"].items():
        assert results.pop("seconds") > 0
        assert results == first["teacher"][name], name


def _logged_results(rank: int, world: int, *given: Any) -> tuple[dict[str, Any], str]:
    with log_of(rank) as stream:
        return _results(rank, world, *given), stream.getvalue()


def _figures(results: dict[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in results.items():
        if isinstance(value, dict):
            yield from _figures(value, f"{name}{key}.")
        else:
            yield f"{name}{key}", value


@pytest.mark.slow
def test_a_teacher_with_sharded_weights_is_scored_and_writes_no_text(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    tasks = quiz(tmp_path)
    both = []
    for name, shards in (("whole", "false"), ("sharded", "true")):
        run(pool, 2, dense, tmp_path / name, *SHORT, *tasks, f"teacher.shard_weights={shards}")
        both.append(evaluations(tmp_path / name)[0][1])
    whole, sharded = both
    assert set(whole["teacher"]) == {"quiz", "prose", "write"}
    assert whole["teacher"].pop("write")
    # Passes of modules instead of a cache: other kernels.
    expected, found = dict(_figures(whole["teacher"])), dict(_figures(sharded["teacher"]))
    assert set(found) == set(expected)
    for name, value in expected.items():
        near = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
        assert found[name] == near, name
    assert "write" in sharded["student"]

    named = [str(tmp_path / f"{name}.yaml") for name in ("quiz", "write")]
    output = str(tmp_path / "sharded")
    (results, text), _ = pool.run(2, _logged_results, output, [], named, True)
    assert set(results["student"]) == {"quiz", "write"}
    assert set(results["teacher"]) == {"quiz"}
    assert results["teacher"]["quiz"]["acc_norm"] == whole["teacher"]["quiz"]["acc_norm"]
    assert "teacher: no results of write: a model with sharded weights generates no text" in text


def _ended(
    rank: int, world: int, config: Path, overrides: Sequence[str], asked: int
) -> tuple[bool, str]:
    """Train with a teacher on the last rank, whose evaluation a signal to one rank ends.

    Its last look comes after the student's ranks have told of a signal to one of them.
    """
    from megatron_distill.train.evaluation import elsewhere, phase

    evaluate = phase.evaluate_model

    def late(model: Any, **named: Any) -> Any:
        wait_until(model.scorer.stop_requested)
        return evaluate(model, **named)

    with (
        patch.object(elsewhere, "is_requested", lambda: rank == asked),
        patch.object(phase, "evaluate_model", late),
        log_of(rank) as stream,
    ):
        return train_in_roles(rank, world, config, overrides, None), stream.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("asked", [1, 2], ids=["the student's", "the teacher's"])
def test_a_signal_to_a_rank_of_either_side_ends_the_evaluation_of_a_teacher_elsewhere(
    pool: Pool, dense: Path, tmp_path: Path, asked: int
) -> None:
    config, tasks, output = dense, quiz(tmp_path), tmp_path / "run"
    given = [f"output={output}", "teacher.ranks=1", *SHORT, *tasks]
    found = pool.run(3, _ended, config, given, asked)
    assert [has_ended for has_ended, _ in found[:2]] == [False, False]
    assert "stopped by a signal after step 0" in found[0][1]
    assert records(output) == []
    run_apart(pool, 2, 1, config, output, *SHORT, *tasks)
    assert [set(results) for _, results in evaluations(output)] == [
        {"student", "teacher"},
        {"student"},
    ]


@pytest.mark.slow
def test_a_teacher_on_ranks_of_its_own_has_the_baseline_of_shared_ranks(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    """In another layout, with the same training as without an evaluation."""
    tasks = quiz(tmp_path)
    given = (*SHORT, "train.steps=2", "student.architecture.hidden_dropout=0.1")
    apart = (*given, "teacher.parallel.tensor=2")
    plain = run_apart(pool, 1, 2, dense, tmp_path / "plain", *apart)
    output = tmp_path / "apart"
    run_apart(pool, 1, 2, dense, output, *apart, *tasks)
    assert course(step_records(output)) == course(plain)
    run(pool, 1, dense, tmp_path / "shared", *given, *tasks)
    (_, found), *later = evaluations(output)
    (_, expected), *_ = evaluations(tmp_path / "shared")
    assert [set(results) for _, results in later] == [{"student"}]
    assert set(found) == {"student", "teacher"}
    for role in found:
        wanted, figures = dict(_figures(expected[role])), dict(_figures(found[role]))
        assert set(figures) == set(wanted)
        for name, value in wanted.items():
            near = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            assert figures[name] == near, (role, name)
    baselines = [tmp_path / name / "baselines.json" for name in ("apart", "shared")]
    one, other = (json.loads(file.read_text())["teacher"]["of"] for file in baselines)
    assert one == other

    # A finished run is evaluated without its teacher, whose ranks have nothing to do.
    baselines[0].unlink()
    for steps in (2, 1):  # the second is less than what was done
        words = [f"output={output}", "teacher.ranks=2", *apart, *tasks, f"train.steps={steps}"]
        text = pool.run(3, log_in_roles, dense, words)[0]
        assert "no baseline of teacher: no step is left, and its ranks have ended" in text
