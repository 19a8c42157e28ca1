"""Recorded steps of the smallest and the quickstart's runs, and from a store, beside plans."""

from __future__ import annotations

import json
from itertools import combinations
from statistics import median
from typing import Any

import pytest

from benchmarks.harness.calibrated import loaded, planned_seconds
from benchmarks.recipes import speed_config, speed_run
from benchmarks.stores.planned import planned_training
from benchmarks.tiny import CASES, tiny_config
from tests.guards.source_tree import ROOT


def record(name: str) -> Any:
    """The figures of a record."""
    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))


def in_tolerance(rows: dict[str, tuple[float, float]]) -> None:
    """Of measured and planned seconds: within 15 %, and distinct ones in the right order."""
    errors = {name: there / here - 1 for name, (here, there) in rows.items()}
    assert max(map(abs, errors.values())) <= 0.15, errors
    for (fast, sooner), (slow, later) in combinations(sorted(rows.values()), 2):
        assert slow <= 1.10 * fast or sooner < later, rows


def test_steps_of_the_recipes_are_those_of_plans_of_the_same_hour() -> None:
    recorded = record("recipes_speed")
    devices = loaded(recorded["devices"])
    in_tolerance(
        {
            name: (
                median(second for steps in rounds for second in steps),
                median(planned_seconds(speed_config(name), devices, ranks=speed_run(name)[2])),
            )
            for name, rounds in recorded["seconds"].items()
        }
    )


def of_smallest(name: str) -> dict[str, tuple[float, float]]:
    """Measured and planned seconds of the smallest runs in a record, by their names."""
    recorded = record(name)
    devices = loaded(recorded["devices"])
    assert recorded["seconds"].keys() == CASES.keys()
    return {
        run: (
            median(second for steps in rounds for second in steps),
            median(planned_seconds(tiny_config(run), devices, ranks=CASES[run][1])),
        )
        for run, rounds in recorded["seconds"].items()
    }


@pytest.mark.parametrize("name", ["tiny", "tiny_amd"])
def test_steps_of_the_smallest_runs_are_those_of_plans_of_the_same_hour(name: str) -> None:
    in_tolerance(of_smallest(name))


def test_steps_from_a_store_are_those_of_plans_of_the_same_hour() -> None:
    stored = record("store")["training"]["found"]
    devices = loaded(stored["devices"])
    in_tolerance(
        {
            row["workload"]: (
                median(row["seconds"]["store"]) / row["steps"],
                median(
                    planned_training(row["workload"], devices, ids=row["k"], threads=row["threads"])
                ),
            )
            for row in stored["rows"]
        }
    )
