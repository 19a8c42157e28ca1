"""Phases and traces of the steps that a rank of a teacher serves; the student's log has them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Protocol

from megatron_distill.train.phase_report import PhaseNotes
from megatron_distill.train.phase_timers import WAITING, PhaseTimers, StepTimes
from megatron_distill.train.profile import StepProfiler

__all__ = ["SENDING", "SLOT", "SenderSeconds", "ServedSteps"]

# Of the thread that sends answers beside the model: for a free slot, and with the rows.
SLOT: Final = "slot"
SENDING: Final = "sending"


class SenderSeconds(Protocol):
    """The thread that sends answers."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds with answers of steps since its start, by what it did."""
        ...


class ServedSteps:
    """Times the steps that the student asks for, and profiles some.

    A step begins with the wait for its command, after the round before. Held-out rounds are not
    measured. On CUDA the times of a step are read once its work is done. The host waits for that
    after `last_step` alone, which no command follows before the student looks for the times.
    """

    def __init__(
        self,
        timers: PhaseTimers,
        profiler: StepProfiler,
        notes: PhaseNotes,
        sender: SenderSeconds | None,
        *,
        last_step: int,
    ) -> None:
        self.timers = timers
        self._profiler = profiler
        self._notes = notes
        self._sender = sender
        self._last_step = last_step
        self._told: dict[str, float] = dict.fromkeys((SLOT, SENDING), 0.0)
        self._unread: deque[tuple[int, StepTimes]] = deque()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The wait for a command, with which a step begins."""
        self.timers.start_step()
        with self.timers.phase(WAITING):
            yield
        self._note_done()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A step, after its command; after an error it does not end."""
        self._profiler.before_step(number)
        yield
        times = self.timers.close_step()
        self._unread.append((number, times))
        self._profiler.after_step(number)
        if number == self._last_step:
            times.wait()
        self._note_done()

    def _note_done(self) -> None:
        """Note the steps whose work the device has done."""
        while self._unread and self._unread[0][1].is_known:
            number, times = self._unread.popleft()
            phases = {name: 1000.0 * time for name, time in self.timers.read(times).items()}
            self._notes.after_step(number, phases, self._milliseconds_of_sender())

    def _milliseconds_of_sender(self) -> dict[str, float]:
        """Return the milliseconds of the thread that sends answers since the last call."""
        now = self._told if self._sender is None else dict(self._sender.seconds)
        found = {name: 1000.0 * (time - self._told[name]) for name, time in now.items()}
        self._told = now
        return found
