"""From a configuration to schedules and what balances the losses."""

from __future__ import annotations

import sys

from megatron_distill.config import ObjectiveConfig, ValueScheduleConfig
from megatron_distill.losses import RatioBalance, ValueSchedule
from megatron_distill.train.balancing import Balancing, Schedules
from megatron_distill.train.objective import TokenObjective


def build_balancing(config: ObjectiveConfig, objective: TokenObjective) -> Balancing:
    """Translate `objective.balance` and every schedule of the objective.

    The feature losses' weights are those of `objective`, which knows the pairs of layers.
    """
    balance = config.balance
    return Balancing(
        mode=balance.mode,
        schedules=Schedules(
            ce=_schedule(config.ce_weight, config.ce_weight_schedule),
            terms=tuple(_schedule(term.weight, term.weight_schedule) for term in config.terms),
            temperatures=tuple(
                _schedule(term.temperature, term.temperature_schedule) for term in config.terms
            ),
            features=tuple(map(ValueSchedule.unchanging, objective.feature_weights)),
            alpha=_schedule(balance.alpha, balance.alpha_schedule),
        ),
        ratios=RatioBalance(balance.epsilon, balance.clamp),
        decay=balance.ema,
        from_last_step=balance.raw_losses == "previous",
        per_micro_batch=balance.per_microbatch,
    )


def final_objective(objective: TokenObjective, config: ObjectiveConfig) -> TokenObjective:
    """The objective with the weights and temperatures at which its schedules end.

    Held-out losses are those of this one all through a run, so that they can be compared.
    """
    balancing = build_balancing(config, objective)
    return balancing.schedules.applied(objective, steps_done=sys.maxsize)


def _schedule(value: float, schedule: ValueScheduleConfig | None) -> ValueSchedule:
    if schedule is None:
        return ValueSchedule.unchanging(value)
    return ValueSchedule(
        value, schedule.to, schedule.kind, schedule.steps or 0, schedule.start_step
    )
