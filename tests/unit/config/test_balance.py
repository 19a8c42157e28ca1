"""Rules of the balance and of schedules: each broken alone, all together, and what is just kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_distill.config import ValueScheduleConfig, load_config, to_yaml
from megatron_distill.config.rules.objective import _OF_RATIOS
from megatron_distill.config.schema import BalanceConfig
from megatron_distill.losses import BalanceMode, RatioBalance, ScheduleKind
from tests.support.sample_configs import TAUGHT, complaints, load_tree

MAGNITUDE = "objective.balance.mode=magnitude"
NORMS = "objective.balance.mode=gradient_norm"
SCHEDULE = "objective.balance.mode=schedule"
LINEAR = "{to: 0.5, steps: 10}"
BROKEN: dict[str, tuple[Sequence[str], str]] = {
    "no steps": (
        [SCHEDULE, "objective.ce_weight_schedule={to: 0.5}"],
        "objective.ce_weight_schedule.steps is required with "
        "objective.ce_weight_schedule.kind = 'linear'; set the number of optimizer "
        "steps of the change",
    ),
    "a temperature of zero": (
        [SCHEDULE, "objective.terms=[{temperature_schedule: {to: 0, steps: 3}}]"],
        "objective.terms.0.temperature_schedule.to = 0.0: a temperature must be above 0; raise it",
    ),
    "one name": (
        [
            SCHEDULE,
            "objective.terms=[{temperature_schedule: {to: 2, steps: 3}}, "
            "{temperature_schedule: {to: 2, steps: 4, kind: cosine}, weight: 2}]",
        ],
        "objective.terms.1 differs from objective.terms.0 in its weight at most; keep"
        " one of them, with the sum of the weights",
    ),
    "no task": (
        [MAGNITUDE, "objective.ce_weight=0"],
        "objective.ce_weight = 0.0: objective.balance.mode = 'magnitude' scales "
        "distillation to the cross-entropy; raise it, or set "
        "objective.balance.mode=schedule",
    ),
    "no task at the end": (
        [NORMS, "objective.ce_weight_schedule={to: 0, steps: 3}"],
        "objective.ce_weight_schedule.to = 0.0: objective.balance.mode = 'gradient_norm' scales",
    ),
    "a magnitude below zero": (
        [MAGNITUDE, "objective.terms=[{top_k: 4, support: raw}]"],
        "objective.terms.0.support = 'raw': this loss can be negative, and "
        "objective.balance.mode = 'magnitude' needs positive ones; use 'tail' or "
        "'renormalized', or objective.balance.mode=gradient_norm",
    ),
    "micro-batches of the step before": (
        [MAGNITUDE, "objective.balance={per_microbatch: true, raw_losses: previous}"],
        "objective.balance.raw_losses = 'previous': with "
        "objective.balance.per_microbatch = true a micro-batch has no losses of an earlier step; "
        "use 'exact'",
    ),
    "a mean of micro-batches": (
        [MAGNITUDE, "objective.balance={per_microbatch: true, ema: 0.9}"],
        "objective.balance.ema = 0.9 averages over steps, but "
        "objective.balance.per_microbatch = true takes the ratios of each micro-batch"
        " alone; set only one of the two",
    ),
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


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    found = complaints(
        load_tree, tmp_path, TAUGHT, MAGNITUDE, "objective.ce_weight=0",
        "objective.balance={per_microbatch: true, raw_losses: previous, ema: 0.9}",
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
