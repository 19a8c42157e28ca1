"""The capture loop: take the samples of missing shards, run the teacher, write its signals."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from megatron_distill.data.loader import StepLoader
from megatron_distill.errors import StoreError
from megatron_distill.launching.grace import LongestStep
from megatron_distill.runtime.batch import StepBatches
from megatron_distill.runtime.collectives import agree, sum_over
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.segments import copied
from megatron_distill.runtime.termination import TerminationRequest
from megatron_distill.store import SampleRecord, ShardWriter, StoreWriter
from megatron_distill.train.capture.order import CaptureOrder, HoleSource, StreamPositions
from megatron_distill.train.capture.positions import PositionCapture, build_records
from megatron_distill.train.progress import CaptureProgress, Done
from megatron_distill.train.teachers.live import OnlineTeacher


@dataclass(frozen=True)
class CaptureParts:
    """Inputs of a capture.

    Attributes:
        order: assigns samples to shards and rows.
        teacher: model whose outputs are stored.
        loader: loads the samples in that order.
        positions: computes the stored values of each position.
        filler: on the ranks that write, one of each replica.
        source: sample source of the loader, on the rank that reads.
        stream_positions: storage of the stream's states.
        progress: on the rank that shows it.
        longest_step: on the first rank.
        groups: of this rank.
    """

    order: CaptureOrder
    teacher: OnlineTeacher
    loader: StepLoader
    positions: PositionCapture
    filler: ShardFiller | None
    source: HoleSource | None
    stream_positions: StreamPositions
    progress: CaptureProgress | None
    longest_step: LongestStep | None
    groups: Groups
    device: torch.device


def fill_holes(parts: CaptureParts, termination: TerminationRequest) -> bool:
    """Capture and write every hole; return True at the end, False after a request to stop.

    After a request the current step is finished; the next start captures uncommitted samples.
    Raises the error of any rank on all ranks.

    Collective: per step the loader's broadcasts, the teacher's forward pass, those of the capture,
    and over the world one all-reduce of 40 bytes.
    """
    done = Done()
    try:
        for step in range(1, parts.order.steps + 1):
            is_asked, done = _exchange(parts, is_asked=termination.received)
            if is_asked:
                return False
            if parts.longest_step is not None and step > 1:
                parts.longest_step.end_step()
            if parts.progress is not None:
                parts.progress.update(done)
            _capture_step(parts, parts.loader.take(step))
        if parts.filler is not None:
            parts.filler.flush()
        _, done = _exchange(parts, is_asked=False)
        return True
    finally:
        if parts.progress is not None:
            parts.progress.close(done)


def _capture_step(parts: CaptureParts, batches: StepBatches) -> None:
    """Run the teacher on a step's micro-batches and submit its records."""
    # A teacher with a tokenizer of its own reads its side of each micro-batch, and nothing else.
    own = [batch.teacher or batch for batch in batches.micro_batches]
    signals = parts.teacher.signals(own)
    samples = [] if parts.filler is None else parts.loader.taken_samples()
    for index, (batch, signal) in enumerate(zip(own, signals, strict=True)):
        if signal is None:
            continue
        found = parts.positions(signal.logit_source(), batch).whole(batch, parts.groups.context)
        if parts.filler is not None:
            settings = parts.positions.settings
            parts.filler.submit(build_records(samples[index], found.begin_copy(), settings))


def _exchange(parts: CaptureParts, *, is_asked: bool) -> tuple[bool, Done]:
    """Exchange errors, requests to stop and the progress between all ranks.

    Collective: world, one all-reduce of 40 bytes.
    """
    filler = parts.filler
    failure = None if filler is None else filler.failure
    failure = failure or _save_positions(parts)
    counts = (0, 0, 0) if filler is None else (filler.shards, filler.samples, filler.file_bytes)
    status = torch.tensor([failure is not None, is_asked, *counts], dtype=torch.int64)
    total = sum_over(copied(status, parts.device), parts.groups.world)
    failures, asked, *done = total.tolist()
    if failures:
        agree(failure)
    return bool(asked), Done(*done)


def _save_positions(parts: CaptureParts) -> StoreError | None:
    """Save the position of the stream; return the error, if any."""
    if parts.source is None:
        return None
    passed = dict(parts.source.passed.popleft() for _ in range(len(parts.source.passed)))
    try:
        parts.stream_positions.save(passed)
    except StoreError as error:
        return error
    return None


class ShardFiller:
    """Takes records in the order of their ids, whole shards of them, and commits shard by shard.

    A write error is stored in `failure` and ends the writing. It is not raised here, since the
    ranks must raise it together.

    Attributes:
        failure: the error, or None.
        shards: committed so far.
        samples: written so far, of the open shard too.
        file_bytes: of the committed shards.
    """

    def __init__(self, store: StoreWriter, *, most_waiting: int) -> None:
        """`most_waiting`: maximum number of queued batches of records before `submit` waits."""
        self._store = store
        self._most_waiting = most_waiting
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._waiting: deque[Future[None]] = deque()
        self._open: ShardWriter | None = None
        self.failure: StoreError | None = None
        self.shards = 0
        self.samples = 0
        self.file_bytes = 0

    def submit(self, records: Iterable[SampleRecord]) -> None:
        """Queue records to be built and written; waits while the queue is full."""
        while len(self._waiting) >= self._most_waiting:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._write, records))

    def flush(self) -> None:
        """Wait until all submitted records are written."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Drop the queued records, and discard an open shard."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()
        self._drop()

    def _write(self, records: Iterable[SampleRecord]) -> None:
        if self.failure is not None:
            return
        try:
            for record in records:
                self._add(record)
        except StoreError as error:
            self.failure = error
            self._drop()

    def _add(self, record: SampleRecord) -> None:
        plan = self._store.plan
        shard = record.sample_id // plan.samples_per_shard
        if self._open is None:
            self._open = self._store.shard(shard).__enter__()
        self._open.add(record)
        self.samples += 1
        if record.sample_id + 1 == plan.first(shard) + plan.count(shard):
            ended, self._open = self._open, None
            ended.__exit__(None, None, None)
            self.shards += 1
            self.file_bytes += self._store.shard_bytes(shard)

    def _drop(self) -> None:
        if self._open is not None:
            self._open.abandon()
            self._open = None
