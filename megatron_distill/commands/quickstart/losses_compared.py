"""Students with a tokenizer of their own, one per loss, compared in bits per byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_distill.commands.quickstart.options import spread
from megatron_distill.errors import ConfigError, DataError
from megatron_distill.evaluation.bits_per_byte import HeldOutText
from megatron_distill.evaluation.child_runs import (
    ChildRun,
    announce,
    check_equal_start,
    make,
    remove_child,
    write_json,
)
from megatron_distill.evaluation.independent_loss import IndependentLoss, require_equal
from megatron_distill.evaluation.plot import plot_losses
from megatron_distill.evaluation.runs import RunLog, margin, summarize

__all__ = [
    "ALONE",
    "ALONE_NOTE",
    "LOSSES",
    "TOKENIZERS",
    "BitsPerByte",
    "LossRuns",
    "carry_out",
    "check_baseline",
    "chosen_losses",
    "compare",
    "data_wait",
    "exported_folder",
    "margins_over_seeds",
    "remove",
    "show",
    "show_margins",
]

TOKENIZERS: Final = "tokenizers"

# `objective.terms` of the student with each loss. The likelihood's divergence between two classes
# is small beside a cross-entropy, 0.02 nats at the start.
LOSSES: Final[Mapping[str, str]] = {
    "likelihood": "[{alignment: likelihood, divergence: forward_kl, weight: 10.0}]",
    "common": "[{alignment: common, divergence: forward_kl, weight: 1.0}]",
    "projection": "[{alignment: projection, divergence: forward_kl, weight: 1.0}]",
    "gold": "[{alignment: gold, divergence: forward_kl, weight: 1.0}]",
    "uld": "[{alignment: uld, weight: 1.0}]",
}
# A term of weight 0: the samples of all students are then cut at the same places of the text.
ALONE: Final = "[{alignment: likelihood, divergence: forward_kl, weight: 0.0}]"
ALONE_NOTE: Final = "a term of weight 0: the teacher's samples, and nothing learnt from it"

_COLUMNS: Final = (
    ("bits", "per byte"),
    ("gap", "closed"),
    ("nats", "per label"),
    ("bytes", "per label"),
    ("tokens", "trained on"),
)
_FULL_WIDTH: Final = 74  # a narrower terminal shows the first two


@dataclass(frozen=True)
class LossRuns:
    """The runs of one seed: a teacher, a student alone, and a student for each loss.

    The texts are those of all held-out documents, in the teacher's tokens and in the students'.
    The baselines are the teacher and the student alone.
    """

    place: Path
    seed: int
    teacher: ChildRun
    alone: ChildRun
    distilled: Sequence[ChildRun]
    teacher_text: HeldOutText
    student_text: HeldOutText

    @property
    def students(self) -> Sequence[ChildRun]:
        """All students, in order of execution."""
        return (self.alone, *self.distilled)

    @property
    def children(self) -> Sequence[ChildRun]:
        """All runs, in order of execution."""
        return (self.teacher, *self.students)

    @property
    def baselines(self) -> Mapping[str, HeldOutText]:
        """The held-out text of each baseline, by the name of its run."""
        return {self.teacher.name: self.teacher_text, self.alone.name: self.student_text}


# The held-out loss of a run's exported model without this package; see `independent_loss`.
Independent = Callable[[ChildRun], IndependentLoss]


@dataclass(frozen=True)
class BitsPerByte:
    """The held-out loss of one run.

    Attributes:
        label: name of the run.
        bits_per_byte: cross-entropy of all labels over the bytes of their text.
        gap_closed: improvement over the student alone, as a share of the teacher's. None for the
            teacher and the student alone, or if the teacher is not better.
        nats_per_label: mean cross-entropy of the labels.
        bytes_per_label: mean bytes of their text.
        tokens: tokens that the run was trained on.
    """

    label: str
    bits_per_byte: float
    gap_closed: float | None
    nats_per_label: float
    bytes_per_label: float
    tokens: int


def chosen_losses(text: str) -> Sequence[str]:
    """Return the losses of a comma-separated list; raises ConfigError for an unknown one."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in LOSSES]
    if unknown:
        raise ConfigError(
            f"--losses {text}: unknown {', '.join(map(repr, unknown))}; choose from "
            f"{', '.join(LOSSES)}"
        )
    return list(dict.fromkeys(names))


