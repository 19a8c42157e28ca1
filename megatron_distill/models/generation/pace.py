"""When the host looks at what the device computed, so that neither waits for the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from megatron_distill.runtime.collectives import begin_highest
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.host_copy import HostCopy

__all__ = ["PACES", "Questions", "StopCheckPace"]

# All stages take part in the answer.
_STEPS_BETWEEN_QUESTIONS = 16


class StopCheckPace(NamedTuple):
    """The steps with a look at the drawn ids.

    Every `interval` steps their copy to the host begins, and `delay` steps later, fewer than an
    interval, it is read. By then it is there, and the device has a step to do meanwhile.
    """

    interval: int
    delay: int

    @property
    def spare(self) -> int:
        """Most steps that a row makes after its end before the host sees it."""
        return self.interval + self.delay

    def begins(self, step: int) -> bool:
        """Whether a copy begins before this step."""
        return step % self.interval == 0

    def reads(self, step: int) -> bool:
        """Whether the last copy is read before this step."""
        return step % self.interval == self.delay


PACES: Final = {"cpu": StopCheckPace(1, 0), "cuda": StopCheckPace(16, 1)}


@dataclass
class Questions:
    """Asks all ranks whether to stop: of each step as many times on every rank.

    Attributes:
        requested: once true on a rank, it stays so; None: nothing is asked.
        delay: steps from a question to the look at its answer.
        is_stopped: whether `requested` was true on a rank.
    """

    requested: Callable[[], bool] | None
    groups: Groups
    device: torch.device
    delay: int
    is_stopped: bool = False
    _asked: HostCopy | None = None

    def before_step(self, step: int) -> None:
        """Ask, or read the answer, where it is time; the rank is in its batch."""
        turn = step % _STEPS_BETWEEN_QUESTIONS
        if turn == 0:
            self._begin(is_running=True)
        if turn == self.delay:
            self.finish()

    def ask(self) -> bool:
        """Ask outside of a batch; returns whether another rank is in its own."""
        self._begin(is_running=False)
        return self.finish()

    def finish(self) -> bool:
        """Read an answer that has not been read; returns whether a rank was in its batch."""
        if self._asked is None:
            return False
        (answer,) = self._asked.read()
        stop, running = answer.tolist()
        self._asked = None
        self.is_stopped = bool(stop)
        return bool(running)

    def _begin(self, *, is_running: bool) -> None:
        if self.requested is None:
            return
        stop = self.is_stopped or self.requested()
        self._asked = begin_highest(stop, is_running, device=self.device, group=self.groups.world)
