"""Packs and writes a replica's records in a thread, while the teacher computes the next ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from megatron_distill.errors import StoreError
from megatron_distill.store import SampleRecord, ShardWriter, StoreWriter


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
