"""Plans refined by the recorded steps of one case, beside the recorded steps of all others."""

from __future__ import annotations

import json
from functools import cache
from statistics import median
from typing import Any

import pytest

from benchmarks.steps.cases import layout_cases, peer_cases
from benchmarks.steps.planned import planned_case, refined_by_case
from megatron_distill.planning.device import DeviceProfile
from tests.guards.source_tree import ROOT

CASES = {case.name: case for case in (*layout_cases(), *peer_cases())}
# Of these a factor of all phases would make larger or smaller ones 20 % wrong.
SOURCES = (
    *("layouts/TP1/fp32", "layouts/TP2/fp32", "layouts/TP2xPP2/fp32", "layouts-moe/EP1-MoE/fp32"),
    *("v32k/TP1/fp32", "v128k/TP1/fp32", "v32k-deep/TP1/fp32"),
)
RECORDS = {
    name: json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))
    for name in ("planning", "planning_repeated")
}


def seconds_of(results: list[Any]) -> float:
    """The median of a case's steps."""
    return median(time for result in results for time in result["seconds"])


def phases_of(results: list[Any]) -> dict[str, float]:
    """The median phases of a case's first rank."""
    steps = [phases for result in results for phases in result["ranks"][0]["phases"]]
    return {name: median(phases[name] for phases in steps) for name in steps[0]}


@cache
def calibrated(name: str) -> dict[str, float]:
    """Seconds of a step by case, planned without measured steps."""
    device = DeviceProfile.model_validate(RECORDS[name]["devices"][0])
    return {other: planned_case(case, device).time.total for other, case in CASES.items()}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("source", SOURCES)
def test_steps_of_one_case_refine_plans_like_it_and_leave_the_others(
    source: str, name: str
) -> None:
    rounds = RECORDS[name]["rounds"]
    device = DeviceProfile.model_validate(RECORDS[name]["devices"][0])
    own, case = rounds[source], CASES[source]
    refined = refined_by_case(case, device, phases_of(own), seconds_of(own))
    errors, changed = {}, set()
    for other, results in rounds.items():
        now = planned_case(CASES[other], refined).time.total
        if now != calibrated(name)[other]:
            changed.add(other)
        errors[other] = now / seconds_of(results) - 1
    assert max(map(abs, errors.values())) <= 0.15, errors
    workload = case.workload.name.removesuffix("-moe")
    assert source in changed
    for other in changed:
        assert CASES[other].workload.name.removesuffix("-moe") == workload
        assert CASES[other].ranks.processes == case.ranks.processes
    assert abs(errors[source]) <= 0.03
