"""The comparison of losses between tokenizers: its runs, its table and its refusals."""

from __future__ import annotations

import argparse
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from launch import quickstart_tokenizers
from megatron_distill.commands.quickstart.losses_compared import (
    LOSSES,
    LossRuns,
    check_baseline,
    compare,
    data_wait,
    margins_over_seeds,
    show,
)
from megatron_distill.commands.quickstart.options import STOPPED_STATUS, Checkout, exit_status
from megatron_distill.commands.quickstart.two_tokenizers import Tokens, parse, plan
from megatron_distill.config import load_config
from megatron_distill.errors import DataError
from megatron_distill.evaluation.bits_per_byte import HeldOutText
from megatron_distill.evaluation.child_runs import ChildRun
from megatron_distill.evaluation.independent_loss import IndependentLoss
from megatron_distill.evaluation.runs import RunLog

ROOT = Path(quickstart_tokenizers.__file__).parent.parent
TEACHER_TEXT, STUDENT_TEXT = HeldOutText(20, 1000, 4000), HeldOutText(25, 1250, 4000)
NAMES = list(LOSSES)


@pytest.fixture
def comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LossRuns:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments = parsed("--output", str(tmp_path), "--steps", "10", "train.micro_batch_size=2")
    teacher = Tokens(tmp_path / "a", TEACHER_TEXT, lambda: iter(()))
    student = Tokens(tmp_path / "b", STUDENT_TEXT, lambda: iter(()))
    return plan(arguments, 7, NAMES, teacher, student, Checkout(ROOT))


def parsed(*words: str) -> argparse.Namespace:
    return parse(words)


def log(label: str, loss: float | None) -> RunLog:
    held_out = ({"step": 2, "validation": {} if loss is None else {"ce_loss": loss}},)
    steps = tuple({"step": step, "tokens": step * 100, "ce_loss": 7.0} for step in (1, 2))
    return RunLog(label, Path(label), steps, held_out)


def test_the_students_differ_in_the_objective_alone(comparison: LossRuns) -> None:
    teacher, *students = (
        load_config(run.arguments[1], run.arguments[2:]) for run in comparison.children
    )
    assert [run.name for run in comparison.distilled] == [f"student_{name}" for name in NAMES]
    assert [student.objective.terms[0].alignment for student in students[1:]] == NAMES
    assert [student.objective.terms[0].weight > 0 for student in students] == [
        False, *[True] * len(NAMES),
    ]  # fmt: skip
    for student in students:
        alike = student.model_copy(
            update={"output": students[0].output, "objective": students[0].objective}
        )
        assert alike == students[0]
        assert student.teacher.checkpoint == teacher.output
        assert student.validation.samples == STUDENT_TEXT.samples
        assert student.train.steps == teacher.train.steps == 10
    assert teacher.validation.samples == TEACHER_TEXT.samples
    same = ("sources", "validation_fraction", "isolate_documents")
    assert all(getattr(teacher.data, name) == getattr(students[0].data, name) for name in same)


def test_the_table_is_in_bits_per_byte_and_shares_of_the_gap(comparison: LossRuns) -> None:
    losses = [2.0, *(1.8 for _ in NAMES)]
    students = [log(str(index), loss) for index, loss in enumerate(losses)]
    rows = compare(log("teacher", 2.0), students, comparison)
    teacher, alone = (
        2.0 * labels / 4000 / math.log(2) for labels in (1000, 1250)
    )  # the same loss per label is less per byte with fewer labels
    assert [row.bits_per_byte for row in rows[:2]] == pytest.approx([teacher, alone])
    assert [row.gap_closed for row in rows[:2]] == [None, None]
    assert [row.gap_closed for row in rows[2:]] == pytest.approx([0.5] * len(NAMES))
    with pytest.raises(DataError, match="no held-out loss"):
        compare(log("teacher", None), students, comparison)


def test_the_wait_for_data_is_that_of_all_steps_but_the_first() -> None:
    assert data_wait(log("alone", 2.0)) is None  # a log without the figure
    shares = [0.9, *(step / 100 for step in range(21))]
    steps = tuple(
        {"step": at, "tokens": at, "data_wait": one} for at, one in enumerate(shares, start=1)
    )
    found = data_wait(RunLog("alone", Path("alone"), steps, ()))
    assert found == pytest.approx({"median": 0.1, "mean": 0.1, "95 of 100 below": 0.19})


