"""Rules of the balance and of schedules: each broken alone, all together, and what is just kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_distill.config import ValueScheduleConfig, load_config, to_yaml
from megatron_distill.config.rules.objective import _OF_RATIOS
from megatron_distill.config.schema import BalanceConfig
from megatron_distill.losses import BalanceMode, RatioBalance, ScheduleKind
from tests.support.sample_configs import MINIMAL, TAUGHT, complaints, load_tree

MAGNITUDE = "objective.balance.mode=magnitude"
NORMS = "objective.balance.mode=gradient_norm"
SCHEDULE = "objective.balance.mode=schedule"
LINEAR = "{to: 0.5, steps: 10}"
BROKEN: dict[str, tuple[Sequence[str], str]] = {
    "a weight's schedule in the fixed mode": (
        [f"objective.terms=[{{weight_schedule: {LINEAR}}}]"],
        "objective.terms.0.weight_schedule is given, but objective.balance.mode = 'fixed' changes "
        "nothing; set objective.balance.mode=schedule",
    ),
    "a temperature's": (
        [f"objective.terms=[{{temperature_schedule: {LINEAR}}}]"],
        "objective.terms.0.temperature_schedule is given, but",
    ),
    "alpha's": (
        [f"objective.balance.alpha_schedule={LINEAR}"],
        "objective.balance.alpha_schedule is given, but",
    ),
    "the labels'": (
        [f"objective.ce_weight_schedule={LINEAR}"],
        "objective.ce_weight_schedule is given, but",
    ),
    "no steps": (
        [SCHEDULE, "objective.ce_weight_schedule={to: 0.5}"],
        "objective.ce_weight_schedule.kind = 'linear' needs objective.ce_weight_schedule.steps",
    ),
    "steps of a jump": (
        [SCHEDULE, "objective.ce_weight_schedule={to: 0.5, kind: constant, steps: 3}"],
        "objective.ce_weight_schedule.steps = 3, but objective.ce_weight_schedule.kind = "
        "'constant' jumps at objective.ce_weight_schedule.start_step; leave it out",
    ),
    "a temperature of zero": (
        [SCHEDULE, "objective.terms=[{temperature_schedule: {to: 0, steps: 3}}]"],
        "objective.terms.0.temperature_schedule.to = 0.0: a temperature is above zero",
    ),
    "a weight of nothing": (
        ["objective.terms=[{weight: 0}]"],
        "objective.terms.0.weight = 0.0: nothing is learned from this term",
    ),
    "a weight of nothing to the end": (
        [SCHEDULE, "objective.terms=[{weight: 0, weight_schedule: {to: 0, steps: 3}}]"],
        "objective.terms.0.weight = 0.0: nothing is learned from this term",
    ),
    "one name": (
        [
            SCHEDULE,
            "objective.terms=[{temperature_schedule: {to: 2, steps: 3}}, "
            "{temperature_schedule: {to: 2, steps: 4, kind: cosine}, weight: 2}]",
        ],
        "objective.terms.1 differs from objective.terms.0 at most in its weight",
    ),
    "no task": (
        [MAGNITUDE, "objective.ce_weight=0"],
        "objective.ce_weight = 0.0: objective.balance.mode = 'magnitude' scales distillation to "
        "the cross-entropy, and there is none; raise it, or set objective.balance.mode=schedule",
    ),
    "no task at the end": (
        [NORMS, "objective.ce_weight_schedule={to: 0, steps: 3}"],
        "objective.ce_weight_schedule.to = 0.0: objective.balance.mode = 'gradient_norm' scales",
    ),
    "a magnitude below zero": (
        [MAGNITUDE, "objective.terms=[{top_k: 4, support: raw}]"],
        "objective.terms.0.support = 'raw' can be negative, which has no magnitude",
    ),
    "norms of the step before": (
        [NORMS, "objective.balance.raw_losses=previous"],
        "objective.balance.raw_losses = 'previous', but with objective.balance.mode = "
        "'gradient_norm' a step leaves no norms of single losses behind; use 'exact'",
    ),
    "norms of micro-batches": (
        [NORMS, "objective.balance.per_microbatch=true"],
        "objective.balance.per_microbatch = true belongs to objective.balance.mode = 'magnitude'",
    ),
    "micro-batches of the step before": (
        [MAGNITUDE, "objective.balance={per_microbatch: true, raw_losses: previous}"],
        "objective.balance.raw_losses = 'previous', but with objective.balance.per_microbatch",
    ),
    "a mean of micro-batches": (
        [MAGNITUDE, "objective.balance={per_microbatch: true, ema: 0.9}"],
        "objective.balance.ema = 0.9 averages over steps, but with",
    ),
    **{
        f"{key} without ratios": (
            [mode, f"objective.balance.{key}={value}"],
            f"objective.balance.{key} = ",
        )
        for mode, key, value in (
            (SCHEDULE, "raw_losses", "previous"),
            ("objective.balance.mode=fixed", "ema", "0.5"),
            (SCHEDULE, "clamp", "10"),
            (SCHEDULE, "epsilon", "1e-3"),
            (SCHEDULE, "per_microbatch", "true"),
        )
    },
    "out of range": (["objective.balance.clamp=0.5"], "objective.balance.clamp = 0.5: must be"),
    "not a decay": (["objective.balance.ema=1"], "objective.balance.ema = 1"),
    "no end": (
        [SCHEDULE, "objective.balance.alpha_schedule={steps: 3}"],
        "objective.balance.alpha_schedule.to: this key is required",
    ),
}
KEPT = (
    [SCHEDULE],
    ["objective.balance.alpha=0.5"],
    [SCHEDULE, "objective.ce_weight=0"],
    [SCHEDULE, "objective.terms=[{weight: 0, weight_schedule: {to: 1, steps: 3}}]"],
    [NORMS, "objective.terms=[{top_k: 4, support: raw}]"],
    [MAGNITUDE, "objective.balance={ema: 0.9, clamp: 1, epsilon: 1, raw_losses: previous}"],
    [MAGNITUDE, "objective.balance={per_microbatch: true, clamp: 100}"],
    [
        MAGNITUDE,
        "objective.terms=[{temperature_schedule: {to: 2, steps: 3}}, "
        "{temperature_schedule: {to: 3, steps: 3}}]",
        "objective.balance.alpha_schedule={to: 0, kind: cosine, steps: 5, start_step: 2}",
    ],
)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_the_only_complaint(tmp_path: Path, case: str) -> None:
    overrides, words = BROKEN[case]
    found = complaints(load_tree, tmp_path, TAUGHT, *overrides)
    assert [line[: len(words)] for line in found] == [words]


def test_nothing_is_scaled_without_terms(tmp_path: Path) -> None:
    (found,) = complaints(load_tree, tmp_path, MINIMAL, MAGNITUDE)
    assert found.startswith(
        "objective.balance.mode = 'magnitude' but objective.terms and objective.features are"
    )


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
        "objective.terms.0.temperature_schedule: a store knows its teacher at the temperatures of "
        "the capture only, unless objective.terms.0.support = 'renormalized', here 'tail'"
    )


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    found = complaints(
        load_tree, tmp_path, TAUGHT, NORMS, "objective.ce_weight=0",
        "objective.balance={per_microbatch: true, raw_losses: previous}",
        "objective.balance.alpha_schedule={to: 1}",
    )  # fmt: skip
    assert len(found) == 4


@pytest.mark.parametrize("overrides", KEPT)
def test_a_rule_that_is_just_kept_says_nothing(tmp_path: Path, overrides: Sequence[str]) -> None:
    config = load_tree(tmp_path, TAUGHT, *overrides)
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_config(again) == config


def test_the_section_knows_what_the_mathematics_knows() -> None:
    fields = BalanceConfig.model_fields
    assert fields["mode"].annotation == BalanceMode
    assert {name: fields[name].default for name in _OF_RATIOS} == _OF_RATIOS
    assert RatioBalance() == RatioBalance(fields["epsilon"].default, fields["clamp"].default)
    assert ValueScheduleConfig.model_fields["kind"].annotation == ScheduleKind
