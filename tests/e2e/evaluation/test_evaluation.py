"""Tasks during a run change nothing in it; results do not depend on the layout."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron_distill.evaluation.tasks.record import load_task
from megatron_distill.runtime.mcore_patches import prepare_megatron_core
from megatron_distill.train.assemble.trained_config import STUDENT_ALONE, load_trained_run
from tests.distributed.pool import Pool
from tests.e2e.runs import (
    CONTEXT,
    CPU,
    EXPERT,
    PIPELINE,
    SEQUENCE,
    TENSOR,
    VIRTUAL,
    Inputs,
    checkpoints,
    configure,
    course,
    failure,
    failure_here,
    records,
    run,
    step_records,
    train_here,
)
from tests.e2e.runs import layout as layout_of

STEPS = 4
COMMON = (f"train.steps={STEPS}", "checkpoint.save=true", "checkpoint.interval=2")
WORDS = ("return", "import", "class", "while")
DROPOUT = "student.architecture.hidden_dropout=0.1"


def quiz(folder: Path) -> tuple[str, ...]:
    """Write two tasks of one's own; returns the overrides that evaluate them."""
    folder.mkdir(exist_ok=True)
    rows = [{"q": f"def f{n}", "options": WORDS, "right": n % 4, "part": n % 2} for n in range(14)]
    (folder / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "quiz.yaml").write_text(
        "kind: multiple_choice\nquestion: '{{ q }}:'\nchoices: options\nanswer: right\n"
        f"group: part\nshots: 1\nshot_separator: ' '\nfolder: {folder}\nfiles: [quiz.jsonl]\n"
    )
    texts = [{"text": f"for one in range({n}): print(one)" * n} for n in range(1, 4)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    (folder / "write.yaml").write_text(
        "kind: generation\nquestion: '{{ q }}'\nanswer: q\ngraders: [exact, gsm8k_strict]\n"
        f"max_new_tokens: 6\nstops: [zz]\nlimit: 5\nfolder: {folder}\nfiles: [quiz.jsonl]\n"
    )
    prose = f"{{task: text, name: prose, folder: {folder}, files: [text.jsonl]}}"
    tasks = f"[{folder / 'quiz.yaml'}, {prose}, {folder / 'write.yaml'}]"
    return (f"evaluation.tasks={tasks}", "evaluation.interval=2")


def weights(output: Path) -> list[dict[str, str]]:
    """The digests of the evaluated models' weights, by evaluation and role."""
    return [record["weights"] for record in records(output) if "evaluation" in record]


def evaluations(output: Path) -> list[tuple[int, dict[str, Any]]]:
    """The steps and results of a run's evaluations, without their seconds."""
    found = []
    for record in records(output):
        if "evaluation" in record:
            for results in record["evaluation"].values():
                for result in results.values():
                    assert result.pop("seconds") > 0
            found.append((record["step"], record["evaluation"]))
    return found


CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "DP2, parameters gathered late": ("dense", 2, ("optimizer.overlap_param_gather=true", DROPOUT)),
    "TP2xPP2+sequence+virtual": ("dense", 4, (TENSOR, SEQUENCE, PIPELINE, VIRTUAL, DROPOUT)),
    "CP2": ("dense", 2, (CONTEXT,)),
    "EP2": ("moe", 2, (EXPERT,)),
    "EP2, a bias that moves": ("mixture", 2, (EXPERT,)),
    "two tokenizers": ("aligned", 2, (TENSOR,)),
}


