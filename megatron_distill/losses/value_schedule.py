"""A number that changes during a run: a weight, a temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["ScheduleKind", "ValueSchedule"]

ScheduleKind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class ValueSchedule:
    """A value that goes from ``start`` to ``end``.

    It is ``start`` until ``start_step`` optimizer steps are done and ``end`` from ``start_step +
    steps`` on. Between, ``linear`` is a straight line and ``cosine`` half a period of a cosine, as
    learning rates have it. ``constant`` is constant on both sides of ``start_step``, where it
    jumps.

    Raises:
        ValueError: the number of steps does not go with the kind.
    """

    start: float
    end: float
    kind: ScheduleKind = "constant"
    steps: int = 0
    start_step: int = 0

    def __post_init__(self) -> None:
        if (self.kind == "constant") != (self.steps == 0):
            raise ValueError(f"a {self.kind} schedule cannot take {self.steps} steps")

    @classmethod
    def unchanging(cls, value: float) -> ValueSchedule:
        """The value itself, always."""
        return cls(value, value)

    def at(self, steps_done: int) -> float:
        """The value of the step after so many optimizer steps; both ends are exact."""
        done = steps_done - self.start_step
        if done >= self.steps:
            return self.end if done >= 0 else self.start
        if done <= 0:
            return self.start
        share = done / self.steps
        if self.kind == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return self.start + share * (self.end - self.start)
