"""Seconds of the phases of a step: of the device on CUDA, else of the host."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch.profiler import record_function

from megatron_distill.runtime.main_thread import Activity, Progress
from megatron_distill.signals import OnDemand, Signal, Signals, WithFeatures

DATA = "data"
TEACHER = "teacher"
FORWARD = "forward"
LOSS = "loss"
BACKWARD = "backward"
COMMUNICATION = "communication"
OPTIMIZER = "optimizer"
OTHER = "other"
PHASES: Final = (DATA, TEACHER, FORWARD, LOSS, BACKWARD, COMMUNICATION, OPTIMIZER, OTHER)

# Of a teacher on ranks of its own. It waits for the student's command; an answer is a top-k, or the
# count of values that are not finite.
WAITING = "waiting"
ANSWER = "answer"
TEACHER_PHASES: Final = (WAITING, DATA, FORWARD, ANSWER, COMMUNICATION, OTHER)


@dataclass(frozen=True)
class StepTimes:
    """Changes of phase in a step that has ended: on the host, or as events of a device."""

    phases: Sequence[str]
    changes: Sequence[tuple[str, float]]
    events: Sequence[tuple[str, torch.cuda.Event]]

    @property
    def is_known(self) -> bool:
        """Whether the device has done the step's work; the host does not wait for it."""
        return not self.events or self.events[-1][1].query()

    def wait(self) -> None:
        """Let the host wait until they are known."""
        if self.events:
            self.events[-1][1].synchronize()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase; they are known."""
        found = dict.fromkeys(self.phases, 0.0)
        for (phase, start), (_, end) in pairwise(self.changes):
            found[phase] += end - start
        for (phase, began), (_, ended) in pairwise(self.events):
            found[phase] += began.elapsed_time(ended) / 1000.0
        return found


class PhaseTimers:
    """Divides the time of a step into phases, which add up to the step.

    A phase within another one interrupts it: a live teacher that runs in the student's forward step
    counts as the teacher's alone. Time outside of all phases is `OTHER`. Nothing is measured
    outside of a step. On CUDA an event on the current stream marks every change of phase, because
    the host only launches the work. Recording does not wait for the device.

    `progress` notes every change of phase, for the watch of steps that hang.

    Attributes:
        annotates: whether phases are ranges of torch's profiler too.
    """

    def __init__(
        self,
        device: torch.device,
        phases: Sequence[str] = PHASES,
        *,
        progress: Progress | None = None,
    ) -> None:
        self.annotates = False
        self._progress = progress or Progress()
        self._names = tuple(phases)
        self._on_cuda = device.type == "cuda"
        self._runs = False
        self._phases: list[str] = []
        self._ranges: list[record_function | None] = []
        self._changes: list[tuple[str, float]] = []
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._unused: list[torch.cuda.Event] = []

    def start_step(self, step: int | None = None) -> None:
        """Begin a step; one that an error has left unfinished is forgotten.

        `step`: its number; None: it is not known yet.
        """
        self._progress.start_step(step)
        self._phases.clear()
        self._ranges.clear()
        self._unused += [event for _, event in self._events]
        self._changes, self._events = [], []
        self._runs = True
        self._change(OTHER)

    def end_step(self) -> dict[str, float]:
        """End the step; return the seconds of each phase, in the order of `phases`.

        On CUDA it waits for the step's last event: call after the step's own synchronisation.
        """
        times = self.close_step()
        times.wait()
        return self.read(times)

    def close_step(self) -> StepTimes:
        """End the step; `read` has its seconds once they are known, without a wait."""
        assert not self._phases, f"{self._phases[-1]} has not ended"
        self._change(OTHER)
        self._progress.end_step()
        self._runs = False
        closed = StepTimes(self._names, self._changes, self._events)
        self._changes, self._events = [], []
        return closed

    def read(self, times: StepTimes) -> dict[str, float]:
        """Return `StepTimes.seconds`, once for each step: its events are used again."""
        seconds = times.seconds()
        self._unused += [event for _, event in times.events]
        return seconds

    def enter(self, phase: str) -> None:
        """Begin a phase of the step."""
        if self._runs:
            self._phases.append(phase)
            self._change(phase)
            self._ranges.append(record_function(phase) if self.annotates else None)
            if (entered := self._ranges[-1]) is not None:
                entered.__enter__()

    def leave(self) -> None:
        """End the phase begun last, and continue the one around it."""
        if self._runs:
            if (left := self._ranges.pop()) is not None:
                left.__exit__(None, None, None)
            self._phases.pop()
            self._change(self._phases[-1] if self._phases else OTHER)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as a phase; after an error the step does not end."""
        self.enter(name)
        yield
        self.leave()

    def passing(self) -> AbstractContextManager[None]:
        """Return a block of passes outside of steps, noted as such and not measured."""
        return self._progress.passing()

    def of_teacher(self, signals: Signals) -> Signals:
        """Return the same signals; the time to compute those taken counts as the teacher's."""

        def timed(micro_batch: int) -> Signal | WithFeatures | None:
            with self.phase(TEACHER):
                return signals[micro_batch]

        return OnDemand(len(signals), timed)

    def _change(self, phase: str) -> None:
        """Count the time from now on as a phase's."""
        self._progress.change(Activity.READS if phase == DATA else Activity.COMPUTES)
        if self._on_cuda:
            event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((phase, event))
        else:
            self._changes.append((phase, time.perf_counter()))


# Timers of Megatron-Core's schedules. The rest of a schedule waits for other stages and sums
# gradients over ranks, as far as the backward pass does not hide it.
_OF_MEGATRON: Final[Mapping[str, str]] = {
    "forward-backward": COMMUNICATION,
    "forward-compute": FORWARD,
    "backward-compute": BACKWARD,
}


@dataclass(frozen=True)
class MegatronTimers:
    """Phases in the form of `megatron.core.timers.Timers`, for the configuration of a model."""

    timers: PhaseTimers

    def __call__(self, name: str, log_level: int | None = None) -> _MegatronTimer:  # noqa: ARG002
        """Return the timer of this name; one of an unknown phase does nothing."""
        return _MegatronTimer(self.timers, _OF_MEGATRON.get(name))


@dataclass(frozen=True)
class _MegatronTimer:
    timers: PhaseTimers
    phase: str | None

    def start(self, barrier: bool = False) -> None:  # noqa: ARG002 - ranks are not held up
        if self.phase is not None:
            self.timers.enter(self.phase)

    def stop(self, barrier: bool = False) -> None:  # noqa: ARG002
        if self.phase is not None:
            self.timers.leave()