def saved(output: Path, step: int = STEPS) -> dict[str, bytes]:
    """A checkpoint's weights and optimizer state, by the file of each rank."""
    folder = output / "checkpoints" / f"step_{step:07d}"
    found = {file.name: file.read_bytes() for file in folder.glob("*.distcp")}
    assert found, sorted(folder.iterdir())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_is_bit_identical_with_and_without(
    pool: Pool, inputs: Inputs, tmp_path: Path, case: str
) -> None:
    name, world, layout = CASES[case]
    config, tasks = inputs.folder / f"{name}.yaml", quiz(tmp_path)
    plain = run(pool, world, config, tmp_path / "plain", *COMMON, *layout)
    evaluated = run(pool, world, config, tmp_path / "evaluated", *COMMON, *layout, *tasks)
    assert course(evaluated) == course(plain)
    assert saved(tmp_path / "evaluated") == saved(tmp_path / "plain")
    (start, first), *later = evaluations(tmp_path / "evaluated")
    assert start == 0
    assert set(first) == {"teacher", "student"}, "the teacher once, before the first step"
    assert [(step, set(found)) for step, found in later] == [(2, {"student"}), (4, {"student"})]
    for results in (*first.values(), *(found["student"] for _, found in later)):
        assert results["quiz"]["n"] == 14
        assert 0 <= results["quiz"]["calibration_error"] <= 1
        assert results["quiz"]["calibration_error_stderr"] > 0
        assert set(results["quiz"]["groups"]) == {"0", "1"}
        assert results["prose"]["bits_per_byte"] > 0
        assert results["write"]["n"] == 5
        assert results["write"]["exact"] == 0.0
        assert results["write"]["cut"] > 0, "a model of random weights goes on"
        assert set(results["write"]["graders"]) == {"exact", "gsm8k_strict"}
    for found in (first, *(found for _, found in later)):
        student, teacher = found["student"], first["teacher"]
        for task, name in (("quiz", "acc_norm"), ("write", "exact"), ("prose", "bits_per_byte")):
            minus = student[task].get("minus", {}).get("teacher")
            if case == "two tokenizers" and minus is None:
                continue  # other examples fit into the teacher's positions
            one = minus[name]
            assert one["difference"] == pytest.approx(student[task][name] - teacher[task][name])
            assert one["low"] <= one["difference"] <= one["high"]
            assert one["n"] == student[task]["n"]
    assert first["student"] != later[-1][1]["student"], "training changes the student"
    digests = weights(tmp_path / "evaluated")
    assert [set(one) for one in digests] == [{"teacher", "student"}, {"student"}, {"student"}]
    assert len({one["student"] for one in digests}) == 3


def train_evaluating(
    rank: int, world: int, config: Path, overrides: list[str], evaluate: Callable[..., Any]
) -> bool:
    """Train with `evaluate(usual, model, **named)` in place of the evaluation of a model."""
    prepare_megatron_core(on_cuda=False)
    from megatron_distill.train.evaluation import phase

    with patch.object(phase, "evaluate_model", partial(evaluate, phase.evaluate_model)):
        return train_here(rank, world, config, overrides)


