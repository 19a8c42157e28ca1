"""The time until the end of a run, from its settings, its log and its newest checkpoint."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_distill.launching.grace import is_number, newest_with
from megatron_distill.launching.status.run_checkpoint import Saved
from megatron_distill.launching.status.step_figures import speed

__all__ = ["pause_seconds", "seconds_left"]

_Record = Mapping[str, Any]


def seconds_left(
    run: Path,
    settings: Mapping[str, Any],
    records: Sequence[_Record],
    saved: Saved,
    *,
    step: int,
    is_done: bool,
) -> float | None:
    """Return the time of the steps left and of what is due after them; None: not known.

    A validation and an evaluation take the median of the newest start, or as long as the newest
    one; a save takes as long as the newest one. What is not measured yet counts nothing, nor do
    the saves of a step that is the best so far.

    records: the newest ones of the log, in order.
    """
    step_seconds, _ = speed(records)
    steps = _count(_section(settings, "train"), "steps")
    if step_seconds is None or not steps:
        return None
    if is_done or step > steps:
        return 0.0
    seconds = (steps - step) * step_seconds
    for name, section, each in _pauses(run, settings, records):
        has_ended = any(one.get("step") == step and name in one for one in records)
        due = _times(step, steps, _count(section, "interval"), has_ended=has_ended)
        seconds += due * each
    return seconds + _of_saves(_section(settings, "checkpoint"), saved, step, steps)


def pause_seconds(
    run: Path, settings: Mapping[str, Any], records: Sequence[_Record], saved: Saved
) -> float:
    """Return the time that may pass between two steps: of a validation, an evaluation and a save.

    A validation that none was measured of takes no longer than as many samples of training.
    """
    pauses = {name: each for name, _, each in _pauses(run, settings, records)}
    if not pauses.get("validation_seconds", 1.0):
        step_seconds, _ = speed(records)
        samples = _count(_section(settings, "train"), "global_batch_size") or 1
        steps = _count(_section(settings, "validation"), "samples") / samples
        pauses["validation_seconds"] = steps * (step_seconds or 0.0)
    return sum(pauses.values()) + (saved.seconds or 0.0)


def _pauses(
    run: Path, settings: Mapping[str, Any], records: Sequence[_Record]
) -> Iterator[tuple[str, Mapping[str, Any], float]]:
    """Yield what interrupts the steps: the field of its record, its settings, its seconds or 0."""
    validation, evaluation = _section(settings, "validation"), _section(settings, "evaluation")
    for name, section, is_on, seconds_of in (
        ("validation_seconds", validation, _count(validation, "samples") > 0, _validation_seconds),
        ("evaluation", evaluation, bool(evaluation.get("tasks")), _evaluation_seconds),
    ):
        if is_on:
            yield name, section, _measured(run, records, name, seconds_of)


def _of_saves(section: Mapping[str, Any], saved: Saved, step: int, steps: int) -> float:
    """Return the time of the saves left; only the last one of a writer in the background waits."""
    if not saved.is_wanted or saved.seconds is None:
        return 0.0
    interval = 0 if section.get("asynchronous") is True else _count(section, "interval")
    return _times(step, steps, interval, has_ended=saved.step >= step) * saved.seconds


def _times(step: int, steps: int, interval: int, *, has_ended: bool) -> int:
    """Return how often something is still due every `interval` steps and after the last one.

    has_ended: of what is due after `step` itself, which is done.
    """
    due = int(step > 0 and not has_ended and (step == steps or _is_due(step, interval)))
    if step < steps:
        due += 1 if not _is_due(steps, interval) else 0
        due += steps // interval - step // interval if interval else 0
    return due


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _measured(
    run: Path,
    records: Sequence[_Record],
    name: str,
    seconds_of: Callable[[_Record], float | None],
) -> float:
    """Return the usual seconds of the newest start, else the newest ones, 0 where none are known.

    The first step of a start has its device.
    """
    starts = [index for index, one in enumerate(records) if "device" in one]
    newest = records[starts[-1] :] if starts else records
    found = [seconds for one in newest if (seconds := seconds_of(one)) is not None]
    return statistics.median(found) if found else seconds_of(newest_with(run, name)) or 0.0


def _validation_seconds(record: _Record) -> float | None:
    seconds = record.get("validation_seconds")
    return float(seconds) if is_number(seconds) else None


def _evaluation_seconds(record: _Record) -> float | None:
    """Return the seconds of the student's tasks; its teachers are evaluated once, at the start."""
    with suppress(LookupError, TypeError, ValueError, AttributeError):
        tasks = record["evaluation"]["student"].values()
        return sum(float(task["seconds"]) for task in tasks)
    return None


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, Mapping) else {}


def _count(section: Mapping[str, Any], key: str) -> int:
    found = section.get(key)
    return found if isinstance(found, int) and found > 0 else 0
