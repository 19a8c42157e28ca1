"""The picture of a step: each stage a row, white where it waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from megatron_distill.planning.schedule import simulate
from megatron_distill.planning.search import planned
from megatron_distill.planning.timeline import draw_timeline
from megatron_distill.runtime.layout import Layout
from tests.unit.planning.shapes import run_of
from tests.unit.planning.test_schedule import EVEN, chosen


@pytest.mark.parametrize("layout", [Layout(8, 4), Layout(8, 4, 2)], ids=str)
def test_a_row_is_white_for_the_share_in_which_its_stage_waits(
    layout: Layout, tmp_path: Path
) -> None:
    run = run_of(global_batch_size=16)
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
        assert white > 0.1
        kinds = {tuple((10 * colour).round()) for colour in row}
        assert len(kinds) >= 3  # waiting, forward and backward
