"""Seconds of the phases of a step: of the device on CUDA, else of the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_distill.signals import OnDemand, Signal, Signals, WithFeatures

TEACHER = "teacher"


class PhaseTimers:
    """Sums the durations of named phases until they are read.

    On CUDA a phase is measured between two events on the current stream, because the host only
    launches the work. Recording does not wait for the device; `read` waits for the last event, so
    read after the step's own synchronisation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a phase."""
        if self._device.type == "cuda":
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started.record()
            yield
            ended.record()
            self._events.append((name, started, ended))
        else:
            begin = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - begin)

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase since the last read."""
        for name, started, ended in self._events:
            ended.synchronize()
            self._add(name, started.elapsed_time(ended) / 1000.0)
        self._events.clear()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def of_teacher(self, signals: Signals) -> Signals:
        """Return the same signals; the time to compute those taken counts as the teacher's."""

        def timed(micro_batch: int) -> Signal | WithFeatures | None:
            with self.phase(TEACHER):
                return signals[micro_batch]

        return OnDemand(len(signals), timed)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
