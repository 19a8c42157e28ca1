"""Times of the steps that other benchmarks recorded, for calibrated devices.

All are of the same machine at other hours, which differ. So records have devices that were
calibrated between their rounds. Steps are compared with the median of the predictions for these.
"""

from __future__ import annotations

import json
from itertools import combinations
from statistics import median
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
def devices() -> list[DeviceProfile]:
    return [DeviceProfile.model_validate(one) for one in record("planning")["devices"]]


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
    calibrated = [DeviceProfile.model_validate(one) for one in recorded["devices"]]
    rows = {
        name: (median(step["step_seconds"] for step in steps[name]), median(seconds))
        for name, seconds in planned_steps(calibrated).items()
    }
    assert len(rows) == 9
    assert len(in_order(rows)) == 30
    assert all(in_order(rows))
    found = errors(rows)
    # Too short: docs/planning.md has both.
    assert -0.175 <= found.pop("own layout, teacher TP2, student DP2") <= 0
    assert -0.155 <= found.pop("own ranks, top 64, ipc, 1 ahead") <= 0
    assert max(map(abs, found.values())) <= 0.15


def test_the_steps_beside_peers_take_about_the_predicted_time(
    devices: list[DeviceProfile],
) -> None:
    rounds = record("step")["rounds"]
    rows = {
        case.name: (
            median(s for one in rounds[case.name]["ours"] for s in one["seconds"]),
            median(planned_case(case, device).time.total for device in devices),
        )
        for case in (*layout_cases(), *peer_cases())
    }
    assert len(rows) == 19
    assert max(map(abs, errors(rows).values())) <= 0.15
    assert len(in_order(rows)) > 100
    assert all(in_order(rows))
