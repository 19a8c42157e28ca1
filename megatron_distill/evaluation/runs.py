"""Reader and summary of the metrics file of a finished or running run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table

from megatron_distill.errors import DataError

__all__ = [
    "METRICS_FILE",
    "Margin",
    "RunLog",
    "RunSummary",
    "Series",
    "margin",
    "markdown_table",
    "read_run",
    "result_table",
    "summarize",
]


METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Series:
    """One metric over a run: its values, and the cumulative training tokens at each of them."""

    tokens: NDArray[np.float64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class RunLog:
    """The records of one run in the order of their steps; `label` is its name in results."""

    label: str
    folder: Path
    steps: tuple[Mapping[str, object], ...]
    validations: tuple[Mapping[str, object], ...]
    evaluations: tuple[Mapping[str, object], ...] = ()

    @property
    def last_step(self) -> int:
        """The number of completed optimizer steps."""
        return int(str(self.steps[-1]["step"])) if self.steps else 0

    def training(self, name: str) -> Series:
        """Return one metric of the steps; values that were not finite are left out."""
        return _series((_number(record, "tokens"), _number(record, name)) for record in self.steps)

    def held_out(self, name: str) -> Series:
        """Return one metric of the validations; values that were not finite are left out."""
        tokens_at = {record["step"]: _number(record, "tokens") for record in self.steps}
        # A validation before the first step has no step record with its tokens.
        tokens_at.setdefault(0, 0.0)
        return _series(
            (tokens_at.get(record["step"]), _number(_validation(record), name))
            for record in self.validations
        )

    def last_held_out(self, name: str) -> float | None:
        """Return a metric of the last validation; None if it has no such finite number."""
        return _number(_validation(self.validations[-1]), name) if self.validations else None

    def scaled(self, name: str, factor: float) -> RunLog:
        """Return the run with one metric of steps and validations multiplied by a factor."""

        def times(record: Mapping[str, object]) -> Mapping[str, object]:
            value = _number(record, name)
            return record if value is None else {**record, name: value * factor}

        return replace(
            self,
            steps=tuple(times(record) for record in self.steps),
            validations=tuple(
                {**record, "validation": times(_validation(record))} for record in self.validations
            ),
        )


def read_run(folder: Path, *, label: str) -> RunLog:
    """Read `folder/metrics.jsonl`, without an incomplete last line of a running or killed run.

    Raises DataError if the file is missing or any other line is no record.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; name the output folder of a run")
    steps: list[Mapping[str, object]] = []
    validations: list[Mapping[str, object]] = []
    evaluations: list[Mapping[str, object]] = []
    lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is None:
            raise DataError(f"{path}:{number}: not a JSON object with a whole number under `step`")
        if "evaluation" in record:
            evaluations.append(record)
        else:
            (validations if "validation" in record else steps).append(record)
    return RunLog(label, folder, tuple(steps), tuple(validations), tuple(evaluations))


def _parse(line: bytes) -> Mapping[str, object] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    good = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if good else None


def _validation(record: Mapping[str, object]) -> Mapping[str, object]:
    nested = record["validation"]
    return nested if isinstance(nested, Mapping) else {}


def _number(record: Mapping[str, object], name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _series(points: Iterator[tuple[float | None, float | None]]) -> Series:
    whole = [
        (tokens, value) for tokens, value in points if tokens is not None and value is not None
    ]
    table = np.array(whole, dtype=np.float64).reshape(-1, 2)
    return Series(table[:, 0], table[:, 1])


@dataclass(frozen=True)
class RunSummary:
    """The results of one run; None for a missing one.

    Losses are in nats per token. `top1_agreement` is the share of held-out tokens at which student
    and teacher have the same top-1 token. `tokens_per_second` is the median over the steps,
    `peak_memory_bytes` the maximum over the processes.
    """

    label: str
    steps: int
    tokens: int
    held_out_ce: float | None
    held_out_kd: float | None
    teacher_held_out_ce: float | None
    top1_agreement: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class Margin:
    """Improvement in held-out cross-entropy by distillation.

    `nats` is the loss of the student alone minus that of the distilled student. `share` is `nats`
    over the loss of the student alone. `gap_closed` is `nats` over the difference between the
    student alone and the teacher; None if the teacher is no better than the student alone.
    """

    nats: float
    share: float
    gap_closed: float | None


def summarize(run: RunLog) -> RunSummary:
    """Return the results of one run.

    Raises DataError if the run has no step.
    """
    if not run.steps:
        raise DataError(f"{run.folder}: the run has no step in its metrics; let it run first")
    rates = run.training("tokens_per_second").values
    peaks = run.training("peak_memory_bytes").values
    tokens = run.training("tokens").values
    return RunSummary(
        label=run.label,
        steps=run.last_step,
        tokens=int(tokens[-1]) if len(tokens) else 0,
        held_out_ce=run.last_held_out("ce_loss"),
        held_out_kd=run.last_held_out("kd_loss"),
        teacher_held_out_ce=run.last_held_out("teacher_ce_loss"),
        top1_agreement=run.last_held_out("top1_agreement"),
        tokens_per_second=float(np.median(rates)) if len(rates) else None,
        peak_memory_bytes=int(peaks.max()) if len(peaks) else None,
    )


def margin(*, alone: float, distilled: float, teacher: float) -> Margin:
    """Return the distilled student's improvement, from three held-out cross-entropies."""
    nats = alone - distilled
    distance = alone - teacher
    return Margin(nats, nats / alone, nats / distance if distance > 0 else None)


_COLUMNS: tuple[tuple[str, str], ...] = (
    ("held-out CE", "nats/token"),
    ("agreement", "top-1"),
    ("trained on", "tokens"),
    ("speed", "tokens/s"),
    ("memory", "peak GB"),
)


def result_table(summaries: Sequence[RunSummary], *, title: str) -> Table:
    """Return the summaries as a table for a terminal."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column("run", no_wrap=True)
    for name, unit in _COLUMNS:
        table.add_column(f"{name}\n[dim]{unit}[/dim]", justify="right")
    for summary in summaries:
        table.add_row(summary.label, *_cells(summary))
    return table


def markdown_table(summaries: Sequence[RunSummary]) -> str:
    """Return the summaries as a Markdown table."""
    heads = ["run", *(f"{name} ({unit})" for name, unit in _COLUMNS)]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * len(_COLUMNS)]
    lines += ["| " + " | ".join([row.label, *_cells(row)]) + " |" for row in summaries]
    return "\n".join(lines) + "\n"


def _cells(summary: RunSummary) -> list[str]:
    return [
        _shown(summary.held_out_ce, "{:.4f}"),
        _shown(summary.top1_agreement, "{:.1%}"),
        f"{summary.tokens:,}",
        _shown(summary.tokens_per_second, "{:,.0f}"),
        _shown(
            None if summary.peak_memory_bytes is None else summary.peak_memory_bytes / 1e9,
            "{:.2f}",
        ),
    ]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
