"""Results of a task: measures with their standard errors, and the counts that qualify them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from megatron_distill.evaluation.calibration import item_gaps
from megatron_distill.evaluation.requests import Score, WrittenText
from megatron_distill.evaluation.tasks.graders import BOXED, grader_versions
from megatron_distill.evaluation.tasks.grading import Graded
from megatron_distill.evaluation.tasks.mathematics import boxed
from megatron_distill.evaluation.tasks.paired import Floats, ItemValues, TaskItems
from megatron_distill.evaluation.tasks.prepared import PreparedTask

__all__ = ["scored_items", "stderr_of", "task_result", "written_items", "written_result"]


# Below this mean probability of all letters together, accuracy is about the format.
_LEAST_MASS: Final = 0.5
# The share of prompts that may lose their beginning, and of texts that may lose their end.
_MOST_LOSING: Final = 0.01
# The exponential of more is no double.
_MOST_NATS: Final = 700.0


def task_result(prepared: PreparedTask, scores: Sequence[Score]) -> dict[str, Any]:
    """Return the measures of a task from the scores of its requests.

    Every measure that is a mean has its standard error under `NAME_stderr`. With groups each has
    its own measure and count under `groups`. Ties go to the first choice.
    """
    if prepared.task.kind == "perplexity":
        return _qualified(prepared, _of_texts(prepared, scores))
    return _qualified(prepared, _of_choices(prepared, scores))


def written_result(
    prepared: PreparedTask, texts: Sequence[WrittenText], grades: Mapping[str, Graded]
) -> dict[str, Any]:
    """Return the measures of a generation task: the share of right texts by each grader.

    `cut` counts texts that reached the most tokens; `NAME_timeouts` and `NAME_failures` those that
    a grader did not judge, which are wrong. `unboxed` counts right answers without a box, which the
    graders of `BOXED` compare as a whole.
    """
    found: dict[str, Any] = {}
    for name, graded in grades.items():
        hits = np.array(graded.right, float)
        found[name] = float(hits.mean())
        found[f"{name}_stderr"] = stderr_of(hits)
        for kind, count in (("timeouts", graded.timeouts), ("failures", graded.failures)):
            if count:
                found[f"{name}_{kind}"] = count
    usual = next(iter(grades))
    found["cut"] = sum(text.is_cut for text in texts)
    unboxed = sum(boxed(item.target) is None for item in prepared.items)
    if unboxed and not BOXED.isdisjoint(prepared.task.graders):
        found["unboxed"] = unboxed
    found["graders"] = grader_versions(prepared.task.graders)
    found |= _groups(prepared, np.array(grades[usual].right, float), usual)
    return _qualified(prepared, found)


def _qualified(prepared: PreparedTask, found: dict[str, Any]) -> dict[str, Any]:
    """Add the counts and the digest that qualify a result."""
    found |= {
        "n": len(prepared.items),
        "shots": prepared.task.shots,
        "shots_dropped": prepared.shots_dropped,
        "truncated": prepared.truncated,
        "prompt_hash": prepared.prompt_hash,
    }
    reasons = _reservations(prepared, found)
    return found | ({"not_comparable": reasons} if reasons else {})


def stderr_of(values: Floats) -> float:
    """Standard error of the mean of independent values; 0 for a single one."""
    if len(values) < 2:
        return 0.0
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def scored_items(prepared: PreparedTask, scores: Sequence[Score]) -> TaskItems:
    """Return the measures of each item, for the comparison with another model."""
    if prepared.task.kind == "perplexity":
        sums, counted = _sums_of_texts(prepared, scores)
        bits = ItemValues(-sums / math.log(2), counted[:, 0])
        return TaskItems(prepared.prompt_hash, {"bits_per_byte": bits})
    choices = _chosen(prepared, scores)
    measures = {"acc": choices.right, "acc_norm": choices.right_by_length}
    return TaskItems(prepared.prompt_hash, _means(measures))


def written_items(
    prepared: PreparedTask, texts: Sequence[WrittenText], grades: Mapping[str, Graded]
) -> TaskItems:
    """Return each text and its grades, for the comparison with another model."""
    hits = {name: np.array(graded.right, float) for name, graded in grades.items()}
    return TaskItems(prepared.prompt_hash, _means(hits), tuple(one.text for one in texts))


def _means(measures: Mapping[str, Floats]) -> dict[str, ItemValues]:
    return {name: ItemValues.of_mean(values) for name, values in measures.items()}


class _Choices(NamedTuple):
    """The choices of a model by item; the items with a score that is no number are wrong.

    confidence: the chosen one's share of all choices' probability; not a number where no choice has
    a score.
    """

    right: Floats
    right_by_length: Floats
    mass: Floats
    confidence: Floats
    not_finite: int


def _chosen(prepared: PreparedTask, scores: Sequence[Score]) -> _Choices:
    right: list[bool] = []
    right_by_length: list[bool] = []
    mass: list[float] = []
    confidence: list[float] = []
    not_finite = first = 0
    for item in prepared.items:
        part = [score.log_prob for score in scores[first : first + item.requests]]
        first += item.requests
        log_probs = np.array(part)
        if np.isnan(log_probs).any():
            not_finite += 1
            log_probs = np.full(len(part), -np.inf)
        chosen = int(log_probs.argmax())
        is_finite = bool(np.isfinite(log_probs).any())
        right.append(is_finite and chosen == item.right)
        lengths = np.maximum(1, np.array(item.lengths))
        right_by_length.append(is_finite and int((log_probs / lengths).argmax()) == item.right)
        mass.append(float(np.exp(log_probs).sum()))
        shares = np.exp(log_probs - log_probs[chosen]) if is_finite else np.array([np.nan])
        confidence.append(float(1.0 / shares.sum()))
    hits, by_length = np.array(right, float), np.array(right_by_length, float)
    return _Choices(hits, by_length, np.array(mass), np.array(confidence), not_finite)


def _of_choices(prepared: PreparedTask, scores: Sequence[Score]) -> dict[str, Any]:
    hits, by_length, masses, confidence, not_finite = _chosen(prepared, scores)
    found: dict[str, Any] = {
        "acc": float(hits.mean()),
        "acc_stderr": stderr_of(hits),
        "acc_norm": float(by_length.mean()),
        "acc_norm_stderr": stderr_of(by_length),
    }
    known = np.isfinite(confidence)
    if known.any():
        gaps = item_gaps(confidence[known], hits[known])
        found["calibration_error"] = float(gaps.mean())
        found["calibration_error_stderr"] = stderr_of(gaps)
    if prepared.is_single:
        found["letter_mass"] = float(masses.mean())
        found["letter_mass_stderr"] = stderr_of(masses)
        follows = masses > _LEAST_MASS
        if follows.any():
            found["acc_where_mass"] = float(hits[follows].mean())
            found["acc_where_mass_stderr"] = stderr_of(hits[follows])
            found["acc_where_mass_n"] = int(follows.sum())
    if not_finite:
        found["not_finite"] = not_finite
    return found | _groups(prepared, hits, "acc")


def _groups(prepared: PreparedTask, values: Floats, name: str) -> dict[str, Any]:
    groups: dict[str, list[float]] = {}
    for item, value in zip(prepared.items, values, strict=True):
        groups.setdefault(item.group, []).append(float(value))
    if set(groups) <= {""}:
        return {}
    found = {}
    for group, own in groups.items():
        error = stderr_of(np.array(own))
        found[group] = {name: float(np.mean(own)), f"{name}_stderr": error, "n": len(own)}
    return {"groups": found}


def _sums_of_texts(prepared: PreparedTask, scores: Sequence[Score]) -> tuple[Floats, Floats]:
    """Return the log-probability of each text, and its bytes and words."""
    sums: list[float] = []
    first = 0
    for item in prepared.items:
        sums.append(sum(score.log_prob for score in scores[first : first + item.requests]))
        first += item.requests
    counted = np.array([item.counted for item in prepared.items], float).reshape(-1, 2)
    return np.array(sums), counted


def _of_texts(prepared: PreparedTask, scores: Sequence[Score]) -> dict[str, Any]:
    log_probs, counted = _sums_of_texts(prepared, scores)
    tokens = np.array([item.tokens for item in prepared.items], float)
    nats, error = _rate(-log_probs, counted[:, 0])
    found: dict[str, Any] = {
        "bits_per_byte": _number(nats / math.log(2)),
        "bits_per_byte_stderr": _number(error / math.log(2)),
    }
    for name, sizes in (("byte", counted[:, 0]), ("word", counted[:, 1]), ("token", tokens)):
        nats, error = _rate(-log_probs, sizes)
        perplexity = math.exp(nats) if nats < _MOST_NATS else math.inf
        found[f"{name}_perplexity"] = _number(perplexity)
        found[f"{name}_perplexity_stderr"] = _number(perplexity * error)
    return found | {"bytes": int(counted[:, 0].sum()), "tokens": int(tokens.sum())}


def _rate(nats: Floats, sizes: Floats) -> tuple[float, float]:
    """Return the nats per unit of the texts' sizes, and the standard error of this ratio.

    Both are no numbers where the texts have no such units.
    """
    total = float(sizes.sum())
    if not total:
        return math.nan, math.nan
    rate = float(nats.sum()) / total
    if len(nats) < 2:
        return rate, 0.0 if math.isfinite(rate) else math.nan
    # By the delta method: the residuals of the texts.
    residuals = nats - rate * sizes
    return rate, math.sqrt(len(nats)) * float(residuals.std(ddof=1)) / total


def _number(value: float) -> float | None:
    """The value; None, which JSON has, in place of an infinity and of no number."""
    return value if math.isfinite(value) else None


def _reservations(prepared: PreparedTask, found: dict[str, Any]) -> list[str]:
    """Return why a result is not to be compared with published ones; empty if nothing is known."""
    reasons = []
    count = max(1, len(prepared.items))
    if found.get("letter_mass", 1.0) < _LEAST_MASS:
        reasons.append("letter_mass")
    if prepared.shots_dropped:
        reasons.append("shots_dropped")
    if prepared.truncated > _MOST_LOSING * count:
        reasons.append("truncated")
    if prepared.is_limited:
        reasons.append("limit")
    return reasons
