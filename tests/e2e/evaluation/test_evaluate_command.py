"""`evaluate` as a command: weights without a run, no network, refusals before a model is built."""

from __future__ import annotations

import json
import logging
import os
import re
import runpy
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from megatron_distill.evaluation.tasks.record import Task, load_task
from megatron_distill.runtime.mcore_patches import prepare_megatron_core
from megatron_distill.train.assemble.trained_config import STUDENT_ALONE
from tests.distributed.pool import Pool
from tests.e2e.conversion.test_hugging_face import export
from tests.e2e.evaluation.test_evaluation import (
    COMMON,
    configure_evaluation,
    evaluations,
    quiz,
    weights,
)
from tests.e2e.failing import Ending, call_script
from tests.e2e.processes import ROOT, TORCHRUN, run_from_imports
from tests.e2e.runs import CPU, Inputs, records, run
from tests.unit.evaluation.tasks import published

# Python reads it as a process starts, such as a grader's: what is asked of a network is noted.
WITHOUT_NETWORK = """
import pathlib, socket

folder = pathlib.Path({folder!r})
if __name__ == "sitecustomize":
    (folder / "started").touch()

def refuse(*given, **_):
    with (folder / "asked").open("a") as asked:
        print(given[1:] or given, file=asked)
    raise OSError("there is no network")

socket.socket.connect = socket.getaddrinfo = refuse
"""


def _called_offline(
    rank: int, world: int, script: Path, words: list[str], folder: Path
) -> tuple[Ending, list[str]]:
    """Call a script where it and its graders reach no network; returns what they asked of one."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT_NETWORK.format(folder=str(folder)))
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", str(ROOT))])
    places = {"PYTHONPATH": paths, "HF_HOME": str(folder / "none")}
    with (
        patch.object(socket.socket, "connect", socket.socket.connect),
        patch.object(socket, "getaddrinfo", socket.getaddrinfo),
    ):
        runpy.run_path(str(folder / "sitecustomize.py"))
        ending = call_script(rank, world, script, words, variables=places)
    assert (folder / "started").is_file(), "a grader started, and without a network"
    asked = folder / "asked"
    return ending, asked.read_text().splitlines() if asked.is_file() else []


def _called_without_models(
    rank: int, world: int, script: str, calls: list[list[str]]
) -> list[Ending]:
    """Call a script where no model can be built."""
    prepare_megatron_core(on_cuda=False)
    from megatron_distill.train.model_source import ModelSource

    with patch.object(ModelSource, "build", side_effect=AssertionError("a model was built")):
        return [call_script(rank, world, ROOT / "launch" / script, words) for words in calls]


def _digest_of_same(printed: str, student: dict[str, Any]) -> str:
    """Compare printed results with those of a student in its run; returns its weights' digest."""
    whole = json.loads(printed)
    for task, names in (("quiz", ("acc", "acc_norm")), ("write", ("gsm8k_strict", "cut"))):
        measured = whole["results"]["student"][task]
        for name in (*names, "prompt_hash"):
            assert measured[name] == student[task][name], (task, name)
    return str(whole["weights"]["student"])


@pytest.mark.slow
def test_commands_refuse_before_any_model_is_built_and_take_weights_without_a_run(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    """The weights on one rank without a network, and with a torchrun of two."""
    tasks, output, exported = quiz(tmp_path), tmp_path / "run", tmp_path / "exported"
    run(pool, 1, dense, output, *COMMON, *tasks)
    *_, (_, last) = evaluations(output)
    pool.run(1, export, output, exported)
    quiz_file, script = tmp_path / "quiz.yaml", ROOT / "launch" / "evaluate.py"
    digests = [weights(output)[-1]["student"]]
    logged = [record for record in records(output) if "evaluation" in record]
    prompts = json.loads((output / "first_prompts.json").read_text())
    both = ["--tasks", str(quiz_file), str(tmp_path / "write.yaml")]
    for kind, folder in (("--hf", exported), ("--checkpoint", output)):
        words = [kind, str(folder), *both]
        ((ending, asked),) = pool.run(1, _called_offline, script, words, tmp_path / kind)
        assert (ending.status, asked) == (0, []), ending.stderr
        digests.append(_digest_of_same(ending.stdout, last["student"]))
        whole = json.loads(ending.stdout)
        assert {one["tokenizer"]["student"] for one in logged} == {whole["tokenizer"]}
        for task in ("quiz", "write"):
            measured = whole["results"]["student"][task]
            prompt = whole["first_prompts"][task]
            assert prompts[task] == {measured["prompt_hash"]: prompt}
    two = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(script)]
    words = ["--hf", str(exported), "parallel.tensor=2", *both]
    digests.append(
        _digest_of_same(run_from_imports(*two, *words, seconds=600).stdout, last["student"])
    )
    assert len(set(digests)) == 1, "the weights of one model, live and in two formats"
    assert re.fullmatch("v2:[0-9a-f]{64}", digests[0])

    named, other = [str(output), "--tasks", str(quiz_file)], str(tmp_path / "other.yaml")
    Path(other).write_text(f"base: quiz.yaml\nname: quiz\nfolder: {tmp_path}\n")
    missing = tmp_path / "none.yaml"
    missing.write_text("base: quiz.yaml\nfiles: [none.jsonl]\n")
    calls = {
        "there is no such task; give the path": [str(output), "--tasks", "mmluu"],
        "task none: files: there is no file": [str(output), "--teacher", "--tasks", str(missing)],
        "two tasks have the name 'quiz'": [*named, other],
        "items.json: cannot be read": [*named, "--against", str(tmp_path / "items.json")],
        "not a file of `evaluate --items`": [*named, "--against", str(tmp_path / "quiz.jsonl")],
    }
    (endings,) = pool.run(1, _called_without_models, "evaluate.py", list(calls.values()))
    for text, ending in zip(calls, endings, strict=True):
        assert (ending.status, text in ending.stderr) == (1, True), ending.stderr
    texts = {
        "no chat template": [str(output), "--chat"],
        "--prompt has": [str(output), "--prompt", "def f " * 60],
        "positions: none is left": [str(output), "--prompt", "def " * 32],
    }
    (endings,) = pool.run(1, _called_without_models, "generate.py", list(texts.values()))
    for text, ending in zip(texts, endings, strict=True):
        assert (ending.status, text in ending.stderr) == (1, True), ending.stderr


