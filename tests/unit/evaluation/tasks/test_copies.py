"""Copies of published data sets, read without a network."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_distill.errors import ConfigError, DataError
from megatron_distill.evaluation.tasks.prompts import Item, read_task
from megatron_distill.evaluation.tasks.record import load_task
from tests.guards.source_tree import ROOT
from tests.unit.evaluation.tasks import published
from tests.unit.evaluation.tasks.test_prompts import lines

Rows = Sequence[dict[str, Any]]
Make = Callable[[Path], None]
SUBJECTS = ("abstract_algebra", "virology")
MMLU = [row for subject in SUBJECTS for row in published.MMLU if row["subject"] == subject]
ARC = [{**row, "answerKey": row["choices"]["label"][3]} for row in published.ARC]
# Problems of one subject after the other, by the names of their files.
MATH = [
    {
        **published.MATH[0],
        "problem": f"Compute ${n}+1$.",
        "solution": f"It is $\\boxed{{{n + 1}}}$.",
        "type": ("Algebra", "Algebra", "Geometry")[n],
    }
    for n in range(3)
]
MATH_FILES = ("test/algebra/1.json", "test/algebra/10.json", "test/geometry/2.json")


def parquet(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def hub(folder: Path, *files: tuple[str, Rows]) -> None:
    for name, rows in files:
        parquet(folder / f"{name}-00000-of-00001.parquet", rows)


def on_hub(rows: Rows, *names: str) -> Make:
    """Both files have the same rows."""
    return lambda folder: hub(folder, *((name, rows) for name in names))


def mmlu_tables(folder: Path) -> None:
    """The tables of data.tar: no header line, the answer's letter, the subject in the name."""
    for split in ("dev", "test"):
        (folder / split).mkdir(parents=True)
        for subject in SUBJECTS:
            with (folder / split / f"{subject}_{split}.csv").open("w", newline="") as file:
                csv.writer(file).writerows(
                    [row["question"], *row["choices"], "ABCD"[row["answer"]]]
                    for row in MMLU
                    if row["subject"] == subject
                )


def arc_lines(folder: Path) -> None:
    def choices(text: Sequence[str], label: Sequence[str]) -> list[dict[str, str]]:
        return [{"text": t, "label": one} for t, one in zip(text, label, strict=True)]

    rows = [
        {
            "id": row["id"],
            "question": {"stem": row["question"], "choices": choices(**row["choices"])},
            "answerKey": row["answerKey"],
        }
        for row in ARC
    ]
    for part in ("Challenge", "Easy"):
        (folder / f"ARC-{part}").mkdir(parents=True)
        for split in ("Train", "Test"):
            lines(folder / f"ARC-{part}" / f"ARC-{part}-{split}.jsonl", rows)


def gsm8k_lines(folder: Path) -> None:
    folder.mkdir()
    for split in ("train", "test"):
        lines(folder / f"{split}.jsonl", published.GSM8K)


def hellaswag_lines(folder: Path) -> None:
    folder.mkdir()
    rows = [{**row, "label": int(row["label"])} for row in published.HELLASWAG]
    for split in ("train", "val"):
        lines(folder / f"hellaswag_{split}.jsonl", rows)


def math_files(folder: Path) -> None:
    """MATH.tar: a file per problem, with line ends inside its object."""
    for name, row in zip(MATH_FILES, MATH, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(row, indent=4), encoding="utf-8")


def math_of_hub(folder: Path) -> None:
    hub(folder, ("algebra/test", MATH[:2]), ("geometry/test", MATH[2:]))


def math_500_of_hub(folder: Path) -> None:
    folder.mkdir()
    lines(folder / "test.jsonl", published.MATH_500)


