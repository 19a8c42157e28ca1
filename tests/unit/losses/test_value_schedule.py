"""Schedules by hand: both ends, the middle, what is before and after."""

from __future__ import annotations

import pytest

from megatron_distill.losses import ScheduleKind, Term, ValueSchedule
from tests.reference.distillation import Problem, solve
from tests.support.objective_runs import run

LINEAR = {0: 4.0, 10: 4.0, 11: 3.25, 12: 2.5, 13: 1.75, 14: 1.0, 15: 1.0, 10**9: 1.0}
# 1 + 3 (1 + cos(pi x)) / 2 at x = 1/4 and 3/4: cos = +-sqrt(1/2).
COSINE = LINEAR | {11: 3.560660171779821, 12: 2.5, 13: 1.4393398282201786}


@pytest.mark.parametrize(("kind", "expected"), [("linear", LINEAR), ("cosine", COSINE)])
def test_values_by_hand(kind: ScheduleKind, expected: dict[int, float]) -> None:
    schedule = ValueSchedule(4.0, 1.0, kind, steps=4, start_step=10)
    for step, value in expected.items():
        assert schedule.at(step) == pytest.approx(value, rel=1e-15), step
    upwards = ValueSchedule(1.0, 4.0, kind, steps=4, start_step=10)
    for step, value in expected.items():
        assert upwards.at(step) == pytest.approx(5.0 - value, rel=1e-15), step


def test_constant_jumps_once() -> None:
    schedule = ValueSchedule(4.0, 1.0, "constant", start_step=10)
    assert [schedule.at(step) for step in (0, 9, 10, 11)] == [4.0, 4.0, 1.0, 1.0]
    assert {ValueSchedule.unchanging(0.3).at(step) for step in (0, 1, 10**9)} == {0.3}


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_ends_are_exact(kind: ScheduleKind) -> None:
    schedule = ValueSchedule(0.1, 0.7, kind, steps=3)
    assert (schedule.at(0), schedule.at(3)) == (0.1, 0.7)


def test_steps_go_with_the_kind() -> None:
    with pytest.raises(ValueError, match="constant schedule cannot take 3 steps"):
        ValueSchedule(1.0, 2.0, "constant", steps=3)
    with pytest.raises(ValueError, match="linear schedule cannot take 0 steps"):
        ValueSchedule(1.0, 2.0, "linear")


def test_a_term_keeps_its_name_while_its_temperature_changes() -> None:
    names = {
        Term(temperature=temperature, temperatures=(4.0, 1.0), top_k=8).name
        for temperature in (4.0, 2.7, 1.0)
    }
    assert names == {"forward_kl_t4to1_top8"}


def test_terms_whose_temperatures_meet_add_up() -> None:
    problem = Problem.random(seed=2)
    terms = [Term(weight=0.3), Term(weight=2.0, temperature=1.0, temperatures=(4.0, 1.0))]
    total, report, hidden, weight = run(problem, terms)
    answer = solve(problem, [(2.3, 1.0)])
    assert float(total) == pytest.approx(float(answer.total), rel=1e-6)
    for ours, other in ((hidden, answer.hidden_gradient), (weight, answer.weight_gradient)):
        assert float((ours - other).abs().max()) < 2e-6 * float(other.abs().max())
    assert float(report["forward_kl"]) == float(report["forward_kl_t4to1"]) > 0
    assert float(report["kd"]) == pytest.approx(2.3 * float(report["forward_kl"]), rel=1e-6)
