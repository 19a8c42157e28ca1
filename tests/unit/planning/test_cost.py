"""The cost of a run: its validations beside its steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_distill.planning.cost import run_cost, validation_count, validation_seconds
from megatron_distill.planning.device import load_device
from megatron_distill.planning.search import Search
from tests.unit.planning.shapes import TEACHER, run_of

DEVICE = load_device("h100-80gb")


@pytest.mark.parametrize(
    ("steps", "interval", "samples", "count"),
    [
        (100, 10, 64, 10),
        (105, 10, 64, 11),
        (9, 10, 64, 1),
        (100, 0, 64, 1),
        (100, 10, 0, 0),
        (0, 10, 64, 0),
    ],
)
def test_a_validation_follows_every_interval_and_the_last_step(
    steps: int, interval: int, samples: int, count: int
) -> None:
    run = run_of(steps=steps, validation_interval=interval, validation_samples=samples)
    assert validation_count(run) == count


@pytest.mark.parametrize("place", ["shared", "own ranks", "none"])
def test_a_validation_takes_the_forward_passes_of_whole_batches(place: str) -> None:
    run = run_of(teacher=None if place == "none" else TEACHER, validation_samples=257)
    search = Search(run, DEVICE, 64, lambda role, layout: None, (place,))  # type: ignore[arg-type]
    best = search.ranking(shown=1).fitting[0]
    found = validation_seconds(run, best.choice, DEVICE)
    one = validation_seconds(replace(run, validation_samples=256), best.choice, DEVICE)
    assert found == pytest.approx(2 * one)
    assert one == validation_seconds(replace(run, validation_samples=1), best.choice, DEVICE)
    time = best.time
    assert one < time.total - time.backward + (time.total if place == "own ranks" else 0.0)
    assert one > time.teacher + time.forward + 0.3 * time.heads


def test_the_cost_of_a_run_names_that_of_its_validations() -> None:
    run = run_of(steps=1000, validation_interval=100, validation_samples=25_600)
    best = Search(run, DEVICE, 64, lambda role, layout: None, ("none",)).ranking(shown=1).fitting[0]
    seconds = 10 * validation_seconds(run, best.choice, DEVICE)
    text = run_cost(run, best, DEVICE)
    assert f"; 10 validations of 25,600 samples besides in {seconds / 60:.2f} minutes, " in text
    assert text.endswith(f"{seconds * 64 / 3600:.0f} device-hours")
    assert "validation" not in run_cost(replace(run, validation_samples=0), best, DEVICE)