ROWS: dict[str, Rows] = {
    "mmlu": MMLU,
    "arc": ARC,
    "hellaswag": published.HELLASWAG,
    "gsm8k": published.GSM8K,
    "mmlu_pro": published.MMLU_PRO,
    "mmlu_pro_cot": published.MMLU_PRO,
    "mmlu_pro_original": published.MMLU_PRO,
    "math_500": published.MATH_500,
    "hendrycks_math": MATH,
    "minerva_math": MATH,
    "math_original": MATH,
}
COPIES: list[tuple[str, int, Make, Make | None]] = [
    ("mmlu", 2, on_hub(MMLU, "all/test", "all/dev"), mmlu_tables),
    ("mmlu_original", 2, on_hub(MMLU, "all/test", "all/dev"), mmlu_tables),
    ("arc_challenge", 1, on_hub(ARC, "ARC-Challenge/test", "ARC-Challenge/train"), arc_lines),
    ("arc_easy", 1, on_hub(ARC, "ARC-Easy/test", "ARC-Easy/train"), arc_lines),
    (
        "hellaswag",
        1,
        on_hub(published.HELLASWAG, "data/validation", "data/train"),
        hellaswag_lines,
    ),
    ("gsm8k", 5, on_hub(published.GSM8K, "main/test", "main/train"), gsm8k_lines),
    ("mmlu_pro", 2, on_hub(published.MMLU_PRO, "data/test", "data/validation"), None),
    ("mmlu_pro_cot", 2, on_hub(published.MMLU_PRO, "data/test", "data/validation"), None),
    ("mmlu_pro_original", 2, on_hub(published.MMLU_PRO, "data/test", "data/validation"), None),
    ("hendrycks_math", 0, math_of_hub, math_files),
    ("minerva_math", 4, math_of_hub, math_files),
    ("math_original", 8, math_of_hub, math_files),
    ("math_500", 0, math_500_of_hub, None),
]


def asked(items: Sequence[Item]) -> list[tuple[str, tuple[str, ...], int, str, str]]:
    return [(item.prompt.text, item.choices, item.right, item.target, item.group) for item in items]


@pytest.mark.parametrize(
    ("named", "shots", "of_hub", "of_authors"), COPIES, ids=[copy[0] for copy in COPIES]
)
def test_both_copies_of_a_data_set_are_the_same_items(
    tmp_path: Path, named: str, shots: int, of_hub: Make, of_authors: Make | None
) -> None:
    of_hub(tmp_path / "hub")
    found = asked(read_task(load_task(named, {"folder": str(tmp_path / "hub"), "shots": shots})))
    # Against lines of the same rows, whose prompts are compared with the harness's elsewhere.
    plain = ROWS.get(named) or ROWS[named.partition("_")[0]]
    file = lines(tmp_path / "rows.jsonl", plain)
    shot_files = {} if "math" in named else {"shot_files": [file]}
    changes = {"files": [file], "shots": shots, **shot_files}
    assert found == asked(read_task(load_task(named, changes)))
    if of_authors is not None:
        of_authors(tmp_path / "own")
        own = {"folder": str(tmp_path / "own"), "shots": shots}
        assert asked(read_task(load_task(named, own))) == found
    assert len(found) == len(plain)


@pytest.mark.parametrize("named", ["mmlu", "mmlu_original"])
def test_mmlu_is_read_from_a_folder_per_subject(tmp_path: Path, named: str) -> None:
    """The configurations of the Hub are such folders, of which `all` has the rows of the others."""
    for subject in SUBJECTS:
        own = [row for row in MMLU if row["subject"] == subject]
        hub(tmp_path / "one", (f"{subject}/test", own), (f"{subject}/dev", own))
    hub(tmp_path / "all", ("all/test", MMLU), ("all/dev", MMLU))
    one, whole = (
        asked(read_task(load_task(named, {"folder": str(tmp_path / name), "shots": 2})))
        for name in ("one", "all")
    )
    assert one == whole
    assert {group for *_, group in one} == set(SUBJECTS)


@pytest.mark.parametrize("named", ["hendrycks_math", "minerva_math", "math_original"])
def test_items_of_math_are_grouped_by_subject(tmp_path: Path, named: str) -> None:
    math_of_hub(tmp_path)
    found = read_task(load_task(named, {"folder": str(tmp_path)}))
    assert [item.group for item in found] == ["Algebra", "Algebra", "Geometry"]


