"""The plot of losses."""

import json
import math
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from megatron_distill.errors import DataError
from megatron_distill.evaluation import plot
from megatron_distill.evaluation.runs import RunLog, read_run


def write_run(folder: Path, label: str, floor: float, *, steps: int = 200, every: int = 40):
    folder.mkdir(parents=True)
    noise = np.random.default_rng(7)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss = floor + (8.0 - floor) * math.exp(-step / 30)
            record = {"step": step, "tokens": step * 1000, "ce_loss": loss + noise.normal() / 10}
            file.write(json.dumps(record) + "\n")
            if every and step % every == 0:
                file.write(json.dumps({"step": step, "validation": {"ce_loss": loss}}) + "\n")
    return read_run(folder, label=label)


@pytest.fixture
def runs(tmp_path: Path) -> list[RunLog]:
    return [
        write_run(tmp_path / "alone", "student alone", 3.60),
        write_run(tmp_path / "distilled", "distilled student", 3.58),
    ]


def share_near(picture: np.ndarray, colour: str) -> float:
    target = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return float((np.abs(picture[..., :3] - target).max(axis=-1) < 0.02).mean())


def test_the_picture_has_readme_size_and_shows_each_run_and_the_teacher(
    runs: list[RunLog], tmp_path: Path
) -> None:
    path = plot.plot_losses(runs, tmp_path / "new" / "curves.png", title="T", teacher_ce=3.2)
    picture = matplotlib.image.imread(path)
    height, width = picture.shape[:2]
    assert (width, height) == (1600, 920)
    assert path.stat().st_size < 300_000
    for colour in (*plot._COLOURS[:2], plot._TEACHER_COLOUR):
        assert 0.0005 < share_near(picture, colour) < 0.05, colour
    assert share_near(picture, plot._COLOURS[2]) == 0, "a colour of no run"
    assert share_near(picture, "#FFFFFF") > 0.8


def test_nothing_to_draw_is_a_data_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "empty", 3.0, steps=0)
    with pytest.raises(DataError, match="no run has a loss to draw"):
        plot.plot_losses([run], tmp_path / "curves.png", title="T")
