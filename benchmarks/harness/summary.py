"""From the raw measurements of several rounds to figures, ratios and tables."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.harness.quiet import others, own_cpu_seconds
from benchmarks.steps.cases import Case

MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One subject on one case; times are medians over all timed steps of all rounds.

    Memory is that of the rank with the largest peak. `step_peak_mib` is the peak of live tensors
    above those that live between steps (weights, gradient buffers, optimizer state);
    `resident_peak_mib` the same of the whole process, from the kernel.
    """

    case: str
    subject: str
    tokens_per_step: int
    step_seconds: float
    step_seconds_min: float
    step_seconds_max: float
    cpu_seconds: float  # over all ranks
    others: float  # processors used by other processes meanwhile
    tokens_per_second: float
    teacher_share: float | None
    step_peak_mib: float
    resident_peak_mib: float | None
    weights_mib: float
    gradient_buffers_mib: float
    optimizer_mib: float
    first_ce: float
    first_kd: float
    last_ce: float
    last_kd: float


@dataclass(frozen=True)
class Ratio:
    """Ours against the peer on one case. More than one in speed and memory is in our favour."""

    case: str
    peer: str
    tokens_per_second: float
    fastest_step: float  # of the shortest steps, which disturbances touch least
    cpu_seconds: float
    step_peak: float
    step_peak_with_gradients: float  # gradient buffers counted as part of the step
    resident_peak: float | None
    first_loss_difference: float  # largest relative difference of CE and KL at the first step
    last_loss_difference: float


def summarise(case: Case, subject: str, rounds: Sequence[Mapping[str, Any]]) -> Row:
    """Combine the rounds of one subject."""
    seconds = [value for result in rounds for value in result["seconds"]]
    ranks = [rank for result in rounds for rank in result["ranks"]]
    largest = max(ranks, key=lambda rank: rank["peak"]["tensors"])
    resident = [rank["peak"]["resident"] for rank in ranks]
    persistent = largest["persistent"]
    losses = rounds[0]["losses"]
    return Row(
        case=case.name,
        subject=subject,
        tokens_per_step=case.tokens_per_step,
        step_seconds=median(seconds),
        step_seconds_min=min(seconds),
        step_seconds_max=max(seconds),
        cpu_seconds=median(value for result in rounds for value in own_cpu_seconds(result)),
        others=median(value for result in rounds for value in others(result)),
        tokens_per_second=case.tokens_per_step / median(seconds),
        teacher_share=_teacher_share(rounds),
        step_peak_mib=largest["peak"]["tensors"] / MIB,
        resident_peak_mib=None if None in resident else max(resident) / MIB,
        weights_mib=persistent["weights"] / MIB,
        gradient_buffers_mib=persistent["gradient_buffers"] / MIB,
        optimizer_mib=persistent["optimizer"] / MIB,
        first_ce=losses[0]["ce"],
        first_kd=losses[0]["kd"],
        last_ce=losses[-1]["ce"],
        last_kd=losses[-1]["kd"],
    )


def _teacher_share(rounds: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the part of the step in which the slowest rank waits for the teacher."""
    shares = []
    for result in rounds:
        per_rank = (rank["phases"] for rank in result["ranks"])
        for seconds, *phases in zip(result["seconds"], *per_rank, strict=True):
            if None not in phases:
                shares.append(max(phase["teacher"] for phase in phases) / seconds)
    return median(shares) if shares else None


def compare(ours: Row, peer: Row) -> Ratio:
    """Return the ratios of ours to the peer."""
    resident = None
    if ours.resident_peak_mib is not None and peer.resident_peak_mib is not None:
        resident = peer.resident_peak_mib / ours.resident_peak_mib
    return Ratio(
        case=ours.case,
        peer=peer.subject,
        tokens_per_second=ours.tokens_per_second / peer.tokens_per_second,
        fastest_step=peer.step_seconds_min / ours.step_seconds_min,
        cpu_seconds=peer.cpu_seconds / ours.cpu_seconds,
        step_peak=peer.step_peak_mib / ours.step_peak_mib,
        step_peak_with_gradients=(peer.step_peak_mib + peer.gradient_buffers_mib)
        / (ours.step_peak_mib + ours.gradient_buffers_mib),
        resident_peak=resident,
        first_loss_difference=_difference(
            (ours.first_ce, peer.first_ce), (ours.first_kd, peer.first_kd)
        ),
        last_loss_difference=_difference(
            (ours.last_ce, peer.last_ce), (ours.last_kd, peer.last_kd)
        ),
    )


def _difference(*pairs: tuple[float, float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in pairs)


# field -> (heading, form)
_ROW_COLUMNS = {
    "case": ("case", "{}"),
    "subject": ("subject", "{}"),
    "tokens_per_step": ("tokens", "{:,}"),
    "step_seconds": ("s/step", "{:.3f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "cpu_seconds": ("cpu s", "{:.2f}"),
    "others": ("others", "{:.2f}"),
    "teacher_share": ("teacher", "{:.0%}"),
    "step_peak_mib": ("step peak MiB", "{:,.0f}"),
    "resident_peak_mib": ("resident MiB", "{:,.0f}"),
    "weights_mib": ("weights", "{:,.0f}"),
    "gradient_buffers_mib": ("gradients", "{:,.0f}"),
    "optimizer_mib": ("optimizer", "{:,.0f}"),
    "first_ce": ("first CE", "{:.6f}"),
    "first_kd": ("first KL", "{:.6f}"),
}
_RATIO_COLUMNS = {
    "case": ("case", "{}"),
    "peer": ("against", "{}"),
    "tokens_per_second": ("tokens/s", "{:.2f}x"),
    "fastest_step": ("fastest step", "{:.2f}x"),
    "cpu_seconds": ("cpu s", "{:.2f}x"),
    "step_peak": ("step peak", "{:.2f}x"),
    "step_peak_with_gradients": ("with gradients", "{:.2f}x"),
    "resident_peak": ("resident", "{:.2f}x"),
    "first_loss_difference": ("first losses", "{:.1e}"),
    "last_loss_difference": ("last losses", "{:.1e}"),
}


def _columns(rows: Sequence[Row | Ratio]) -> dict[str, tuple[str, str]]:
    return _ROW_COLUMNS if isinstance(rows[0], Row) else _RATIO_COLUMNS


def _cells(row: Row | Ratio, columns: Mapping[str, tuple[str, str]]) -> list[str]:
    values = ((getattr(row, name), form) for name, (_, form) in columns.items())
    return ["-" if value is None else form.format(value) for value, form in values]


def rich_table(title: str, rows: Sequence[Row | Ratio]) -> Table:
    """Return a table for a terminal."""
    columns = _columns(rows)
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for index, (heading, _) in enumerate(columns.values()):
        table.add_column(heading, justify="right" if index > 1 else "left")
    for row in rows:
        table.add_row(*_cells(row, columns))
    return table


def markdown_table(rows: Sequence[Row | Ratio]) -> str:
    """Return the same table as Markdown."""
    columns = _columns(rows)
    lines = [
        "| " + " | ".join(heading for heading, _ in columns.values()) + " |",
        "|---|---|" + "---:|" * (len(columns) - 2),
    ]
    lines += ["| " + " | ".join(_cells(row, columns)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_csv(path: Path, rows: Sequence[Row | Ratio]) -> None:
    """Write every field of every row."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