def finished(comparison: LossRuns, loss: float) -> None:
    """Write the log of the student alone with a held-out loss."""
    comparison.alone.folder.mkdir(exist_ok=True)
    lines = [{"step": 10, "ce_loss": 1.0}, {"step": 10, "validation": {"ce_loss": loss}}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (comparison.alone.folder / "metrics.jsonl").write_text(text)


def test_a_baseline_is_the_figure_of_transformers_or_the_comparison_stops(
    comparison: LossRuns,
) -> None:
    alone, text = comparison.alone, comparison.baselines[comparison.alone.name]
    assert text == STUDENT_TEXT
    assert comparison.baselines[comparison.teacher.name] == TEACHER_TEXT
    asked: list[str] = []

    def check(found: IndependentLoss) -> Mapping[str, float]:
        def independent(child: ChildRun) -> IndependentLoss:
            asked.append(child.name)
            return found

        console = Console(file=io.StringIO())
        return check_baseline(alone, text, independent, console)

    finished(comparison, 2.0)
    wrong = {
        "2.000000 nats of 1,250 labels in the run and 2.000300": IndependentLoss(2.0003, 1250),
        "of 1,249 by transformers alone": IndependentLoss(2.0, 1249),
        "and nan of 1,250": IndependentLoss(math.nan, 1250),
    }
    for message, found in wrong.items():
        with pytest.raises(DataError, match=f"student alone: .*{message}"):
            check(found)
    figures = check(IndependentLoss(2.00001, 1250))
    assert figures["run"] == text.bits_per_byte(2.0) < figures["transformers"]
    # A comparison that goes on does not ask again, unless the run has another loss.
    assert check(IndependentLoss(9.0, 1)) == figures
    assert asked == [alone.name] * 4
    finished(comparison, 3.0)
    with pytest.raises(DataError, match="3.000000 nats"):
        check(IndependentLoss(2.0, 1250))


def test_margins_are_those_over_the_student_alone(comparison: LossRuns) -> None:
    outcomes = [
        {"rows": [{"label": "student alone", "bits_per_byte": 3.0},
                  *({"label": name, "bits_per_byte": bits} for name in NAMES)]}
        for bits in (2.5, 3.5)
    ]  # fmt: skip
    found = margins_over_seeds([comparison, comparison], outcomes)
    assert found == {name: {"mean": 0.0, "least": -0.5, "most": 0.5} for name in NAMES}


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_terminal_of_any_width_shows_whole_figures(comparison: LossRuns, width: int) -> None:
    losses = [2.0, *(1.8 for _ in NAMES)]
    students = [log("student alone", 2.0), *map(log, NAMES, losses[1:])]
    rows = compare(log("teacher", 2.0), students, comparison)
    console = Console(width=width, soft_wrap=True, record=True, file=io.StringIO())
    show(rows, comparison, console)
    text = console.export_text()
    assert "\u2026" not in text
    for row in rows:
        (line,) = (line for line in text.splitlines() if line.strip().startswith(f"{row.label}  "))
        shown = line.split()
        assert f"{row.bits_per_byte:.4f}" in shown
        assert (f"{row.nats_per_label:.4f}" in shown) == (width >= 74)
    table = [line for line in text.splitlines() if line.startswith("  ")]
    assert max(map(len, table)) <= width


def test_an_interruption_between_the_runs_ends_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(console: Console) -> None:
        raise KeyboardInterrupt

    assert exit_status(interrupted) == STOPPED_STATUS
    assert capsys.readouterr().out == "\nstopped. The same command goes on from here.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--losses", "likelihood,nearest"], "unknown 'nearest'; choose from likelihood, common"),
        (["validation.samples=8"], "validation.samples=8: bits per byte are of all held-out"),
        (["optimizer.learning_rat=1"], "learning_rate"),
    ],
)
def test_a_wrong_argument_is_found_before_anything_is_written(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quickstart_tokenizers.main(["--output", str(tmp_path), *words]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
