"""The seconds of a start, from the process to its first step: minutes are often lost there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import psutil

__all__ = ["StartClock"]


@dataclass(frozen=True)
class StartClock:
    """The times of a start, in seconds since the epoch.

    Attributes:
        joined: when the ranks had met, after the imports of torch; None: they were no new ones.
        opened: when models, data and checkpoint were there.
    """

    joined: float | None
    opened: float = field(default_factory=time.time)

    def line(self, *, load_seconds: float, step_seconds: float) -> str | None:
        """Return a line about the first step, which has just ended; None: of ranks from before.

        load_seconds: of the checkpoint, within `opened`.
        """
        if self.joined is None:
            return None
        began = psutil.Process().create_time()
        parts = [
            f"{self.joined - began:.1f} s until the ranks met",
            f"{self.opened - self.joined - load_seconds:.1f} s for models and data",
            f"{step_seconds:.1f} s for the step",
        ]
        if load_seconds:
            parts.insert(2, f"{load_seconds:.1f} s for the checkpoint")
        between = time.time() - self.opened - step_seconds
        if between >= 0.1:
            parts.insert(-1, f"{between:.1f} s before the step")
        return f"first step {time.time() - began:.1f} s after the start: {', '.join(parts)}"
