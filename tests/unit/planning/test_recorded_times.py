"""Times of the steps that other benchmarks recorded, for the device of the planner's own record.

All are of the same machine at other hours. Processes of one thread share its caches and its memory
in another way than calibrated, so that the bounds of teachers elsewhere are wider.
"""

from __future__ import annotations

import json
from itertools import combinations
from statistics import mean, median
from typing import Any

import pytest

from benchmarks.steps.cases import layout_cases, peer_cases
from benchmarks.steps.planned import planned_case
from benchmarks.teachers import planned_steps
from megatron_distill.planning.device import DeviceProfile
from tests.guards.source_tree import ROOT

RESULTS = ROOT / "benchmarks" / "results"
DISTINCT = 0.10  # equal steps differ by less between two hours of this machine


def record(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def device() -> DeviceProfile:
    return DeviceProfile.model_validate(record("planning")["device"])


def errors(rows: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Of the predictions, by case, from measured and predicted seconds."""
    return {name: there / measured - 1 for name, (measured, there) in rows.items()}


def in_order(rows: dict[str, tuple[float, float]]) -> list[bool]:
    """Whether the prediction has each pair of distinct times in the right order."""
    pairs = combinations(sorted(rows.values()), 2)
    return [there[0] < there[1] for here, there in (zip(*pair, strict=True) for pair in pairs)
            if here[1] > (1 + DISTINCT) * here[0]]  # fmt: skip


def test_steps_with_teachers_elsewhere_take_about_the_predicted_time() -> None:
    recorded = record("teachers")
    steps = recorded["steps"]
    devices = [DeviceProfile.model_validate(one) for one in recorded["devices"]]
    rows = {
        name: (median(step["step_seconds"] for step in steps[name]), mean(seconds))
        for name, seconds in planned_steps(devices).items()
    }
    assert len(rows) == 9
    found = errors(rows)
    assert mean(map(abs, found.values())) <= 0.15
    assert max(map(abs, found.values())) <= 0.26
    # These are within the bound of the other records.
    hidden = [error for name, error in found.items() if name.startswith("own ranks, hidden")]
    assert len(hidden) == 4
    assert max(map(abs, hidden)) <= 0.15
    assert len(in_order(rows)) == 25
    assert all(in_order(rows))


def test_the_steps_beside_peers_take_about_the_predicted_time(device: DeviceProfile) -> None:
    rounds = record("step")["rounds"]
    rows = {
        case.name: (
            median(s for one in rounds[case.name]["ours"] for s in one["seconds"]),
            planned_case(case, device).time.total,
        )
        for case in (*layout_cases(), *peer_cases())
    }
    assert len(rows) == 19
    assert max(map(abs, errors(rows).values())) <= 0.15
    assert len(in_order(rows)) > 100
    assert all(in_order(rows))
