"""Loss curves of several runs in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from megatron_distill.errors import DataError
from megatron_distill.evaluation.runs import RunLog, Series

__all__ = ["plot_losses"]

# Okabe and Ito's palette, distinct with any colour vision; in grey the markers differ.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_TEACHER_COLOUR = "#444444"
_INK = "#222222"
_SIZE_INCHES = (8.0, 4.6)
_DOTS_PER_INCH = 200


@dataclass(frozen=True)
class _EndLabel:
    height: float
    text: str
    colour: str


def plot_losses(
    runs: Sequence[RunLog],
    path: Path,
    *,
    title: str,
    teacher_ce: float | None = None,
    unit: str = "cross-entropy (nats per token)",
) -> Path:
    """Draw the cross-entropy of up to six `runs` over their training tokens; return `path`.

    The values are drawn as they are; `unit` is the label of their axis. Each run has a thin line
    for its smoothed training loss and marked points for its held-out loss.
    A dashed line is the teacher's held-out loss. The left part of a curve, where a loss falls from
    ln(vocabulary), may be cut off so that the rest stays legible.

    Raises DataError if no run has a finite training or held-out loss.
    """
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.085, 0.125, 0.715, 0.735))
    labels: list[_EndLabel] = []
    for run, colour, marker in zip(runs, _COLOURS, _MARKERS, strict=False):
        labels += _draw_run(axes, run, colour, marker)
    if teacher_ce is not None:
        axes.axhline(teacher_ce, color=_TEACHER_COLOUR, linestyle=(0, (5, 3)), linewidth=1.3)
        labels.append(_EndLabel(teacher_ce, f"teacher\n{teacher_ce:.3f}", _TEACHER_COLOUR))
    if not labels:
        raise DataError(f"{path}: no run has a loss to draw")
    _set_limits(axes, runs, labels)
    _write_labels(axes, labels)
    _dress(axes, title, unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def _draw_run(axes: Axes, run: RunLog, colour: str, marker: str) -> list[_EndLabel]:
    training, held_out = run.training("ce_loss"), run.held_out("ce_loss")
    if len(training):
        axes.plot(
            training.tokens, _smooth(training.values), color=colour, linewidth=0.9, alpha=0.55
        )
    if len(held_out):
        axes.plot(
            held_out.tokens,
            held_out.values,
            color=colour,
            linewidth=1.7,
            marker=marker,
            markersize=5.5,
            markeredgecolor="white",
            markeredgewidth=0.7,
            zorder=3,
        )
    shown = held_out if len(held_out) else training
    if not len(shown):
        return []
    last = float(shown.values[-1])
    return [_EndLabel(last, f"{run.label}\n{last:.3f}", colour)]


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the moving mean over about 5 % of the run.

    The window is symmetric, except at the end, where it is cut at the last value. At the beginning,
    where the loss falls fast, an asymmetric window would shift the curve.
    """
    index = np.arange(len(values))
    before = np.minimum(len(values) // 40, index)
    after = np.minimum(before, len(values) - 1 - index)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray((sums[index + after + 1] - sums[index - before]) / (before + after + 1))


def _set_limits(axes: Axes, runs: Sequence[RunLog], labels: Sequence[_EndLabel]) -> None:
    """Fit the axes to the curves after the first tenth of the longest run, and to all labels."""
    series = [run.held_out("ce_loss") for run in runs]
    smoothed = [run.training("ce_loss") for run in runs]
    series += [Series(one.tokens, _smooth(one.values)) for one in smoothed]
    last_token = max((float(one.tokens[-1]) for one in series if len(one)), default=1.0)
    seen = [one.values[one.tokens >= last_token / 10] for one in series]
    heights = np.concatenate([*seen, np.array([label.height for label in labels])])
    low, high = float(heights.min()), float(heights.max())
    room = max(high - low, 1e-3)
    axes.set_ylim(low - 0.08 * room, high + 0.06 * room)
    axes.set_xlim(0.0, last_token * 1.015)


def _write_labels(axes: Axes, labels: Sequence[_EndLabel]) -> None:
    """Write each label to the right of its curve's end, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    apart = 0.105
    places: list[float] = []
    ordered = sorted(labels, key=lambda label: label.height)
    for label in ordered:
        wanted = (label.height - low) / (high - low)
        places.append(max(wanted, places[-1] + apart) if places else wanted)
    shift = max(0.0, places[-1] - 0.97)
    for label, place in zip(ordered, places, strict=True):
        axes.text(
            1.015,
            place - shift,
            label.text,
            transform=axes.transAxes,
            color=label.colour,
            fontsize=10,
            fontweight="bold",
            verticalalignment="center",
            linespacing=1.15,
        )


def _dress(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, color=_INK, fontweight="bold", pad=22)
    axes.set_xlabel("tokens trained on", fontsize=10.5, color=_INK)
    axes.set_ylabel(unit, fontsize=10.5, color=_INK)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tokens(value)))
    axes.tick_params(labelsize=9.5, colors=_INK)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.text(
        0.0,
        1.025,
        "points: held-out text; thin lines: training batches, smoothed",
        transform=axes.transAxes,
        fontsize=9,
        color="#555555",
    )


def _tokens(value: float) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"
