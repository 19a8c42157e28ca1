"""What `evaluate --lm-eval` says of tasks that cannot be read, and that it downloads nothing."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron_distill.cli import main
from megatron_distill.errors import ConfigError
from megatron_distill.evaluation.tasks.encode import TextEncoder
from tests.e2e.processes import run_program
from tests.support.chat_fixtures import chat_tokenizer

pytest.importorskip("lm_eval", reason="lm-eval is not installed: make peers")

from lm_eval.tasks import TaskManager

from megatron_distill.evaluation.lm_eval_model import ScorerLM, harness_tasks, run_harness
from tests.unit.evaluation.test_lm_eval_model import Positions

VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
ROWS = ({"q": "Is it é?", "right": 0}, {"q": "Is it sunny?", "right": 1})


def write_task(folder: Path, **changes: Any) -> str:
    """Write a task of two rows, with some of its keys changed."""
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
    files = {"data_files": {"test": str(folder / "rows.jsonl")}}
    task = {
        "task": "own",
        "dataset_path": "json",
        "dataset_kwargs": {**files, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": ["no", "yes"],
        "doc_to_target": "{{right}}",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "own.yaml").write_text(json.dumps({**task, **changes}))
    return str(folder)


def refusal(folder: Path, names: Sequence[str] = ("own",), **changes: Any) -> str:
    """The error of the task."""
    with pytest.raises(ConfigError) as refused:
        harness_tasks(names, include=write_task(folder, **changes))
    return str(refused.value)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, ("1", "1", "1")),
        ({"HF_HUB_OFFLINE": "0"}, ("0", "0", "0")),
        ({"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "1"}, ("0", "1", "0")),
        ({"HF_DATASETS_OFFLINE": "0"}, ("1", "0", "1")),
    ],
    ids=str,
)
def test_the_command_asks_no_server_unless_the_user_s_variables_say_so(
    own: dict[str, str], expected: tuple[str, ...]
) -> None:
    """Before the packages that read the variables are imported."""
    found: list[tuple[str | None, ...]] = []

    def run(_: Any) -> int:
        found.append(tuple(map(os.environ.get, VARIABLES)))
        return 0

    others = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with (
        patch.dict(os.environ, {**others, **own}, clear=True),
        patch("megatron_distill.commands.evaluate.with_launch", run),
    ):
        assert main(["evaluate", "runs/first", "--lm-eval", "quiz"]) == 0
    assert found == [expected]


FAR = """
import os, sys
from megatron_distill.evaluation.lm_eval_offline import forbid_downloads
from tests.e2e.offline import refusing_network
assert not {"huggingface_hub", "datasets", "lm_eval"} & set(sys.modules)
forbid_downloads(os.environ)
from megatron_distill.errors import ConfigError
from megatron_distill.evaluation.lm_eval_model import harness_tasks
with refusing_network() as asked:
    try:
        harness_tasks(["own"], include=sys.argv[1])
    except ConfigError as error:
        print(error)
assert not asked, asked
"""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_path": "some/where", "dataset_kwargs": {}}, "the data set some/where is not on"),
        pytest.param(
            {"metric_list": [{"metric": "far", "aggregation": "mean", "higher_is_better": True}]},
            "the metric far is not one of the harness, and the package evaluate cannot load it",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["data", "metric"],
)
def test_what_is_not_on_this_machine_is_named_and_no_server_asked(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "far.py").write_text(FAR)
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_task(folder, **changes)
    with patch.dict(os.environ, {"HF_HOME": str(tmp_path / "home")}):
        done = run_program(sys.executable, str(tmp_path / "far.py"), str(folder), seconds=60)
    assert f"--lm-eval own: {message}" in done.stdout, done
    assert "run once with a network and HF_HUB_OFFLINE=0" in done.stdout


def test_an_unknown_task_is_told_of_in_a_sentence(tmp_path: Path) -> None:
    message = "--lm-eval {}: neither the harness nor --include has a task of that name{}; "
    remedy = "correct the name, or name by --include the folder of the task's file"

    def manager(include_path: str, **_: Any) -> TaskManager:  # the harness's own take 10 s to read
        return TaskManager(include_path=include_path, include_defaults=False)

    with patch("megatron_distill.evaluation.lm_eval_model.TaskManager", manager):
        assert refusal(tmp_path, ["other"]) == message.format("other", "") + remedy
        near = message.format("owm", " (did you mean own?)") + remedy
        assert refusal(tmp_path, ["owm"]) == near


@pytest.mark.parametrize("key", ["doc_to_text", "doc_to_target", "doc_to_choice"])
def test_a_missing_column_is_told_of_with_the_template_and_the_columns(
    tmp_path: Path, key: str
) -> None:
    assert refusal(tmp_path, **{key: "{{zz}}"}) == (
        f"--lm-eval own: {key} does not fit the data: 'zz' is undefined (the rows have q, right); "
        "correct the template, or give data with the columns that it names"
    )


def encode(folder: Path, *, last: bool) -> dict[str, Any]:
    """Files of a task, one of which has a row in Latin-1: the last or the first."""
    rows = ROWS[::-1] if last else ROWS
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "latin.jsonl").write_text(lines, encoding="latin-1")
    files = [str(folder / "latin.jsonl"), str(folder / "row[s].jsonl")]
    return {"data_files": {"test": files}, "cache_dir": str(folder / "cache")}


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    """As a task is loaded, in a table, and in a row of which no example was made before."""
    message = f"--lm-eval own: {tmp_path}/latin.{{}}: not UTF-8 ("
    remedy = "; convert it to UTF-8"
    found = refusal(tmp_path, dataset_kwargs=encode(tmp_path, last=False))
    assert found.startswith(message.format("jsonl")), found
    assert found.endswith(remedy), found
    (tmp_path / "latin.csv").write_text("q,right\né,0\n", encoding="latin-1")
    files = {"data_files": {"test": str(tmp_path / "latin.csv")}}
    kwargs = {**files, "cache_dir": str(tmp_path / "cache")}
    found = refusal(tmp_path, dataset_path="csv", dataset_kwargs=kwargs)
    assert found.startswith(message.format("csv")), found
    split = encode(tmp_path, last=True)
    split["data_files"]["dev"] = str(tmp_path / "rows.jsonl")
    include = write_task(tmp_path, dataset_kwargs=split, fewshot_split="dev")
    tasks = harness_tasks(["own"], include=include)
    model = ScorerLM(Positions(4096), TextEncoder(chat_tokenizer("plain")))
    with pytest.raises(ConfigError, match=r"own: .*/latin\.jsonl: not UTF-8"):
        run_harness(model, tasks, limit=None)


def test_defaults_of_a_metric_are_no_warnings_and_other_warnings_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (task,) = harness_tasks(["own"], include=write_task(tmp_path))
    assert "is defined, but" not in caplog.text
    assert task.aggregation()["acc"]
    logging.getLogger("lm_eval.api.task").warning("another")
    assert "another" in caplog.text