def remove(runs: LossRuns) -> None:
    """Delete the runs and the results of earlier calls, and nothing else."""
    for child in runs.children:
        remove_child(child)
        _checked_file(child).unlink(missing_ok=True)
        shutil.rmtree(exported_folder(child), ignore_errors=True)
    for name in ("result.md", "result.json", "curves.png"):
        (runs.place / name).unlink(missing_ok=True)


def exported_folder(child: ChildRun) -> Path:
    """The Hugging Face folder of a baseline."""
    return child.place / f"{child.name}_exported"


def _checked_file(child: ChildRun) -> Path:
    return child.place / f"{child.name}_by_transformers.json"


def check_baseline(
    child: ChildRun, text: HeldOutText, independent: Independent, console: Console
) -> Mapping[str, float]:
    """Compare the held-out loss of a finished run with that of `transformers` alone.

    Returns both in bits per byte. They are also written beside the run, and compared again only
    where the run's own has changed. Raises DataError where the two differ.
    """
    nats, file = _held_out_loss(child.log()), _checked_file(child)
    ours = text.bits_per_byte(nats)
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if known.get("run") != ours:
        found = independent(child)
        require_equal(found, nats_per_label=nats, labels=text.labels, run=child.label)
        known = {"run": ours, "transformers": text.bits_per_byte(found.nats_per_label)}
        write_json(file, known)
    console.print(
        f"  checked: {known['run']:.4f} bits per byte in the run, {known['transformers']:.4f} by "
        "transformers alone",
        markup=False,
    )
    checked: Mapping[str, float] = known
    return checked


def carry_out(runs: LossRuns, independent: Independent, console: Console) -> Mapping[str, Any]:
    """Make all unfinished runs, show the result, and return it as plain values.

    Both baselines are checked before any distilled student is trained. The result is also written
    to `result.md` and `result.json`, with the picture `curves.png`. Raises RunStoppedError after a
    signal, and a MegatronDistillError if a run failed or a baseline's loss is not that of
    `transformers`.
    """
    count = len(runs.children)
    baselines: dict[str, Mapping[str, float]] = {}
    for number, child in enumerate(runs.children, start=1):
        announce(child, console, f"{number}/{count}", seed=runs.seed)
        make(child)
        text = runs.baselines.get(child.name)
        if text is not None:
            baselines[child.label] = check_baseline(child, text, independent, console)
    logs = [run.log() for run in runs.students]
    for log in logs[1:]:
        check_equal_start(logs[0], log)
    rows = compare(runs.teacher.log(), logs, runs)
    waits = {log.label: data_wait(log) for log in logs}
    factor = runs.student_text.bits_per_byte(1.0)
    picture = plot_losses(
        [log.scaled("ce_loss", factor) for log in logs],
        runs.place / "curves.png",
        title="One student with its own tokenizer, the same texts: alone and per loss",
        teacher_ce=rows[0].bits_per_byte,
        unit="cross-entropy (bits per byte of held-out text)",
    )
    outcome = {
        "seed": runs.seed,
        "rows": [asdict(row) for row in rows],
        "baselines": baselines,
        "data_wait": waits,
        "teacher_text": asdict(runs.teacher_text),
        "student_text": asdict(runs.student_text),
        "runs": [asdict(summarize(run.log())) for run in runs.children],
    }
    write_json(runs.place / "result.json", outcome)
    (runs.place / "result.md").write_text(_markdown(rows, waits), encoding="utf-8")
    show(rows, runs, console)
    console.print(f"\ncurves    {picture}", markup=False)
    console.print(f"result    {runs.place / 'result.md'}", markup=False)
    return outcome


def compare(teacher: RunLog, students: Sequence[RunLog], runs: LossRuns) -> Sequence[BitsPerByte]:
    """Return the rows of the table: the teacher, the student alone, each further student.

    Raises DataError: a run has no held-out loss.
    """
    texts = [runs.teacher_text, *[runs.student_text] * len(students)]
    losses = [_held_out_loss(run) for run in (teacher, *students)]
    bits = [text.bits_per_byte(loss) for text, loss in zip(texts, losses, strict=True)]
    rows = []
    for index, run in enumerate((teacher, *students)):
        closed = None
        if index > 1:
            closed = margin(alone=bits[1], distilled=bits[index], teacher=bits[0]).gap_closed
        rows.append(
            BitsPerByte(
                label=run.label,
                bits_per_byte=bits[index],
                gap_closed=closed,
                nats_per_label=losses[index],
                bytes_per_label=texts[index].bytes_per_label,
                tokens=summarize(run).tokens,
            )
        )
    return rows


