"""Several runs beside each other: what each reached on held-out text, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.table import Table

from megatron_distill.errors import DataError
from megatron_distill.evaluation.runs import RunLog

__all__ = ["Margin", "RunSummary", "margin", "markdown_table", "result_table", "summarize"]


@dataclass(frozen=True)
class RunSummary:
    """The numbers of one run; None where the run has no such number.

    Losses are in nats per token, `top1_agreement` is the share of held-out tokens at which student
    and teacher rank the same token first, `tokens_per_second` the median over the steps,
    `peak_memory_bytes` that of the largest process.
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
    """What the teacher brought, in held-out cross-entropy.

    `nats` is the loss of the student alone minus that of the distilled student, `share` the same
    over the loss of the student alone, `gap_closed` the same over the distance between the student
    alone and the teacher (None if the teacher is no better than the student alone).
    """

    nats: float
    share: float
    gap_closed: float | None


def summarize(run: RunLog) -> RunSummary:
    """Return the numbers of one run.

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
    """Return how much better the distilled student is, from three held-out cross-entropies."""
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
    """Return the result as a table for a terminal."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column("run", no_wrap=True)
    for name, unit in _COLUMNS:
        table.add_column(f"{name}\n[dim]{unit}[/dim]", justify="right")
    for summary in summaries:
        table.add_row(summary.label, *_cells(summary))
    return table


def markdown_table(summaries: Sequence[RunSummary]) -> str:
    """Return the result as a Markdown table."""
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
