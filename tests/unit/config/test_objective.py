"""The objective's section: names of the tables, feature losses, balance and schedules."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import get_args

import pytest

from megatron_distill.config import ValueScheduleConfig, check_features, matched_layers
from megatron_distill.config.rules.objective import _OF_RATIOS
from megatron_distill.config.schema import BalanceConfig, FeatureConfig
from megatron_distill.config.schema.objective import PARAMETERS, DivergenceName, TermConfig
from megatron_distill.losses import BalanceMode, RatioBalance, ScheduleKind
from megatron_distill.ops.divergences import DIVERGENCES
from megatron_distill.signals import Support
from tests.support.sample_configs import TAUGHT, complaints, load_tree


def test_divergences_are_those_of_the_table() -> None:
    assert get_args(DivergenceName) == tuple(DIVERGENCES)
    assert get_args(TermConfig.model_fields["support"].annotation) == get_args(Support)


def test_parameters_are_those_of_the_rows() -> None:
    taken = {
        parameter: tuple(
            name
            for name, make in DIVERGENCES.items()
            if parameter in inspect.signature(make).parameters
        )
        for make in DIVERGENCES.values()
        for parameter in inspect.signature(make).parameters
    }
    assert taken == PARAMETERS


def test_given_parameters_are_handed_on() -> None:
    assert TermConfig().parameters == {}
    assert TermConfig(divergence="js_divergence", beta=0.2).parameters == {"beta": 0.2}


def test_all_problems_come_together(tmp_path):
    found = complaints(
        load_tree, tmp_path, TAUGHT,
        "objective.features=[{student: 5, teacher: 9}, {match: last, student: 1}]",
    )  # fmt: skip
    assert [line.split(" = ")[0] for line in found] == [
        "objective.features.1.match",
        "objective.features.0.student",
        "objective.features.0.teacher",
    ]
    whole = FeatureConfig(student=5, teacher=9)
    last = FeatureConfig(match="last")
    found = complaints(check_features, (whole, last, last), 4, 2)
    starts = [line.split(":")[0].split(" = ")[0] for line in found]
    assert starts == [
        "objective.features.0.student",
        "objective.features.0.teacher",
        "objective.features.1.match",
        "objective.features.2.match",
    ]


@pytest.mark.parametrize(
    ("match", "student", "teacher", "expected"),
    [
        ("uniform", 4, 4, [1, 2, 3, 4]),
        ("uniform", 4, 12, [3, 6, 9, 12]),
        ("uniform", 4, 6, [2, 3, 5, 6]),  # 1.5 and 4.5 are rounded up
        ("uniform", 3, 8, [3, 5, 8]),
        ("uniform", 4, 2, [1, 1, 2, 2]),
        ("uniform", 6, 2, [1, 1, 1, 1, 2, 2]),  # a third of a layer is the first
        ("last", 3, 8, [6, 7, 8]),
        ("last", 4, 4, [1, 2, 3, 4]),
    ],
)
def test_depths_are_matched(match, student, teacher, expected):
    found = matched_layers(FeatureConfig(match=match), student, teacher)
    assert found == tuple(enumerate(expected, start=1))


MAGNITUDE = "objective.balance.mode=magnitude"
SCHEDULE = "objective.balance.mode=schedule"


@pytest.mark.parametrize("support", ["tail", "renormalized"])
def test_a_store_knows_its_own_temperatures(tmp_path: Path, support: str) -> None:
    tree = {key: value for key, value in TAUGHT.items() if key != "teacher"}
    tree |= {"teacher": {"store": ["stores/a"]}}
    term = f"{{top_k: 4, support: {support}, temperature_schedule: {{to: 2, steps: 3}}}}"
    overrides = (SCHEDULE, f"objective.terms=[{term}]")
    if support == "renormalized":
        load_tree(tmp_path, tree, *overrides)
        return
    (found,) = complaints(load_tree, tmp_path, tree, *overrides)
    assert found.startswith(
        "objective.terms.0.temperature_schedule: a store has the temperatures of its capture "
        "only, unless objective.terms.0.support = 'renormalized' (here 'tail')"
    )


def test_the_section_has_the_names_of_the_mathematics() -> None:
    fields = BalanceConfig.model_fields
    assert fields["mode"].annotation == BalanceMode
    assert {name: fields[name].default for name in _OF_RATIOS} == _OF_RATIOS
    assert RatioBalance() == RatioBalance(fields["epsilon"].default, fields["clamp"].default)
    assert ValueScheduleConfig.model_fields["kind"].annotation == ScheduleKind
