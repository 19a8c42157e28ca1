"""Differences of two models on the same items, with intervals of a paired bootstrap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["ItemValues", "TaskItems", "differences"]

Floats = NDArray[np.float64]

_RESAMPLES: Final = 2000
_LEVEL: Final = 0.95
_BLOCK: Final = 1 << 20  # numbers in one block of resamples


@dataclass(frozen=True)
class ItemValues:
    """A measure of one model: the sum of values over the sum of weights, both by item.

    The weights of a mean are one; those of bits per byte are the bytes.
    """

    values: Floats
    weights: Floats

    @classmethod
    def of_mean(cls, values: Floats) -> ItemValues:
        """The items of a mean."""
        return cls(values, np.ones(len(values)))


@dataclass(frozen=True)
class TaskItems:
    """The items of a task: its measures that are ratios of sums, by name.

    prompt_hash: digest of the prompts and answers; equal ones are the same items. texts: that the
    model wrote, of generation.
    """

    prompt_hash: str
    measures: Mapping[str, ItemValues]
    texts: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return lists and texts alone."""
        measures = {
            name: {"values": one.values.tolist(), "weights": one.weights.tolist()}
            for name, one in self.measures.items()
        }
        written = {"texts": list(self.texts)} if self.texts else {}
        return {"prompt_hash": self.prompt_hash, "measures": measures, **written}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> TaskItems:
        """Return the items of `as_dict`; raises LookupError, TypeError or ValueError."""
        measures = {
            name: ItemValues(np.array(one["values"], float), np.array(one["weights"], float))
            for name, one in found["measures"].items()
        }
        if any(one.values.shape != one.weights.shape for one in measures.values()):
            raise ValueError("values and weights have different lengths")
        return cls(found["prompt_hash"], measures, tuple(found.get("texts", ())))


def differences(
    first: Mapping[str, TaskItems], second: Mapping[str, TaskItems], *, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Return first minus second by task and measure, for the tasks that both have alike.

    `low` and `high` bound the middle 95 % of the differences over resampled items. `stderr` is
    their standard deviation (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
    chapters 6 and 13). Each resample has the same items of both models. Tasks with other prompts
    are left out.
    """
    found = {}
    for task in first:
        one, other = first[task], second.get(task)
        if other is None or one.prompt_hash != other.prompt_hash:
            continue
        found[task] = {
            name: _difference(one.measures[name], other.measures[name], seed)
            for name in one.measures
            if name in other.measures
        }
    return found


def _difference(first: ItemValues, second: ItemValues, seed: int) -> dict[str, Any]:
    columns_4n = np.stack([first.values, first.weights, second.values, second.weights])
    count = columns_4n.shape[1]
    # Drawing items with replacement is a multinomial draw of the numbers of equal items.
    alike_4u, sizes_u = np.unique(columns_4n, axis=1, return_counts=True)
    generator = np.random.default_rng(seed)
    rows = max(1, _BLOCK // len(sizes_u))
    sums = []
    for start in range(0, _RESAMPLES, rows):
        drawn_ru = generator.multinomial(count, sizes_u / count, size=min(rows, _RESAMPLES - start))
        sums.append(alike_4u @ drawn_ru.T)
    resampled = _ratios(np.concatenate(sums, 1))
    low, high = np.quantile(resampled, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return {
        "difference": float(_ratios(columns_4n.sum(1))),
        "stderr": float(resampled.std(ddof=1)),
        "low": float(low),
        "high": float(high),
        "n": count,
    }


def _ratios(sums_4r: Floats) -> Floats:
    """Return the first ratio minus the second."""
    values, weights, other_values, other_weights = sums_4r
    return values / np.maximum(weights, 1) - other_values / np.maximum(other_weights, 1)
