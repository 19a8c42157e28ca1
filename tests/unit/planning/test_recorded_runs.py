"""Recorded runs of the quickstart's models beside plans: two CPUs, two and four ranks."""

from __future__ import annotations

import json
from itertools import combinations
from statistics import median
from typing import Any, Final

import pytest

from benchmarks.harness.calibrated import loaded, planned_seconds
from benchmarks.recipes import RECIPES, speed_config, speed_run
from benchmarks.stores.planned import planned_training
from megatron_distill.config import load_config
from megatron_distill.planning.device import DeviceProfile
from megatron_distill.planning.search import planned
from megatron_distill.train.reports.planned_run import configured_choice, open_shapes, planned_run
from tests.guards.source_tree import ROOT

RESULTS = ROOT / "benchmarks" / "results"
ROWS: Final = 2048
TEACHER = (
    "teacher.architecture={num_layers: 4, hidden_size: 192, ffn_hidden_size: 512, "
    "num_attention_heads: 6, num_kv_heads: 2, norm: rmsnorm, activation: swiglu, positions: rope, "
    f"tied_embeddings: true, vocab_size: {ROWS}}}"
)
# Of each run: its file, overrides, and ranks on two cores.
RUNS = {
    "teacher": ("quickstart_teacher.yaml", (), 2),
    "student alone": ("quickstart_student.yaml", ("teacher=null", "objective.terms=[]"), 4),
    "distilled student": ("quickstart_student.yaml", ("teacher.checkpoint=null", TEACHER), 4),
    "with layers": (
        "quickstart_student.yaml",
        ("teacher.checkpoint=null", TEACHER, *RECIPES["logits and features"]),
        4,
    ),
}
# Of a recorded run: which it is, the record of a calibration, and the bound. The recipes name the
# CPU of theirs. The quickstart names none, and has the day of the other. Runs of equal work differ
# there by 14 and 29 %, so that these two are not held to 15 %; docs/planning.md has the errors.
HELD = {
    ("recipes", "labels"): ("student alone", "teachers", 0.15),
    ("recipes", "logits"): ("distilled student", "teachers", 0.15),
    ("recipes", "logits and features"): ("with layers", "teachers", 0.15),
    ("quickstart", "teacher"): ("teacher", "planning", 0.15),
    ("quickstart", "student alone"): ("student alone", "planning", 0.25),
    ("quickstart", "distilled student"): ("distilled student", "planning", 0.20),
}


def record(name: str) -> Any:
    """The figures of a record."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def measured_rate(name: str, label: str) -> float:
    """The median of the seeds' tokens per second."""
    found = record(name)
    runs = [run for seed in found.get("seeds", ()) for run in seed["runs"]] or found["runs"]
    rates = [run["tokens_per_second"] for run in runs if run.get("recipe", run["label"]) == label]
    assert len(rates) == 3
    return median(rates)


def planned_rate(run_name: str, calibration: str) -> float:
    """The median of the tokens per second that the calibrations of a record predict."""
    file, overrides, ranks = RUNS[run_name]
    given = [f"student.architecture.vocab_size={ROWS}", *overrides]
    config = load_config(ROOT / "configs" / file, given)
    run = planned_run(config, open_shapes(config))
    choice = configured_choice(config, run, ranks=ranks, teachers=0)
    devices = [DeviceProfile.model_validate(one) for one in record(calibration)["devices"]]
    times = [planned(run, choice, device.shared_by(ranks)).time.total for device in devices]
    return run.tokens / median(times)


@pytest.mark.parametrize("of", HELD, ids=" ".join)
def test_a_recorded_run_takes_about_the_planned_time(of: tuple[str, str]) -> None:
    run, calibration, bound = HELD[of]
    assert measured_rate(*of) / planned_rate(run, calibration) - 1 == pytest.approx(0, abs=bound)


def in_tolerance(rows: dict[str, tuple[float, float]]) -> None:
    """Of measured and planned seconds: within 15 %, and distinct ones in the right order."""
    errors = {name: there / here - 1 for name, (here, there) in rows.items()}
    assert max(map(abs, errors.values())) <= 0.15, errors
    for (fast, sooner), (slow, later) in combinations(sorted(rows.values()), 2):
        assert slow <= 1.10 * fast or sooner < later, rows


SPEED, STORED = RESULTS / "recipes_speed.json", record("store")["training"]["found"]


@pytest.mark.skipif(not SPEED.exists(), reason="benchmarks/recipes.py --speed has not run")
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


@pytest.mark.skipif(isinstance(STORED, list), reason="the record of steps has no calibration")
def test_steps_from_a_store_are_those_of_plans_of_the_same_hour() -> None:
    devices = loaded(STORED["devices"])
    in_tolerance(
        {
            row["workload"]: (
                median(row["seconds"]["store"]) / row["steps"],
                median(
                    planned_training(row["workload"], devices, ids=row["k"], threads=row["threads"])
                ),
            )
            for row in STORED["rows"]
        }
    )
