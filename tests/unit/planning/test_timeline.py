"""The picture of a step: each stage a row, white where it waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from megatron_distill.planning.schedule import simulate
from megatron_distill.planning.search import planned
from megatron_distill.planning.timeline import draw_timeline
from megatron_distill.runtime.layout import Layout
from tests.unit.planning.shapes import run_of
from tests.unit.planning.test_schedule import EVEN, chosen


@pytest.mark.parametrize("slow", [1.0, 1.3])
@pytest.mark.parametrize("layout", [Layout(8, 4), Layout(8, 4, 2)], ids=str)
def test_a_row_is_white_for_the_share_in_which_its_stage_waits(
    layout: Layout, slow: float, tmp_path: Path
) -> None:
    """slow: reading over the rest of the step; from 1 on it has a row."""
    run = run_of(global_batch_size=16)
    seconds = planned(run, chosen(layout, 64), EVEN).time.total
    run = replace(run, reading_seconds=slow * seconds / run.tokens if slow > 1 else 0.0)
    one = planned(run, chosen(layout, 64), EVEN)
    timeline = simulate(run, one.choice, EVEN, one.time)
    picture = draw_timeline(timeline, tmp_path / "timeline.png", title="a step")
    colours = imread(picture)[..., :3]
    height, width, _ = colours.shape
    inches, rows = height / 150, len(timeline.names)
    below, tall = 0.62 * height / inches, height * (1 - 1.42 / inches)
    for lane in range(rows):
        # Above the numbers on the passes; the axis is from rows - 0.4 at the bottom to -0.6.
        from_below = below + tall * (rows - 0.4 - (lane - 0.35)) / (rows + 0.2)
        row = colours[round(height - from_below), round(0.11 * width) + 2 : round(0.91 * width) - 2]
        white = (row > 0.99).all(axis=1).mean()
        assert white == pytest.approx(timeline.idle_share(lane), abs=0.04)
        kinds = {tuple((10 * colour).round()) for colour in row}
        if not timeline.ranks[lane]:
            assert slow > 1
            assert kinds >= {(8.0, 5.0, 7.0)}  # the colour of reading
            continue
        assert white > 0.1
        assert len(kinds) >= 3  # waiting, forward and backward
