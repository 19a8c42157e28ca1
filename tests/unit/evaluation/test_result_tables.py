"""Tables of an evaluation: every figure with its error, in the row of its name."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_distill.commands import evaluate
from megatron_distill.evaluation.result_tables import result_tables

COMPARED = {
    "tokens": 1024,
    "top1_agreement": 0.4375,
    "top1_agreement_stderr": 0.0424,
    "acceptance": [0.25, 0.5],
    "acceptance_stderr": [0.01, 0.02],
    "tokens_per_verification": {"1": 1.75, "2": 2.25},
    "tokens_per_verification_stderr": {"1": 0.125, "2": 0.5},
    "blocks": {"1": 1024, "2": 1016},
    "calibration": [{"from": 0.0, "share": 1.0}],
    "text_hash": "sha256:a",
}
OF_RUN: dict[str, Any] = {
    "ce_loss": 5.75,
    "sources": {"web": {"ce_loss": 5.5}},
    "comparison": COMPARED,
    "comparison_on_teacher_text": {"tokens": 512, "forward_kl": 0.125},
    "speculative": {
        "sampled": {"2": {"tokens_per_verification": 2.5, "expected": 2.25, "blocks": 208}},
        "greedy": {"2": {"tokens_per_verification": 1.5, "texts": 8}},
    },
}
QUIZ = {"acc": 0.25, "acc_stderr": 0.125, "groups": {"a": {"acc": 0.5}}, "n": 12, "truncated": 0}
OF_TASKS: dict[str, Any] = {
    "results": {
        "student": {"quiz": {**QUIZ, "not_comparable": ["limit"], "shots_dropped": 2}},
        "teacher": {"quiz": {**QUIZ, "acc": 0.75}},
    },
    "student_minus": {
        "teacher": {"quiz": {"acc": {"difference": -0.5, "low": -0.75, "high": -0.25, "n": 12}}}
    },
}


def rows_of(figures: dict[str, Any]) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=160)
    for table in result_tables(figures):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue().replace("\N{PLUS-MINUS SIGN}", "+-")
    return [line.split() for line in text.splitlines()]


def test_held_out_figures_have_their_errors_and_intervals() -> None:
    rows = rows_of(OF_RUN)
    for row in (
        "ce_loss 5.7500",
        "web: ce_loss 5.5000",
        "tokens 1,024 512",
        "top1_agreement 0.4375 +- 0.0424",
        "acceptance 0.2500 +- 0.0100 to 0.5000 +- 0.0200",
        "tokens_per_verification.2 2.2500 +- 0.5000",
        "forward_kl 0.1250",
        "sampled, 2 2.5000 2.2500 208",
        "greedy, 2 1.5000 8",
    ):
        assert row.split() in rows
    words = {word for row in rows for word in row}
    assert not words & {"calibration", "text_hash", "top1_agreement_stderr"}


def test_results_of_tasks_stand_beside_the_teacher_s_with_their_difference() -> None:
    rows = rows_of(OF_TASKS)
    row = "quiz acc 12 0.2500 +- 0.1250 0.7500 +- 0.1250 -0.5000 (-0.7500 to -0.2500)"
    assert row.split() in rows
    assert ["quiz", "shots_dropped", "2"] in rows
    assert ["quiz", "is", "not", "comparable", "with", "published", "results:", "limit"] in rows
    assert "truncated" not in {word for row in rows for word in row}


def test_results_of_the_harness_have_their_metrics_and_filters() -> None:
    own = {"alias": "math", "sample_len": 3, "exact_match,flexible": 0.5}
    own |= {"exact_match_stderr,flexible": 0.25, "acc,none": 0.75, "acc_stderr,none": "N/A"}
    counts = {"math": {"original": 9, "effective": 3}}
    rows = rows_of({"results": {"math": own}, "configs": {}, "n-samples": counts})
    assert ["math", "exact_match", "flexible", "3", "0.5000", "+-", "0.2500"] in rows
    assert ["math", "acc", "3", "0.7500"] in rows


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_has_tables_and_a_pipe_json(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    evaluate._write_out(OF_RUN, None)
    written = capsys.readouterr().out
    if is_terminal:
        assert "top1_agreement" in written
        assert "{" not in written
    else:
        assert json.loads(written) == OF_RUN
    evaluate._write_out(OF_RUN, tmp_path / "figures.json")
    assert not capsys.readouterr().out
    assert json.loads((tmp_path / "figures.json").read_text()) == OF_RUN
