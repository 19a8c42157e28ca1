"""Rules of what balances the losses, and of schedules of weights and temperatures."""

from collections.abc import Iterator

from megatron_distill.config.describe import shown
from megatron_distill.config.problems import Problem
from megatron_distill.config.schema import BalanceConfig, RunConfig, ValueScheduleConfig

__all__ = ["balance_problems"]

# What only ratios have, and the value that asks for nothing.
_OF_RATIOS: dict[str, object] = {
    "raw_losses": "exact",
    "ema": 0.0,
    "clamp": None,
    "epsilon": 1e-8,
    "per_microbatch": False,
}


def balance_problems(config: RunConfig) -> Iterator[Problem]:
    """Say what of `objective.balance` and of the schedules contradicts itself or the rest."""
    balance = config.objective.balance
    schedules = dict(_schedules(config))
    for key, schedule in schedules.items():
        yield from _schedule(key, schedule, balance)
    if balance.mode in ("magnitude", "gradient_norm"):
        yield from _ratio_targets(config)
        yield from _ratio_settings(balance)
    else:
        for name, nothing in _OF_RATIOS.items():
            value = getattr(balance, name)
            if value != nothing:
                yield Problem(
                    (f"objective.balance.{name}", "objective.balance.mode"),
                    f"objective.balance.{name} = {shown(value)} is of ratios, and "
                    f"objective.balance.mode = {balance.mode!r} has none; leave it "
                    "out, or choose 'magnitude' or 'gradient_norm'",
                )
    yield from _temperatures(config)


def _schedules(config: RunConfig) -> Iterator[tuple[str, ValueScheduleConfig]]:
    """Every schedule of the objective that is given, under its key."""
    objective = config.objective
    given = {
        "objective.ce_weight_schedule": objective.ce_weight_schedule,
        "objective.balance.alpha_schedule": objective.balance.alpha_schedule,
    }
    for index, term in enumerate(objective.terms):
        given[f"objective.terms.{index}.weight_schedule"] = term.weight_schedule
        given[f"objective.terms.{index}.temperature_schedule"] = term.temperature_schedule
    for key, schedule in given.items():
        if schedule is not None:
            yield key, schedule


def _schedule(key: str, schedule: ValueScheduleConfig, balance: BalanceConfig) -> Iterator[Problem]:
    if balance.mode == "fixed":
        yield Problem(
            (key, "objective.balance.mode"),
            f"{key} is given, but objective.balance.mode = 'fixed' changes nothing; set "
            "objective.balance.mode=schedule, or leave the schedule out",
        )
    if (schedule.kind == "constant") != (schedule.steps is None):
        remedy = (
            f"{key}.kind = {schedule.kind!r} needs {key}.steps; give it"
            if schedule.steps is None
            else f"{key}.steps = {schedule.steps}, but {key}.kind = 'constant' jumps at "
            f"{key}.start_step; leave it out"
        )
        yield Problem((f"{key}.steps", f"{key}.kind"), remedy)


def _ratio_targets(config: RunConfig) -> Iterator[Problem]:
    """Find what has no size to be scaled, or to scale to."""
    objective = config.objective
    mode = objective.balance.mode
    if not objective.terms and not objective.features:
        yield Problem(
            ("objective.balance.mode", "objective.terms", "objective.features"),
            f"objective.balance.mode = {mode!r} but objective.terms and objective.features are "
            "empty: there is nothing to scale; add a term, or set objective.balance.mode=fixed",
        )
    end = objective.ce_weight_schedule
    if objective.ce_weight == 0 or (end is not None and end.to == 0):
        key = "objective.ce_weight" + ("" if objective.ce_weight == 0 else "_schedule.to")
        yield Problem(
            ("objective.balance.mode", key),
            f"{key} = 0.0: objective.balance.mode = {mode!r} scales distillation to the "
            "cross-entropy, and there is none; raise it, or set objective.balance.mode=schedule",
        )
    for index, term in enumerate(objective.terms):
        if mode == "magnitude" and term.support == "raw":
            yield Problem(
                ("objective.balance.mode", f"objective.terms.{index}.support"),
                f"objective.terms.{index}.support = 'raw' can be negative, which has no magnitude "
                "to scale by; use 'tail' or 'renormalized', or "
                "objective.balance.mode=gradient_norm",
            )
    for index, feature in enumerate(objective.features):
        if mode == "gradient_norm" and feature.loss == "attention":
            yield Problem(
                ("objective.balance.mode", f"objective.features.{index}.loss"),
                f"objective.features.{index}.loss = 'attention' has gradients on queries and keys, "
                "and objective.balance.mode = 'gradient_norm' compares those on hidden states; use "
                "'mse' or 'cosine', or objective.balance.mode=magnitude",
            )


def _ratio_settings(balance: BalanceConfig) -> Iterator[Problem]:
    if balance.mode == "gradient_norm":
        if balance.raw_losses == "previous":
            yield Problem(
                ("objective.balance.raw_losses", "objective.balance.mode"),
                "objective.balance.raw_losses = 'previous', but with objective.balance.mode = "
                "'gradient_norm' a step leaves no norms of single losses behind; use 'exact'",
            )
        if balance.per_microbatch:
            yield Problem(
                ("objective.balance.per_microbatch", "objective.balance.mode"),
                "objective.balance.per_microbatch = true belongs to objective.balance.mode = "
                "'magnitude', here 'gradient_norm'; leave it out",
            )
        return
    if not balance.per_microbatch:
        return
    if balance.raw_losses == "previous":
        yield Problem(
            ("objective.balance.per_microbatch", "objective.balance.raw_losses"),
            "objective.balance.raw_losses = 'previous', but with objective.balance.per_microbatch "
            "= true no micro-batch has been seen before; use 'exact'",
        )
    if balance.ema:
        yield Problem(
            ("objective.balance.per_microbatch", "objective.balance.ema"),
            f"objective.balance.ema = {balance.ema} averages over steps, but with "
            "objective.balance.per_microbatch = true every micro-batch stands for itself; set "
            "one of the two",
        )


def _temperatures(config: RunConfig) -> Iterator[Problem]:
    is_stored = config.teacher is not None and config.teacher.store is not None
    for index, term in enumerate(config.objective.terms):
        path = f"objective.terms.{index}"
        schedule = term.temperature_schedule
        if schedule is None:
            continue
        if schedule.to == 0:
            yield Problem(
                (f"{path}.temperature_schedule.to",),
                f"{path}.temperature_schedule.to = 0.0: a temperature is above zero; raise it",
            )
        if is_stored and term.support != "renormalized":
            yield Problem(
                (f"{path}.temperature_schedule", f"{path}.support", "teacher.store"),
                f"{path}.temperature_schedule: a store knows its teacher at the temperatures of "
                f"the capture only, unless {path}.support = 'renormalized', here "
                f"{term.support!r}; set it so, or leave the schedule out",
            )
