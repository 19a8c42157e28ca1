"""Tasks and a group of lm-evaluation-harness itself on local rows, against its own backend."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from megatron_distill.train.assemble.trained_config import STUDENT_ALONE
from tests.distributed.pool import Pool
from tests.e2e.conversion.test_hugging_face import export
from tests.e2e.evaluation.test_evaluation import configure_evaluation
from tests.e2e.evaluation.test_lm_eval import uncounted_downloads
from tests.e2e.runs import CPU, run

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: make peers")

pytestmark = pytest.mark.slow

Rows = list[dict[str, Any]]
NUMBERS = range(6)
CODE = ("return the next line of", "import a module as", "for each key in", "raise an error from")
MARKS = ("text", "name", "value", "self")


def subject(letter: str) -> Rows:
    """Questions, four choices and the place of the right one, as in MMLU."""
    return [
        {
            "question": f"{letter} {CODE[n % 4]} {MARKS[n % 3]}{n}?",
            "choices": [f"{mark} {n}" for mark in MARKS],
            "answer": n % 4,
        }
        for n in NUMBERS
    ]


def targets(n: int) -> dict[str, Any]:
    return {"choices": [f"{CODE[n % 4]} {mark}." for mark in MARKS], "labels": [1, 0, n % 2, 0]}


DATE = {"day": "", "month": "", "year": ""}
# The harness's files, by the names of its tasks, and rows in the form in which each is published.
TASKS: dict[str, tuple[str, Rows]] = {
    "mmlu_abstract_algebra": ("mmlu/default/mmlu_abstract_algebra.yaml", subject("a")),
    "mmlu_astronomy": ("mmlu/default/mmlu_astronomy.yaml", subject("b")[:4]),
    "lambada_openai": (
        "lambada/lambada_openai.yaml",
        [{"text": f"{CODE[n % 4]} the {MARKS[n % 4]}"} for n in NUMBERS],
    ),
    # Results and aggregations of the tasks' own code, in the next four.
    "truthfulqa_mc2": (
        "truthfulqa/truthfulqa_mc2.yaml",
        [
            {"question": CODE[n % 4], "mc1_targets": targets(n), "mc2_targets": targets(n)}
            for n in NUMBERS
        ],
    ),
    "cb": (
        "super_glue/cb/default.yaml",
        [{"premise": CODE[n % 4], "hypothesis": MARKS[n % 3], "label": n % 3} for n in NUMBERS],
    ),
    "wikitext": (
        "wikitext/wikitext.yaml",
        [{"page": f" = {CODE[n % 4]} = \n the {MARKS[n % 4]} 's , " * 3} for n in NUMBERS],
    ),
    "drop": (
        "drop/default.yaml",
        [
            {
                "query_id": str(n),
                "passage": CODE[n % 4],
                "question": f"{MARKS[n % 4]}?",
                "answer": {"number": "", "date": DATE, "spans": ["def", "in"]},
                "validated_answers": {"number": [str(n)], "date": [DATE], "spans": [[]]},
            }
            for n in NUMBERS
        ],
    ),
    "gsm8k": (
        "gsm8k/gsm8k.yaml",
        [
            {"question": f"{CODE[n % 4]} {n}?", "answer": f"{n} and 1.\n#### {n + 1}"}
            for n in NUMBERS
        ],
    ),
}
NAMES = ["mmlu_stem", *list(TASKS)[2:]]


def write_tasks(folder: Path) -> None:
    """Write files that give tasks of the harness other rows, and a group with fewer subjects."""
    own = Path(lm_eval.__file__).parent / "tasks"
    for name, (file, rows) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = dict.fromkeys(("train", "validation", "dev", "test"), str(data))
        kwargs = {"data_files": files, "cache_dir": str(folder / "cache")}
        local = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": kwargs}
        found = {"include": str(own / file), "task": name, **local}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(found))
    group = yaml.safe_load((own / "mmlu" / "default" / "_mmlu_stem.yaml").read_text())
    group["task"] = list(TASKS)[:2]
    (folder / "mmlu_stem.yaml").write_text(yaml.safe_dump(group))


def _ours(rank: int, world: int, folder: str, include: str) -> dict[str, Any]:
    """The results of the adapter, in a pool worker."""
    config = configure_evaluation(rank, world, folder, STUDENT_ALONE)
    from megatron_distill.train.assemble.harness import evaluate_by_harness

    found = evaluate_by_harness(config, CPU, NAMES, include=include, limit=None, samples=True)
    assert found is not None
    return _plain(found)


def _theirs(folder: Path, include: Path, names: list[str]) -> dict[str, Any]:
    """The results of the harness's own backend."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with patch.dict(os.environ, DISABLE_MULTIPROC="1"), uncounted_downloads():
        found = lm_eval.simple_evaluate(
            model=HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4),
            tasks=names,
            task_manager=TaskManager(include_path=str(include), include_defaults=False),
            bootstrap_iters=200,
            log_samples=True,
        )
    return _plain(found)


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """Measures by task or group, and the model's answers by task, filter and item."""
    return {
        "measures": {
            name: {key: value for key, value in own.items() if isinstance(value, float)}
            for name, own in found["results"].items()
        },
        "answers": {
            task: [
                answer
                for one in sorted(own, key=lambda one: (one["filter"], one["doc_id"]))
                for answers in one["resps"]
                for answer in answers
            ]
            for task, own in found["samples"].items()
        },
    }


def test_tasks_of_the_harness_measure_what_its_own_backend_does(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    """A group, every type of output, and code of the tasks' own, on two data ranks."""
    output, folder, exported = (tmp_path / name for name in ("run", "tasks", "exported"))
    folder.mkdir()
    write_tasks(folder)
    words = ("train.steps=1", "checkpoint.save=true", "data.sequence_length=1024")
    run(pool, 1, dense, output, *words)
    pool.run(1, export, output, exported)
    _give_answers(folder, _theirs(exported, folder, ["drop"])["answers"]["drop"])
    theirs = _theirs(exported, folder, NAMES)
    measures = theirs["measures"]
    assert 0 < measures["drop"]["f1,none"] < 1, measures
    assert 0 < measures["mmlu_stem"]["acc,none"] < 1, measures
    for ours in pool.run(2, _ours, str(output), str(folder)):
        assert set(ours["measures"]) == set(measures) == {"mmlu_stem", *TASKS}
        for name, own in ours["measures"].items():
            assert own == pytest.approx(measures[name], rel=1e-4, abs=0), name
            _compare(ours["answers"].get(name, []), theirs["answers"].get(name, []))


def _give_answers(folder: Path, texts: list[str]) -> None:
    """Write right answers of `drop` that have more and more words of the model's texts."""
    rows = [
        {**row, "answer": {**row["answer"], "spans": ["def", *text.split()[: 2 * n]]}}
        for n, (row, text) in enumerate(zip(TASKS["drop"][1], texts, strict=True))
    ]
    (folder / "drop.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _compare(ours: list[Any], theirs: list[Any]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        if isinstance(other, str):
            assert own == other
        else:
            assert own == pytest.approx(other, abs=1e-4, rel=0)
