"""How far a capture has come: a live bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, Progress, TextColumn

from megatron_distill.log import get_logger
from megatron_distill.store import Manifest
from megatron_distill.train.progress import duration, short_count, size

_LOGGER = get_logger(__name__)
_LINE_SECONDS = 30.0

Clock = Callable[[], float]


@dataclass(frozen=True)
class Work:
    """What a job has to do: shards of its own, those that were there before, samples to capture."""

    shards: int
    shards_before: int
    samples: int
    sequence_length: int


@dataclass(frozen=True)
class Done:
    """What this start has done so far, over all replicas."""

    shards: int = 0
    samples: int = 0
    file_bytes: int = 0


class CaptureProgress:
    """Says how far it is: `stream` where that is a terminal, else the log, now and then.

    Whatever else writes to the terminal goes through `stream`, which puts it above the bar.
    """

    def __init__(
        self,
        stream: TextIO,
        work: Work,
        *,
        samples_per_shard: int,
        clock: Clock = time.monotonic,
    ) -> None:
        self._work = work
        self._samples_per_shard = samples_per_shard
        self._clock = clock
        self._started = self._said = clock()
        self._first: tuple[float, int] | None = None
        self._bar: Progress | None = None
        self.stream = stream
        if stream.isatty():
            console = Console(file=stream)
            self.stream = cast(TextIO, FileProxy(console, console.file))
            # No refresh thread: it would take the interpreter lock from the teacher.
            self._bar = Progress(
                BarColumn(bar_width=None),
                TextColumn("{task.description}"),
                console=console,
                auto_refresh=False,
                expand=True,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=work.samples)
            self._bar.start()
            self._bar.refresh()

    def update(self, done: Done) -> None:
        """Move the bar, or write a line if one is due."""
        now = self._clock()
        # The first step is left out of the pace: it allocates, compiles and fills caches.
        if self._first is None and done.samples:
            self._first = (now, done.samples)
        if self._bar is not None:
            self._bar.update(self._task, completed=done.samples, description=self._status(done))
            self._bar.refresh()
        elif now - self._said >= _LINE_SECONDS:
            self._said = now
            _LOGGER.info("%s", self._status(done))

    def close(self, done: Done) -> None:
        """Take the bar away, and write the last line."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elapsed = duration(self._clock() - self._started)
        _LOGGER.info("%s, %s", self._status(done), elapsed)

    def _status(self, done: Done) -> str:
        work = self._work
        parts = [
            f"shards {work.shards_before + done.shards}/{work.shards}",
            f"samples {done.samples}/{work.samples}",
        ]
        rate = self._samples_per_second(done)
        if rate is not None:
            parts.append(f"{short_count(rate * work.sequence_length)} tokens/s")
        if done.shards:
            # The last shard may be short, which is not worth asking.
            tokens = min(done.shards * self._samples_per_shard, work.samples) * work.sequence_length
            parts.append(f"{done.file_bytes / tokens:.1f} bytes/token")
        if rate:
            parts.append(f"eta {duration((work.samples - done.samples) / rate)}")
        return ", ".join(parts)

    def _samples_per_second(self, done: Done) -> float | None:
        if self._first is None:
            return None
        (then, samples), now = self._first, self._clock()
        return (done.samples - samples) / (now - then) if now > then else None


def summary(folder: str, manifest: Manifest) -> str:
    """Return what a finished store is, in one line."""
    totals, tokens = manifest.totals, manifest.tokens
    parts = [
        f"{folder}: {short_count(tokens)} tokens",
        size(manifest.file_bytes),
        f"{manifest.file_bytes / tokens:.1f} bytes/token",
    ]
    if totals.positions:
        if manifest.plan.settings.mode == "top_k":
            parts.append(f"kept mass {totals.kept_mass / totals.positions:.4f}")
        parts.append(f"teacher's ce {-totals.label_log_prob / totals.positions:.4f}")
        parts.append(f"entropy {totals.entropy / totals.positions:.4f}")
    return ", ".join(parts)
