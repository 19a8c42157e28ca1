"""The progress of a capture: shards and samples, rate, bytes per token; and its result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from megatron_distill.log import get_logger
from megatron_distill.runtime.progress import (
    Clock,
    Field,
    ProgressReporter,
    duration,
    short_count,
    size,
)
from megatron_distill.store import Manifest

_LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class Work:
    """A job's work: its shards, the shards found at the start, samples to capture."""

    shards: int
    shards_before: int
    samples: int
    sequence_length: int


@dataclass(frozen=True)
class Done:
    """Progress of this start so far, over all replicas."""

    shards: int = 0
    samples: int = 0
    file_bytes: int = 0


class CaptureProgress:
    """Shows a capture on a bar of `stream`, or in a log line every 30 seconds."""

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
        self._reporter = ProgressReporter(
            stream,
            label="samples",
            total=work.samples,
            write_line=lambda line: _LOGGER.info("%s", line),
            clock=clock,
        )

    @property
    def stream(self) -> TextIO:
        """The stream for other log lines, so that they appear above a bar."""
        return self._reporter.stream

    def update(self, done: Done) -> None:
        """Show the progress of the capture."""
        self._reporter.update(done.samples, lambda: list(self._fields(done)))

    def close(self, done: Done) -> None:
        """Remove the bar and write the last line."""
        self._reporter.close()
        self._reporter.count(done.samples)
        status = self._reporter.status(list(self._fields(done)))
        _LOGGER.info("%s  in %s", status, duration(self._reporter.elapsed))

    def _fields(self, done: Done) -> Iterator[Field]:
        work = self._work
        yield Field(f"shards {work.shards_before + done.shards}/{work.shards}")
        rate = self._reporter.per_second
        if rate is not None:
            yield Field(f"{short_count(rate * work.sequence_length)} tok/s")
        if done.shards:
            # The last shard may be short; this estimate ignores it.
            tokens = min(done.shards * self._samples_per_shard, work.samples) * work.sequence_length
            yield Field(f"{done.file_bytes / tokens:.1f} bytes/token")


def summary(folder: str, manifest: Manifest) -> str:
    """Return a one-line summary of a finished store."""
    totals, tokens = manifest.totals, manifest.tokens
    parts = [
        f"{folder}: {short_count(tokens)} tokens",
        size(manifest.file_bytes),
        f"{manifest.file_bytes / tokens:.1f} bytes/token",
    ]
    if totals.positions:
        if manifest.plan.settings.kind.is_ranked:
            parts.append(f"kept mass {totals.kept_mass / totals.positions:.4f}")
        parts.append(f"teacher's ce {-totals.label_log_prob / totals.positions:.4f}")
        parts.append(f"entropy {totals.entropy / totals.positions:.4f}")
    return ", ".join(parts)