def margins_over_seeds(
    every: Sequence[LossRuns], outcomes: Sequence[Mapping[str, Any]]
) -> Mapping[str, Mapping[str, float]]:
    """Return mean, least and most over the seeds of each loss's improvement, in bits per byte."""
    names = [run.label for run in every[0].distilled]
    tables = [
        {row["label"]: row["bits_per_byte"] for row in outcome["rows"]} for outcome in outcomes
    ]
    alone = every[0].alone.label
    return {name: spread([table[alone] - table[name] for table in tables]) for name in names}


def show_margins(margins: Mapping[str, Mapping[str, float]], console: Console) -> None:
    """Print the spread of each loss's improvement over the seeds."""
    table = _table("All seeds: bits per byte below the student alone")
    for name in ("mean", "least", "most"):
        table.add_column(name, justify="right", no_wrap=True)
    for loss, margin_of in margins.items():
        table.add_row(loss, *(f"{value:.4f}" for value in margin_of.values()))
    console.print()
    console.print(table)


def data_wait(run: RunLog) -> Mapping[str, float] | None:
    """The share of a step's time that it waited for its batches, over all steps but the first.

    That one waits for the first window of shuffled samples. Returns None without a record of it.
    """
    shares = run.training("data_wait").values[1:]
    if not len(shares):
        return None
    return {
        "median": float(np.median(shares)),
        "mean": float(np.mean(shares)),
        "95 of 100 below": float(np.percentile(shares, 95)),
    }


def _held_out_loss(run: RunLog) -> float:
    loss = run.last_held_out("ce_loss")
    if loss is None:
        raise DataError(f"{run.folder}: the run has no held-out loss; start over with --fresh")
    return loss


def show(rows: Sequence[BitsPerByte], runs: LossRuns, console: Console) -> None:
    """Print the table of one seed and the best loss; a narrow terminal has fewer columns."""
    table = _table("Held-out documents, all of their text")
    columns = _COLUMNS if console.width >= _FULL_WIDTH else _COLUMNS[:2]
    for name, unit in columns:
        table.add_column(f"{name}\n{unit}", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.label, *_cells(row)[: len(columns)])
    console.print()
    console.print(table)
    text = runs.student_text
    console.print("gap closed: share of the way from the student alone to the teacher")
    console.print(
        f"{text.text_bytes:,} bytes: {text.labels:,} labels of the student, "
        f"{runs.teacher_text.labels:,} of the teacher."
    )
    alone, best = rows[1], min(rows[2:], key=lambda row: row.bits_per_byte)
    difference = alone.bits_per_byte - best.bits_per_byte
    verdict = "lower" if difference > 0 else "HIGHER"
    console.print(
        f"With its best loss, {best.label}, the same student on the same texts ends "
        f"{abs(difference):.4f} bits per byte {verdict}."
    )


def _table(title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column("run", no_wrap=True)
    return table


def _markdown(rows: Sequence[BitsPerByte], waits: Mapping[str, Mapping[str, float] | None]) -> str:
    heads = ["run", *(f"{name} {unit}" for name, unit in _COLUMNS)]
    lines = _markdown_table(heads, [[row.label, *_cells(row)] for row in rows])
    found = {label: wait for label, wait in waits.items() if wait is not None}
    if found:
        lines += ["", "Share of a step's time that it waited for data, without the first step:", ""]
        names = list(next(iter(found.values())))
        shares = [[label, *(f"{wait[one]:.2%}" for one in names)] for label, wait in found.items()]
        lines += _markdown_table(["run", *names], shares)
    return "\n".join(lines) + "\n"


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def _cells(row: BitsPerByte) -> Sequence[str]:
    return (
        f"{row.bits_per_byte:.4f}",
        "-" if row.gap_closed is None else f"{row.gap_closed:.0%}",
        f"{row.nats_per_label:.4f}",
        f"{row.bytes_per_label:.2f}",
        f"{row.tokens:,}",
    )
