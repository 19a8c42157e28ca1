"""A run's metrics as a summary, as tables and as a picture."""

import io
import json
import math
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

from megatron_distill.errors import DataError
from megatron_distill.evaluation import plot
from megatron_distill.evaluation.runs import (
    RunLog,
    RunSummary,
    margin,
    read_run,
    result_table,
    summarize,
)

ALONE = RunSummary("student alone", 300, 614400, 3.80331, None, None, None, 8994.6, 601_000_000)
DISTILLED = RunSummary(
    "distilled student", 300, 614400, 3.5624, 0.41, 3.03, 0.4567, 6021.2, 812_300_000
)


def write(folder: Path, *records: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return folder


def step(number: int, **values: object) -> dict[str, object]:
    return {"step": number, "tokens": number * 100, "ce_loss": 6.0 - number, **values}


def validation(number: int, **values: object) -> dict[str, object]:
    return {"step": number, "validation": values}


def test_series_are_over_tokens_and_leave_out_non_finite_values(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        validation(0, ce_loss=9.0),
        step(1),
        step(2, ce_loss=None, not_finite={"ce_loss": "NaN"}),
        validation(2, ce_loss=4.5, top1_agreement=0.25),
        step(3),
        validation(3, ce_loss=3.5, top1_agreement=0.5),
    )
    run = read_run(folder, label="a run")
    training = run.training("ce_loss")
    assert training.tokens.tolist() == [100, 300]
    assert training.values.tolist() == [5.0, 3.0]
    held_out = run.held_out("ce_loss")
    assert held_out.tokens.tolist() == [0, 200, 300]
    assert held_out.values.tolist() == [9.0, 4.5, 3.5]
    assert run.last_step == 3
    assert run.last_held_out("top1_agreement") == 0.5
    assert run.last_held_out("teacher_ce_loss") is None
    assert len(run.training("no such metric")) == 0


def test_the_torn_last_line_of_a_running_run_is_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path, step(1), step(2))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "to')
    assert read_run(folder, label="a run").last_step == 2


@pytest.mark.parametrize("line", ["{", "[]", '{"tokens": 1}', '{"step": "1"}', ""])
def test_damage_elsewhere_is_named_by_file_and_line(tmp_path: Path, line: str) -> None:
    folder = write(tmp_path, step(1))
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + line + "\n" + json.dumps(step(2)) + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: not a JSON object"):
        read_run(folder, label="a run")


def test_a_folder_without_a_run_and_a_run_without_a_step_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no such file; name the output folder of a run"):
        read_run(tmp_path / "nothing", label="a run")
    with pytest.raises(DataError, match="no step in its metrics"):
        summarize(read_run(write(tmp_path), label="a run"))


def test_a_summary_takes_the_last_validation_the_median_speed_and_the_largest_peak(
    tmp_path: Path,
) -> None:
    speeds, peaks = [10.0, 1000.0, 900.0], [5, 9, 7]
    steps = [
        step(number, tokens_per_second=speed, peak_memory_bytes=peak)
        for number, speed, peak in zip([1, 2, 3], speeds, peaks, strict=True)
    ]
    last = validation(3, ce_loss=3.5, kd_loss=0.5, teacher_ce_loss=3.0, top1_agreement=0.625)
    folder = write(tmp_path, *steps[:2], validation(2, ce_loss=8.0), steps[2], last)
    assert summarize(read_run(folder, label="a run")) == RunSummary(
        label="a run",
        steps=3,
        tokens=300,
        held_out_ce=3.5,
        held_out_kd=0.5,
        teacher_held_out_ce=3.0,
        top1_agreement=0.625,
        tokens_per_second=900.0,
        peak_memory_bytes=9,
    )
    bare = summarize(read_run(write(tmp_path / "bare", step(1)), label="a run"))
    assert bare == RunSummary("a run", 1, 100, None, None, None, None, None, None)


def test_the_terminal_table_fits_80_columns_with_every_figure_whole() -> None:
    stream = io.StringIO()
    Console(file=stream, width=80).print(result_table([ALONE, DISTILLED], title="Result"))
    text = stream.getvalue()
    (row,) = [line for line in text.splitlines() if "distilled student" in line]
    assert row.split() == ["distilled", "student", "3.5624", "45.7%", "614,400", "6,021", "0.81"]
    assert "Result" in text


def test_the_margin_is_positive_when_the_teacher_helped() -> None:
    result = margin(alone=4.0, distilled=3.5, teacher=3.0)
    assert (result.nats, result.share, result.gap_closed) == (0.5, 0.125, 0.5)
    assert margin(alone=3.5, distilled=4.0, teacher=3.0).nats == -0.5
    # A teacher no better than the student leaves no gap to close.
    assert margin(alone=3.0, distilled=2.9, teacher=3.0).gap_closed is None
    assert margin(alone=3.0, distilled=2.9, teacher=3.1).nats == pytest.approx(0.1)


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
