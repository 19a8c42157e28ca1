"""The cost of a run: time and device-hours of its steps and of its validations."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Final

from megatron_distill.errors import counted
from megatron_distill.planning.step_time import measuring_seconds, teacher_seconds

if TYPE_CHECKING:
    from megatron_distill.planning.device import DeviceProfile
    from megatron_distill.planning.run import Choice, PlannedRun
    from megatron_distill.planning.search import Planned

__all__ = ["in_seconds", "run_cost", "validation_count", "validation_seconds"]

_DAY: Final = 86_400.0


def run_cost(run: PlannedRun, best: Planned, device: DeviceProfile) -> str:
    """Return the time and the device-hours of a run's steps, and of its validations."""
    seconds, devices = best.time.total, best.choice.devices
    hours = seconds * devices / 3600
    if not run.steps:
        per_billion = 1e9 / run.tokens * seconds
        return (
            f"Cost of 1: {per_billion / 3600:.2f} hours and {per_billion * devices / 3600:,.1f} "
            "device-hours per billion tokens; the steps follow from train.epochs at the start"
        )
    total = run.steps * run.tokens
    return (
        f"Cost of 1: {run.steps:,} steps = {_tokens(total)} in {_duration(run.steps * seconds)}, "
        f"{_device_time(run.steps * hours)}{_of_validations(run, best, device)}"
    )


def _of_validations(run: PlannedRun, best: Planned, device: DeviceProfile) -> str:
    """Return the cost of the validations, empty where there are none."""
    count = validation_count(run)
    if not count:
        return ""
    seconds = count * validation_seconds(run, best.choice, device)
    samples = counted(run.validation_samples, "sample")
    return (
        f"; {counted(count, 'validation')} of {samples} besides in {_duration(seconds)}, "
        f"{_device_time(seconds * best.choice.devices / 3600)}"
    )


def _tokens(count: float) -> str:
    """Return a number of tokens in the largest unit of which there is a tenth."""
    if count >= 1e8:
        return f"{count / 1e9:,.2f} billion tokens"
    return f"{count / 1e6:,.2f} million tokens" if count >= 1e5 else f"{count:,.0f} tokens"


def _duration(seconds: float) -> str:
    """Return a time in days, hours, minutes or seconds."""
    for unit, size in (("days", _DAY), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{in_seconds(seconds)} seconds"


def _device_time(hours: float) -> str:
    """Return device-hours, or parts of one in a smaller unit."""
    if hours >= 10:
        return f"{hours:,.0f} device-hours"
    if hours >= 1:
        return f"{hours:.1f} device-hours"
    minutes = 60 * hours
    if minutes >= 1:
        return f"{minutes:.1f} device-minutes"
    return f"{in_seconds(60 * minutes)} device-seconds"


def in_seconds(value: float) -> str:
    """Return seconds with three digits at least."""
    if value >= 10:
        return f"{value:.2f}"
    return f"{value:.3f}" if value >= 1 or not value else f"{value:.3g}"


def validation_count(run: PlannedRun) -> int:
    """Return the validations of a run of so many steps; the last one follows the last step."""
    if not run.validation_samples or not run.steps:
        return 0
    interval = run.validation_interval
    due = run.steps // interval if interval else 0
    return due + (1 if not interval or run.steps % interval else 0)


def validation_seconds(run: PlannedRun, choice: Choice, device: DeviceProfile) -> float:
    """Return the time of one validation, in batches as large as a step's.

    Its losses are those that a balance measures. It runs both models of a batch one after another:
    a teacher on ranks of its own is not ahead, and a store's answers are read.
    """
    batches = ceil(run.validation_samples / run.global_batch_size)
    student = measuring_seconds(replace(run, measures="losses"), choice, device)
    return batches * (student + sum(teacher_seconds(run, choice, device)))
