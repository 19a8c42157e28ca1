"""Rules of the balance and of schedules: all together; what a store does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.config import ValueScheduleConfig
from megatron_distill.config.rules.objective import _OF_RATIOS
from megatron_distill.config.schema import BalanceConfig
from megatron_distill.losses import BalanceMode, RatioBalance, ScheduleKind
from tests.support.sample_configs import TAUGHT, complaints, load_tree

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
