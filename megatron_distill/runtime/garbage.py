"""Garbage collection between steps, on all ranks after the same ones."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from types import TracebackType

__all__ = ["StepGarbage"]


@dataclass
class StepGarbage:
    """A block without automatic collections; `after_step` collects every `interval` steps.

    An automatic collection stops one rank at a time, and with it all ranks that wait for it.
    """

    interval: int = 50
    _was_enabled: bool = False

    def __enter__(self) -> StepGarbage:
        self._was_enabled = gc.isenabled()
        gc.disable()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        if self._was_enabled:
            gc.enable()

    def after_step(self, step: int) -> None:
        """Collect, if the step is one of those on which all ranks do."""
        if step % self.interval == 0:
            gc.collect()
