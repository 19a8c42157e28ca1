"""The best step of a run by one of its metrics, whose checkpoint is kept."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_distill.errors import CheckpointError
from megatron_distill.train.checkpoint.description import USE_ANOTHER

__all__ = ["BEST_FILE", "Best", "BestRule"]

BEST_FILE = "best.json"


@dataclass(frozen=True)
class Best:
    """The step with the best value so far."""

    step: int
    metric: str
    value: float

    @classmethod
    def of(cls, content: Mapping[str, Any] | None, place: object) -> Best | None:
        """Read the entry of a description, None if it has none; raises CheckpointError."""
        if not content:
            return None
        try:
            return cls(int(content["step"]), str(content["metric"]), float(content["value"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{place}: `best` in its description is damaged ({error!r}); {USE_ANOTHER}"
            ) from error


@dataclass(frozen=True)
class BestRule:
    """Which value is the best: the largest (`max`) or the smallest (`min`) of a metric."""

    metric: str
    mode: str

    def better(self, step: int, values: Mapping[str, float], best: Best | None) -> Best | None:
        """Return the step as the best one if its value beats the best so far, else None.

        A value that is missing or no number beats nothing, and a best value of another metric
        counts for nothing.
        """
        value = values.get(self.metric, math.nan)
        if math.isnan(value):
            return None
        if best is not None and best.metric == self.metric:
            is_better = value > best.value if self.mode == "max" else value < best.value
            if not is_better:
                return None
        return Best(step, self.metric, value)

    def missing_measure(self, tasks: Collection[str], given: Collection[str]) -> str:
        """Return a warning where the metric is of one of these tasks and was not given, else "".

        given: measures that there are, as TASK.MEASURE.
        """
        name, _, _ = self.metric.partition(".")
        if name not in tasks or self.metric in given:
            return ""
        remedy = f"; give one of {', '.join(given)}" if given else ""
        return (
            f"checkpoint.keep_best.metric = {self.metric!r} is not in the results of "
            f"{name}, so that no checkpoint is kept as the best{remedy}"
        )

    def missing_figure(self, validation: Collection[str]) -> str:
        """Return a warning where the metric is a validation figure that a run lacks, else ""."""
        if not self.metric.startswith("validation.") or self.metric in validation:
            return ""
        return (
            f"checkpoint.keep_best.metric = {self.metric!r} is not a figure of this run's "
            f"validation, so that no checkpoint is kept as the best; "
            f"give one of {', '.join(validation)}"
        )