def _cut(
    rank: int, world: int, task: Task, tokenizer: Path, positions: int
) -> tuple[dict[str, Any], list[str]]:
    """The results of a task whose texts are all wrong, and the lines of the log."""
    from megatron_distill.data.tokenizers.open import load_tokenizer
    from megatron_distill.evaluation.requests import WrittenText
    from megatron_distill.evaluation.tasks.grading import Graded
    from megatron_distill.evaluation.tasks.results import written_result
    from megatron_distill.train.assemble.tasks import open_tasks

    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_distill")
    logger.addHandler(handler)
    try:
        opened = open_tasks([task], CPU.torch_device, add_bos=None)
        named = load_tokenizer(tokenizer, named="t") if rank == 0 else None
        (found,) = opened.encoded(named, positions, CPU.torch_device)
    finally:
        logger.removeHandler(handler)
    room = positions - task.max_new_tokens
    assert all(len(one.context) <= room for one in found.requests)
    count = len(found.requests)
    grades = {name: Graded((False,) * count, 0, 0) for name in task.measures}
    return written_result(found, [WrittenText("", False)] * count, grades), logged


def test_prompts_that_lose_tokens_are_counted_and_told_of(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    """Examples go first, then tokens on the left; the texts have room for their most tokens."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in published.GSM8K))
    task = load_task("gsm8k", {"files": [str(rows)], "shot_files": [str(rows)]})
    count = len(published.GSM8K)
    for room, dropped, truncated in ((2000, 0, 0), (200, count, 0), (9, count, count)):
        given = (task, inputs.tokenizer, room + task.max_new_tokens)
        (found, logged), (same, silent) = pool.run(2, _cut, *given)
        assert (found["shots_dropped"], found["truncated"]) == (dropped, truncated)
        reasons = ["shots_dropped"] * bool(dropped) + ["truncated"] * bool(truncated)
        assert found.get("not_comparable") == (reasons or None)
        assert (same, silent) == (found, [])
        assert bool(logged) == bool(truncated)
        for line in logged:
            assert f"task gsm8k: longer than the model's {given[2]} positions, and cut" in line
            assert f"{count} of {count} prompts; lower its max_new_tokens" in line


def _prompts_kept(rank: int, world: int, path: Path, tasks: list[Any]) -> None:
    from megatron_distill.train.evaluation.baselines import keep_first_prompts

    keep_first_prompts(path, tasks)


def test_first_prompts_of_earlier_starts_stay(pool: Pool, tmp_path: Path) -> None:
    """Their results are in the log under other digests; a damaged file is written anew."""
    file = tmp_path / "first_prompts.json"

    def task(name: str, number: int) -> Any:
        named = SimpleNamespace(name=name)
        return SimpleNamespace(task=named, prompt_hash=f"{number}", first_prompt=f"é {number}")

    file.write_text('["no mapping"]')
    for tasks in ([task("quiz", 1), task("text", 2)], [task("quiz", 3)]):
        pool.run(2, _prompts_kept, file, tasks)
    expected = {"quiz": {"1": "é 1", "3": "é 3"}, "text": {"2": "é 2"}}
    assert json.loads(file.read_text()) == expected


def _without_harness(rank: int, world: int, folder: str) -> str:
    from megatron_distill.errors import ConfigError

    config = configure_evaluation(rank, world, folder, STUDENT_ALONE)
    from megatron_distill.train.assemble import harness

    with patch.object(harness, "find_spec", lambda _: None):
        try:
            harness.evaluate_by_harness(config, CPU, ["quiz"], include=None, limit=None)
        except ConfigError as error:
            return str(error)
    return "accepted"


def test_a_harness_that_is_not_installed_is_named(pool: Pool, dense: Path, tmp_path: Path) -> None:
    run(pool, 1, dense, tmp_path / "run", "train.steps=1")
    (text,) = pool.run(1, _without_harness, str(tmp_path / "run"))
    assert "--lm-eval: lm-evaluation-harness is not installed; install the extra `lm-eval`" in text
