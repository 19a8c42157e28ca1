"""The progress of a capture."""

from __future__ import annotations

import io
import logging

import pytest

from megatron_distill import log
from megatron_distill.train.progress import CaptureProgress, Done, Work
from tests.support.terminals import Clock

WORK = Work(shards=10, shards_before=4, samples=600, sequence_length=50)


@pytest.fixture
def lines() -> list[str]:
    found: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger = log.configure(0, stream=io.StringIO())
    logger.addHandler(Kept())
    return found


def play(stream: io.StringIO, seconds: float) -> None:
    """Six steps of 100 samples, a shard each but for the first."""
    clock = Clock()
    progress = CaptureProgress(stream, WORK, samples_per_shard=100, clock=clock)
    for step in range(6):
        clock.now += seconds
        progress.update(Done(max(0, step - 1), 100 * step, 600_000 * max(0, step - 1)))
    clock.now += seconds
    progress.close(Done(6, 600, 3_600_000))


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end(lines: list[str]) -> None:
    stream = io.StringIO()
    play(stream, seconds=20.0)
    assert stream.getvalue() == ""
    assert lines == [
        "samples 100/600  shards 4/10",
        "samples 300/600  shards 6/10  250 tok/s  120.0 bytes/token  eta 1:00",
        "samples 500/600  shards 8/10  250 tok/s  120.0 bytes/token  eta 0:20",
        "samples 600/600  shards 10/10  250 tok/s  120.0 bytes/token  in 2:20",
    ]
