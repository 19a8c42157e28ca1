"""Memory of the recorded steps of every layout against the planner, without building a model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.steps.cases import Case, layout_cases, peer_cases
from benchmarks.steps.planned import planned_peaks
from megatron_distill.planning.device import load_device
from tests.guards.source_tree import ROOT

RECORD = json.loads((ROOT / "benchmarks" / "results" / "step.json").read_text())["rounds"]
CASES = {case.name: case for case in (*layout_cases(), *peer_cases())}
# The figures of memory have nothing of the rates.
CPU = load_device("a100-80gb").model_copy(update={"kind": "cpu", "cores": 2, "reserved_gib": 0.0})


def ranks_of(case: Case) -> list[Any]:
    """The first rank of each stage."""
    ranks = RECORD[case.name]["ours"][0]["ranks"]
    return list(ranks[:: len(ranks) // case.ranks.pipeline])


@pytest.mark.parametrize("name", CASES)
def test_states_are_exact_on_every_stage(name: str) -> None:
    case = CASES[name]
    for measured, (lasting, _) in zip(ranks_of(case), planned_peaks(case, CPU), strict=True):
        there = sum(measured["persistent"].values())
        # Adam counts the steps of each tensor in four bytes, a tensor of a shard twice.
        assert 0 < there - lasting <= 4 * 2 * 60
        assert (there - lasting) % 4 == 0


@pytest.mark.parametrize("name", CASES)
def test_the_highest_peak_is_within_ten_per_cent_and_hardly_below(name: str) -> None:
    case = CASES[name]
    peaks = [rank["peak"]["tensors"] for rank in ranks_of(case)]
    planned = [peak for _, peak in planned_peaks(case, CPU)]
    assert 0.94 * max(peaks) < max(planned) < 1.10 * max(peaks)
