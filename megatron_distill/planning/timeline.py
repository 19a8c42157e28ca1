"""A timeline as a picture: a row per pipeline stage, and one of reading; waiting left white."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_distill.planning.schedule import Timeline

__all__ = ["draw_timeline"]

# Okabe and Ito's palette, distinct with any colour vision.
_COLOURS: Final = {
    "data": "#CC79A7",
    "teacher": "#E69F00",
    "measure": "#F0E442",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "update": "#009E73",
}
_WORDS: Final = {
    "data": "reading of data",
    "teacher": "teacher",
    "measure": "losses for their balance",
    "forward": "student forward",
    "backward": "student backward",
    "update": "gradients and optimizer",
}
_EDGE: Final = "#FFFFFF"
_EDGE_POINTS: Final = 0.4
_INCHES, _LEFT, _WIDTH = 12.0, 0.11, 0.8  # of the picture, and shares of it that the lanes take
_MOST_NUMBERS: Final = 500  # operations whose micro-batch is written on them
_DOTS_PER_INCH: Final = 150


def draw_timeline(timeline: Timeline, path: Path, *, title: str) -> Path:
    """Draw the step of a timeline as a PNG; return `path`.

    Each row is a stage, or the reading of data, with the share of the step in which it waits.
    """
    rows = len(timeline.names)
    height = min(20.0, 1.8 + 0.42 * rows)
    figure = Figure(figsize=(_INCHES, height), dpi=_DOTS_PER_INCH, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((_LEFT, 0.62 / height, _WIDTH, 1 - 1.42 / height))
    scale, unit = (1e3, "ms") if timeline.seconds < 2 else (1.0, "s")
    shown = timeline.done
    # An edge would hide much of a bar that is narrower.
    points = 72 * _INCHES * _WIDTH / ((timeline.end - timeline.start) * scale)
    least = 24 * _EDGE_POINTS / points
    for kind, colour in _COLOURS.items():
        for lane in range(rows):
            bars = [
                ((one.start - timeline.start) * scale, (one.end - one.start) * scale)
                for one in shown
                if one.lane == lane and one.operation.kind == kind
            ]
            edges = [_EDGE_POINTS if long > least else 0.0 for _, long in bars]
            axes.broken_barh(
                bars, (lane - 0.42, 0.84), facecolors=colour, edgecolors=_EDGE, linewidths=edges
            )
    if len(shown) <= _MOST_NUMBERS:
        _number(axes, timeline, scale)
    _label(axes, timeline, scale, unit)
    figure.suptitle(title, x=0.11, y=1 - 0.22 / height, ha="left", fontsize=11)
    kinds = [kind for kind in _COLOURS if any(one.operation.kind == kind for one in shown)]
    figure.legend(
        handles=[Patch(color=_COLOURS[kind], label=_WORDS[kind]) for kind in kinds],
        loc="upper left",
        bbox_to_anchor=(0.105, 1 - 0.36 / height),
        ncols=len(kinds),
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path, format="png")
    return path


def _number(axes: Axes, timeline: Timeline, scale: float) -> None:
    """Write the number of the micro-batch on every pass that is wide enough."""
    narrow = (timeline.end - timeline.start) * scale / 90
    for one in timeline.done:
        width = (one.end - one.start) * scale
        if width < narrow or one.operation.kind in ("update", "data"):
            continue
        axes.text(
            (one.start + one.end - 2 * timeline.start) / 2 * scale,
            one.lane,
            str(one.operation.micro_batch + 1),
            ha="center",
            va="center",
            fontsize=7,
            color="white" if one.operation.kind == "backward" else "#222222",
        )


def _label(axes: Axes, timeline: Timeline, scale: float, unit: str) -> None:
    rows = len(timeline.names)
    axes.set_xlim(0, (timeline.end - timeline.start) * scale)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_yticks(
        range(rows),
        [f"{name}\n{timeline.lane_ranks(lane)}" for lane, name in enumerate(timeline.names)]
        if rows <= 16
        else timeline.names,
        fontsize=8,
    )
    axes.set_xlabel(f"time of the step ({unit})")
    for edge in ("top", "right", "left"):
        axes.spines[edge].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for lane in range(rows):
        axes.text(
            1.01,
            lane,
            f"waits {timeline.idle_share(lane):.0%}",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
        )