def _drawing(rank: int, world: int, config: Path, overrides: list[str]) -> bool:
    """Train with evaluations that draw random numbers of every kind."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    def drawn(evaluate: Callable[..., Any], model: Any, **named: Any) -> Any:
        random.random()
        np.random.random()
        torch.rand(3)
        with get_cuda_rng_tracker().fork():
            torch.rand(3)
        return evaluate(model, **named)

    return train_evaluating(rank, world, config, overrides, drawn)


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, ()), pytest.param(2, (TENSOR, SEQUENCE), marks=pytest.mark.slow)],
    ids=["one rank", "TP2+sequence"],
)
def test_an_evaluation_that_draws_numbers_leaves_those_of_dropout(
    pool: Pool, dense: Path, tmp_path: Path, world: int, layout: tuple[str, ...]
) -> None:
    quiz(tmp_path)
    given = ("train.steps=2", DROPOUT, *layout)
    plain = run(pool, world, dense, tmp_path / "plain", *given)
    text = f"evaluation.tasks=[{{task: text, folder: {tmp_path}, files: [text.jsonl]}}]"
    arguments = [f"output={tmp_path / 'drawing'}", *given, text, "evaluation.interval=1"]
    assert all(pool.run(world, _drawing, dense, arguments))
    assert len(evaluations(tmp_path / "drawing")) == 3
    assert course(step_records(tmp_path / "drawing")) == course(plain)


SIZE = 200_000_000


def _peaks(rank: int, world: int, config: Path, overrides: list[str]) -> list[int]:
    """Train with evaluations that need so much more memory, and return this process's peaks."""
    from megatron_distill.train.throughput import peak_memory_bytes

    found = list[int]()

    def large(evaluate: Callable[..., Any], model: Any, **named: Any) -> Any:
        block = torch.ones(SIZE, dtype=torch.uint8)
        results = evaluate(model, **named)
        found.append(peak_memory_bytes(CPU.torch_device))
        del block
        return results

    Path("/proc/self/clear_refs").write_text("5")  # without the peak of earlier tests
    train_evaluating(rank, world, config, overrides, large)
    return found


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="a peak is Linux's to lower")
def test_the_peak_memory_of_a_run_leaves_its_evaluations_out(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    quiz(tmp_path)
    text = f"evaluation.tasks=[{{task: text, folder: {tmp_path}, files: [text.jsonl]}}]"
    arguments = [
        f"output={tmp_path / 'run'}",
        f"train.steps={STEPS}",
        text,
        "evaluation.interval=2",
    ]
    (found,) = pool.run(1, _peaks, dense, arguments)
    assert len(found) == 4, "two models before the first step, and the student twice"
    steps = [one for one in records(tmp_path / "run") if "peak_memory_bytes" in one]
    assert len(steps) == STEPS
    for one in steps:
        assert min(found) - one["peak_memory_bytes"] > SIZE / 2


@contextmanager
def asked_after(calls: int) -> Iterator[None]:
    """A signal that an evaluation sees at its n-th look."""
    looks = count()
    place = "megatron_distill.train.assemble.evaluated_model.is_requested"
    with patch(place, lambda: next(looks) >= calls):
        yield


def _stopped(rank: int, world: int, config: Path, overrides: list[str], calls: int) -> bool:
    with asked_after(calls):
        return train_here(rank, world, config, overrides)


class _Killed(BaseException):
    """An end of the process in the middle of an evaluation, after its first task."""


def _killed(rank: int, world: int, config: Path, overrides: list[str], call: int) -> str:
    calls = count()

    def dying(evaluate: Callable[..., Any], model: Any, **named: Any) -> Any:
        if next(calls) == call:
            evaluate(replace(model, tasks=model.tasks[:1]), **named)
            raise _Killed
        return evaluate(model, **named)

    try:
        train_evaluating(rank, world, config, overrides, dying)
    except _Killed:
        return "killed"
    return "lived"


@pytest.mark.slow
def test_a_signal_ends_an_evaluation_and_a_kill_loses_no_step(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    tasks = quiz(tmp_path)
    whole, stopped, killed = (tmp_path / name for name in ("whole", "stopped", "killed"))
    given = (*COMMON, *tasks, DROPOUT)
    expected = run(pool, 2, dense, whole, *given)
    results = evaluations(whole)

    # Before the first step there are at least four looks: two models, two tasks.
    arguments = [f"output={stopped}", *given, "evaluation.batch_tokens=64"]
    looks = 2
    while True:  # until the signal comes in the evaluation after the second step
        if pool.run(2, _stopped, dense, arguments, looks) == [True, True]:
            break
        steps = [record["step"] for record in records(stopped)] if stopped.exists() else []
        if steps and max(steps) == 2 and checkpoints(stopped) == ["step_0000002"]:
            break
        looks += 6
        shutil.rmtree(stopped)
    assert [step for step, _ in evaluations(stopped)] == [0]
    after = run(pool, 2, dense, stopped, *given, "evaluation.batch_tokens=64")
    assert course(after) == course(expected)
    assert [step for step, _ in evaluations(stopped)] == [0, 2, 4], "the missing one was made up"

    # Calls: teacher and student at the start, the student after the steps 2 and 4.
    arguments = [f"output={killed}", *given]
    assert pool.run(2, _killed, dense, arguments, 3) == ["killed"] * 2
    assert checkpoints(killed) == ["step_0000002"]
    assert course(run(pool, 2, dense, killed, *given)) == course(expected)
    assert evaluations(killed) == results
    assert saved(killed) == saved(stopped) == saved(whole)


@pytest.mark.slow
def test_the_best_checkpoint_stays(pool: Pool, dense: Path, tmp_path: Path) -> None:
    """Bits per byte rise with a rate that is far too high: an early step is the best.

    The tasks have fewer items, and shorter prompts than the model's positions allow.
    """
    tasks = quiz(tmp_path)
    best = ("checkpoint.keep_best={metric: prose.bits_per_byte, mode: min}", "checkpoint.keep=1")
    wild = ("optimizer.learning_rate=0.9", "schedule.warmup_steps=2", "evaluation.interval=1")
    output = tmp_path / "run"
    less = ("evaluation.at_start=false", "evaluation.limit=4", "evaluation.max_length=14")
    run(pool, 2, dense, output, *COMMON, *tasks, *best, *wild, *less)
    for _, found in evaluations(output):
        for results in found.values():
            assert {task: one["n"] for task, one in results.items()} == {
                "quiz": 4, "prose": 3, "write": 5,
            }, "a task's own limit counts"  # fmt: skip
            assert results["quiz"]["shots_dropped"] == 4, "two questions fit into 32 positions"
    values = {
        step: found["student"]["prose"]["bits_per_byte"]
        for step, found in evaluations(output)
        if step
    }
    lowest = min(values, key=lambda step: values[step])
    assert lowest < STEPS, values
    written = json.loads((output / "checkpoints" / "best.json").read_text())
    assert written == {"step": lowest, "metric": "prose.bits_per_byte", "value": values[lowest]}
    assert checkpoints(output) == ["best.json", f"step_{lowest:07d}", f"step_{STEPS:07d}"]
    text = failure(
        pool, 1, dense, tmp_path / "other", *COMMON, *tasks,
        "checkpoint.keep_best.metric=quiz.exact_match",
    )  # fmt: skip
    assert "checkpoint.keep_best.metric = 'quiz.exact_match' is not a measure of this run" in text
    assert "quiz.acc, quiz.acc_norm" in text


def configure_evaluation(rank: int, world: int, folder: str, overrides: Sequence[str]) -> Any:
    """Prepare a pool worker for the evaluation of a run; returns the configuration."""
    config = load_trained_run(folder, overrides, world_size=world)
    return configure(rank, Path(folder) / "config.yaml", [], world, lambda *_: config)


def _results(
    rank: int, world: int, folder: str, overrides: list[str], tasks: list[str], teacher: bool
) -> dict[str, Any]:
    plain = [] if teacher else STUDENT_ALONE
    config = configure_evaluation(rank, world, folder, [*plain, *overrides])
    from megatron_distill.train.assemble.evaluation import evaluate_weights

    found = evaluate_weights(config, CPU, [load_task(one) for one in tasks], teacher=teacher)
    return found["results"]


@pytest.mark.slow
def test_results_of_a_finished_run_are_those_of_any_layout(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    tasks = quiz(tmp_path)
    output = tmp_path / "run"
    run(pool, 2, dense, output, *COMMON, *tasks)
    (_, first), *_, (_, last) = evaluations(output)
    named = [str(tmp_path / "quiz.yaml")]
    layouts: list[tuple[int, list[str]]] = [(1, []), (4, [TENSOR, PIPELINE, SEQUENCE])]
    for world, layout in layouts:
        for found in pool.run(world, _results, str(output), layout, named, True):
            for role, results in (("student", last["student"]), ("teacher", first["teacher"])):
                measured = found[role]["quiz"]
                assert measured["prompt_hash"] == results["quiz"]["prompt_hash"]
                for name in ("acc", "acc_norm", "n"):
                    assert measured[name] == results["quiz"][name], (role, name)
                for name in ("calibration_error", "calibration_error_stderr"):
                    assert measured[name] == pytest.approx(results["quiz"][name], abs=1e-5)


def _flat(found: Any, named: str = "") -> dict[str, Any]:
    """The values of nested mappings and lists by their place, without seconds."""
    if not isinstance(found, dict | list | tuple):
        return {named: found}
    pairs = found.items() if isinstance(found, dict) else enumerate(found)
    flat: dict[str, Any] = {}
    for name, value in pairs:
        if name != "seconds":
            flat |= _flat(value, f"{named}.{name}")
    return flat


def _everything(
    rank: int, world: int, folder: str, overrides: list[str], tasks: list[str]
) -> dict[str, Any]:
    """The results of a run's student on this rank, the measures of each item, and the texts."""
    config = configure_evaluation(rank, world, folder, [*STUDENT_ALONE, *overrides])
    from megatron_distill.train.assemble.evaluation import evaluate_weights
    from megatron_distill.train.evaluation.scoring import ModelWriter

    texts: list[Any] = []
    write = ModelWriter.write

    def noted(writer: ModelWriter, *given: Any, **named: Any) -> Any:
        found = write(writer, *given, **named)
        texts.extend((one.text, one.is_cut) for one in found)
        return found

    with patch.object(ModelWriter, "write", noted):
        found = evaluate_weights(config, CPU, [load_task(one) for one in tasks], teacher=False)
    items = {name: one.as_dict() for name, one in found["items"]["student"].items()}
    return {"results": found["results"]["student"], "items": items, "texts": texts}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layouts"),
    [("dense", ("DP2", "CP2", "PP2", "PP2+virtual", "TP2")), ("moe", ("EP2",))],
    ids=str,
)
def test_choices_and_texts_of_a_finished_run_are_those_of_one_rank(
    pool: Pool, inputs: Inputs, tmp_path: Path, name: str, layouts: Sequence[str]
) -> None:
    quiz(tmp_path)
    tasks = [str(tmp_path / f"{task}.yaml") for task in ("quiz", "write")]
    config, output = inputs.folder / f"{name}.yaml", tmp_path / "run"
    run(pool, 1, config, output, *COMMON[1:], "train.steps=2", "schedule.warmup_steps=1")
    (alone,) = pool.run(1, _everything, str(output), [], tasks)
    assert len(set(alone["texts"])) > 1
    expected = {
        place: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
        for place, value in _flat(alone).items()
    }
    for named in layouts:
        world, changes = layout_of(named)
        for found in pool.run(world, _everything, str(output), list(changes), tasks):
            assert _flat(found) == expected, named


def _refusals(
    rank: int, world: int, config: Path, output: Path, cases: dict[str, list[str]]
) -> dict[str, str]:
    """The error of each start, in a pool worker where no model can be built."""
    prepare_megatron_core(on_cuda=False)
    from megatron_distill.train.model_source import ModelSource

    with patch.object(ModelSource, "build", side_effect=AssertionError("a model was built")):
        return {
            name: failure_here(rank, world, config, [f"output={output}", *COMMON, *overrides])
            for name, overrides in cases.items()
        }


@pytest.mark.slow
def test_a_wrong_task_is_named_before_any_model_is_built(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    """Each of these ends the start on all ranks, and leaves no folder."""
    quiz(tmp_path)
    changed = {
        "column": ("quiz", "question: '{{ nothing }}'"),
        "row": ("quiz", "answer: q"),
        "key": ("quiz", "answer: ''"),
        "examples": ("quiz", "shots: 9"),
        "grader": ("write", "graders: [unknown]"),
        "stop": ("write", "stops: ['']"),
        "room": ("write", "max_new_tokens: 100"),
        "template": ("quiz", "chat: true"),
    }
    cases = {
        "name": ["evaluation.tasks=[mmluu]"],
        "file": [f"evaluation.tasks=[{{task: {tmp_path / 'quiz.yaml'}, files: [none.jsonl]}}]"],
    }
    for name, (base, line) in changed.items():
        (tmp_path / f"{name}.yaml").write_text(f"base: {base}.yaml\n{line}\n")
        cases[name] = [f"evaluation.tasks=[{tmp_path / f'{name}.yaml'}]"]
    one, other = pool.run(2, _refusals, dense, tmp_path / "run", cases)
    assert one == other
    expected = {
        "name": "mmluu: there is no such task; give the path of a YAML file, or one of arc_",
        "file": "task quiz: files: there is no file",
        "column": "'nothing' is undefined (its columns: q, options, right, part)",
        "row": "neither one of the choices nor an index from 0 to 3; correct `answer` or",
        "key": "answer = None; give the right answer of a row: without it nothing can be scored",
        "examples": "6 examples of part 0, and shots is 9; lower shots, or add rows",
        "grader": "grader.yaml): graders = 'unknown'; give one of exact, letter",
        "stop": "stop.yaml): stops = ['']; give texts that are not empty, or [] for none",
        "room": "task room: max_new_tokens = 100, and the model has 32 positions; lower it",
        "template": "tokenizer has no chat template; add a chat_template.jinja to its folder",
    }
    assert set(one) == set(expected)
    for name, text in expected.items():
        assert text in one[name], (name, one[name])
    assert not (tmp_path / "run").exists()
