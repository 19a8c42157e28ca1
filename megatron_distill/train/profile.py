"""Traces of chosen steps by torch's profiler, and snapshots of the CUDA allocator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from megatron_distill.log import get_logger
from megatron_distill.runtime.bridge import Bridge
from megatron_distill.runtime.heartbeats import without_signs
from megatron_distill.train.phase_timers import PhaseTimers

__all__ = ["StepProfiler", "consecutive"]

_LOGGER = get_logger(__name__)

# Allocations and releases that a snapshot shows, the newest ones.
_MEMORY_EVENTS: Final = 1_000_000


class StepProfiler:
    """Profiles steps on some ranks, and writes a Chrome trace for each sequence of steps.

    The step before a sequence warms the profiler up. Ranges of the phases of `timers` are in the
    trace. Outside of these steps, and on all other ranks, nothing is recorded. A context that
    closes the profiler.

    `ranks` are those of the launch. With a `bridge` these are ranks of teachers too.
    """

    def __init__(
        self,
        output: Path,
        *,
        steps: Sequence[int],
        ranks: Sequence[int],
        memory_snapshot: bool,
        shapes: bool,
        stacks: bool,
        timers: PhaseTimers,
        device: torch.device,
        bridge: Bridge | None = None,
    ) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        if bridge is not None:
            rank, world = bridge.rank, bridge.roles.size
        self._folder = output / "profile"
        self._rank = rank
        self._sequences = list(consecutive(steps)) if rank in ranks else []
        self._memory = memory_snapshot and device.type == "cuda"
        self._shapes, self._stacks = shapes, stacks
        self._timers = timers
        self._device = device
        self._bridge = bridge
        self._running: profile | None = None
        self._first = self._last = 0  # of the sequence that is running
        missing = sorted(other for other in ranks if other >= world)
        if rank == 0 and steps and missing:
            _LOGGER.warning("profile.ranks = %s: this run has no ranks %s", list(ranks), missing)
        if rank == 0 and steps and memory_snapshot and device.type != "cuda":
            _LOGGER.warning(
                "profile.memory_snapshot = true has no effect on a CPU: a snapshot is of CUDA's "
                "allocator"
            )

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def before_step(self, step: int) -> None:
        """Start the profiler, if it is due with this step."""
        if self._running is not None:
            return
        for first, last in self._sequences:
            if first - 1 <= step <= first:  # the first step of a start has none before it
                self._start(first, last, warmup=first - step)
                return

    def after_step(self, step: int) -> None:
        """End a step of the profiler; write the files of a sequence after its last step."""
        if self._running is None:
            return
        if step < self._last:
            self._running.step()
            return
        with self._unwatched():
            self._running.step()  # writes the trace
            self._stop(self._running)

    def close(self) -> None:
        """Stop the profiler; the files of an unfinished sequence have the steps done."""
        if self._running is not None:
            with self._unwatched():
                self._stop(self._running)

    def _stop(self, running: profile) -> None:
        running.stop()
        self._running = None
        self._timers.annotates = False
        if self._memory:
            self._write_snapshot(self._path("memory.pickle"))

    def _unwatched(self) -> AbstractContextManager[None]:
        """A block that writes: files of a large step may keep the interpreter for many seconds."""
        bridge = self._bridge
        return nullcontext() if bridge is None else without_signs(bridge.store, bridge.rank)

    def _start(self, first: int, last: int, *, warmup: int) -> None:
        self._first, self._last = first, last
        actions = [ProfilerAction.WARMUP] * warmup + [ProfilerAction.RECORD] * (last - first)
        actions.append(ProfilerAction.RECORD_AND_SAVE)
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(
            activities=activities,
            schedule=lambda number: dict(enumerate(actions)).get(number, ProfilerAction.NONE),
            on_trace_ready=self._write_trace,
            record_shapes=self._shapes,
            with_stack=self._stacks,
        )
        self._running.start()
        self._timers.annotates = True
        if self._memory:
            # Documented by torch, underscore or not.
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)  # noqa: SLF001

    def _path(self, kind: str) -> Path:
        last = "" if self._first == self._last else f"-{self._last:07d}"
        return self._folder / f"step_{self._first:07d}{last}_rank_{self._rank:04d}.{kind}"

    def _write_trace(self, done: profile) -> None:
        path = self._path("json.gz")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            done.export_chrome_trace(str(path))
        except OSError as error:
            self._warn_of_unwritten(path, error)
        else:
            _LOGGER.info("profile: %s", path)

    def _write_snapshot(self, path: Path) -> None:
        try:
            torch.cuda.memory._dump_snapshot(str(path))  # noqa: SLF001
        except OSError as error:
            self._warn_of_unwritten(path, error)
        else:
            _LOGGER.info("memory snapshot: %s", path)
        torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001

    def _warn_of_unwritten(self, path: Path, error: OSError) -> None:
        # A rank alone cannot end the run, and training needs no trace.
        _LOGGER.warning("profile: cannot write %s: %s", path, error.strerror)


def consecutive(steps: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last step of each sequence of consecutive steps, in order."""
    ordered = sorted(set(steps))
    ends = [step for step in ordered if step + 1 not in ordered]
    starts = [step for step in ordered if step - 1 not in ordered]
    yield from zip(starts, ends, strict=True)