def test_a_folder_without_a_copy_names_the_files_of_each(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_task(load_task("mmlu", {"folder": str(tmp_path)}))
    assert "there is no file " in str(error.value)
    files = "all/test-*.parquet, nor */test-*.parquet nor test/*_test.csv"
    assert f"{files}; correct files or `folder`" in str(error.value)
    # Files of one's own are asked for alone.
    own = {"folder": str(tmp_path), "files": ["mine.csv"]}
    with pytest.raises(ConfigError, match=r"no file \S+mine\.csv; correct files"):
        read_task(load_task("mmlu", own))


def test_json_files_are_lines_objects_or_lists(tmp_path: Path) -> None:
    rows = [{"q": "a?", "right": "yes"}, {"q": "b?", "right": "no"}]
    (tmp_path / "odd.yaml").write_text(
        "kind: multiple_choice\nquestion: '{{ q }}'\nchoices: ['no', 'yes']\nanswer: right\n"
        "group: file\n"
    )
    contents = {
        "lines.json": "".join(json.dumps(row) + "\n" for row in rows),
        "list.json": json.dumps(rows),
        "tall.json": json.dumps(rows, indent=2),
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
        changes = {"folder": str(tmp_path), "files": [name]}
        items = read_task(load_task(str(tmp_path / "odd.yaml"), changes))
        assert [(item.prompt.text, item.right) for item in items] == [("a?", 1), ("b?", 0)]
        assert {item.group for item in items} == {name.removesuffix(".json")}
    wrong = {"half.json": '{"q": "a?",\n', "number.json": "[1, 2]"}
    for name, content in wrong.items():
        (tmp_path / name).write_text(content)
        changes = {"folder": str(tmp_path), "files": [name]}
        with pytest.raises(DataError, match=f"{name}:? *1?: not (JSON|a JSON object)"):
            read_task(load_task(str(tmp_path / "odd.yaml"), changes))


PROGRAM = """
import json, socket, sys

def refuse(*_, **__):
    raise OSError("there is no network")

socket.socket.connect = socket.getaddrinfo = refuse
from megatron_distill.data.tokenizers.open import train_bpe
from megatron_distill.evaluation.requests import Score
from megatron_distill.evaluation.tasks import grading
from megatron_distill.evaluation.tasks.prepared import prepare_task
from megatron_distill.evaluation.tasks.record import load_task
from megatron_distill.evaluation.tasks.results import task_result

OTHERS = {"lm_eval", "datasets", "math_verify", "sympy"}
print({*OTHERS, "transformers"} & set(sys.modules))
tokenizer = train_bpe(["Which of these is A?", "The answer is B."] * 9, vocab_size=300)
for named, file in json.loads(sys.argv[1]).items():
    shots = {} if named == "minerva_math" else {"shot_files": [file], "shots": 1}
    changes = {"files": [file], "graders": ["exact"], **shots}
    task = prepare_task(load_task(named, changes), tokenizer, positions=9000)
    print(named, len(task.items), task.prompt_hash[:7])
    if task.task.kind == "multiple_choice":
        task_result(task, [Score(-1.0, True)] * len(task.requests))
print(OTHERS & set(sys.modules))  # the tokenizer is one of transformers
"""


def test_tasks_need_no_network_and_no_harness(tmp_path: Path) -> None:
    rows = {
        "mmlu": published.MMLU,
        "arc_challenge": published.ARC,
        "hellaswag": published.HELLASWAG,
        "gsm8k": published.GSM8K,
        "minerva_math": published.MATH,
    }
    files = {}
    for named, own in rows.items():
        files[named] = str(tmp_path / f"{named}.jsonl")
        Path(files[named]).write_text("".join(json.dumps(row) + "\n" for row in own))
    empty = {"HF_HOME": str(tmp_path / "no-cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(files)],
        env={**os.environ, **empty},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported, *found, imported_later = done.stdout.splitlines()
    assert [line.split()[:2] for line in found] == [
        [named, str(len(own))] for named, own in rows.items()
    ]
    assert (imported, imported_later) == ("set()", "set()")
