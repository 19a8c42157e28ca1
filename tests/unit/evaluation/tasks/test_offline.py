"""Tasks without a network: their files are local, and the packages of published harnesses stay out.

In a process of its own, since this one has imported those packages for other tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.guards.source_tree import ROOT
from tests.unit.evaluation.tasks import published

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
