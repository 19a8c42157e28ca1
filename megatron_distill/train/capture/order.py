"""The assignment of samples to rows of a capture's steps, and a source in that order.

Also the saved states of the training stream at the beginnings of shards, during a capture.

A start after a kill continues at the first missing shard, without tokenising the samples before
it again.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron_distill.data.samples import Sample, SampleSource, State, untrained_like
from megatron_distill.errors import StoreError
from megatron_distill.runtime.atomic_files import publish_first, remove_stale
from megatron_distill.store.plan import sealed, unsealed


@dataclass(frozen=True)
class CaptureOrder:
    """Missing shards dealt out to replicas: replica d writes holes d, d + D, d + 2 D and so on.

    Its rows are its shards' samples one after another, so that it fills one shard at a time. Rows
    of a step are counted as in `BatchLayout`.

    Attributes:
        holes: shards to write, ascending.
        samples: of the whole store.
        samples_per_shard: the last shard may have fewer.
        replicas: data-parallel size D.
        micro_batch_size: samples in one forward pass of a replica.
        micro_batches: of a step.
    """

    holes: tuple[int, ...]
    samples: int
    samples_per_shard: int
    replicas: int
    micro_batch_size: int
    micro_batches: int

    @property
    def global_batch_size(self) -> int:
        """Rows of a step over all replicas."""
        return self.replicas * self.micro_batch_size * self.micro_batches

    @property
    def steps(self) -> int:
        """Steps until every hole is filled."""
        rows = self.micro_batch_size * self.micro_batches
        return max((-(-self._rows(d) // rows) for d in range(self.replicas)), default=0)

    @property
    def wanted_samples(self) -> int:
        """Samples of all holes."""
        return sum(self._count(shard) for shard in self.holes)

    def _count(self, shard: int) -> int:
        return min(self.samples_per_shard, self.samples - shard * self.samples_per_shard)

    def _rows(self, replica: int) -> int:
        return sum(self._count(shard) for shard in self.holes[replica :: self.replicas])

    def sample(self, row: int) -> int | None:
        """Id of the sample in a row counted over all steps; None: no sample is left for it."""
        step, in_step = divmod(row, self.global_batch_size)
        micro_batch, in_micro_batch = divmod(in_step, self.micro_batch_size * self.replicas)
        replica, in_replica = divmod(in_micro_batch, self.micro_batch_size)
        of_replica = (step * self.micro_batches + micro_batch) * self.micro_batch_size + in_replica
        # Only the last hole can be a short shard, so that it is the last of its replica too.
        turn, offset = divmod(of_replica, self.samples_per_shard)
        place = replica + turn * self.replicas
        if place >= len(self.holes):
            return None
        sample = self.holes[place] * self.samples_per_shard + offset
        return sample if sample < self.samples else None


class HoleSource:
    """A training stream's samples in the order of a capture; a `SampleSource`.

    Sample n of the stream is sample n of the store. Samples without a row are read and skipped,
    unless the stream's state at the beginning of a later shard is known. Rows without a sample are
    untrained samples with the id -1. Memory: one shard's tokens for each replica. `list_documents`
    is called with each hole and its samples before the last one of them is returned. So no shard is
    written without it. None: their documents are not listed.

    Attributes:
        passed: new states of the stream at the beginnings of passed shards, as (shard, state);
            the caller removes them when it saves them.
    """

    def __init__(
        self,
        stream: SampleSource,
        order: CaptureOrder,
        *,
        known: Mapping[int, State],
        list_documents: Callable[[int, Sequence[Sample]], None] | None = None,
    ) -> None:
        self._stream = stream
        self._list_documents = list_documents
        self._of_shard: list[Sample] = []  # of the hole that is being read
        self._order = order
        self._known = dict(known)
        self._last: Sample | None = None
        self._left = deque(order.holes)
        self._position = 0  # the stream's next sample
        self._given = 0
        self._held: dict[int, Sample] = {}
        self.passed: deque[tuple[int, State]] = deque()

    def next_sample(self) -> Sample:
        """The sample of the next row. Raises DataError, and StoreError of `list_documents`."""
        wanted = self._order.sample(self._given)
        self._given += 1
        if wanted is None:
            assert self._last is not None, "the first row of a capture has a sample"
            return untrained_like(self._last, -1)
        while wanted not in self._held:
            self._read()
        self._last = sample = self._held.pop(wanted)
        # One more per sample given; else every turn of all replicas would begin with a wait.
        ahead = (self._order.replicas - 1) * self._order.samples_per_shard
        if self._left and len(self._held) < ahead:
            self._read()
        return sample

    def _read(self) -> None:
        """Read the next sample of a hole."""
        size = self._order.samples_per_shard
        first = self._left[0] * size
        if self._position < first:
            self._go_to(self._left[0])
        sample = self._advance()
        self._held[sample.sample_id] = sample
        is_whole = self._position == min(first + size, self._order.samples)
        if self._list_documents is not None:
            self._of_shard.append(sample)
            if is_whole:
                self._list_documents(self._left[0], self._of_shard)
                self._of_shard = []
        if is_whole:
            self._left.popleft()

    def _go_to(self, shard: int) -> None:
        size = self._order.samples_per_shard
        nearest = max((n for n in self._known if n <= shard), default=0)
        if nearest * size > self._position:
            self._stream.load_state_dict(self._known[nearest])
            self._position = nearest * size
        while self._position < shard * size:
            self._advance()

    def _advance(self) -> Sample:
        shard, offset = divmod(self._position, self._order.samples_per_shard)
        if offset == 0 and shard > 0 and shard not in self._known:
            self._known[shard] = self._stream.state_dict()
            self.passed.append((shard, self._known[shard]))
        sample = self._stream.next_sample()
        assert sample.sample_id == self._position, (sample.sample_id, self._position)
        self._position += 1
        return sample

    def state_dict(self) -> State:
        """Number of rows given; a restart resumes from the store itself, by its holes."""
        return {"given": self._given}

    def load_state_dict(self, state: State) -> None:
        """Do nothing: only the state before the first read is ever loaded."""
        assert state == self.state_dict(), "a capture goes on from the holes of its store"


_FORMAT: Final = "megatron-distill place in a training stream"
_NAME: Final = re.compile(r"stream-(\d{6,})\.json")
_ADVICE: Final = "remove it, and the stream is read from an earlier place"


def working_folder(store: Path) -> Path:
    """Return the folder of a capture's resume state; a finished store has none."""
    return store / "capture"


def lock_of_job(store: Path, job: int) -> tuple[Path, str]:
    """Return the file that one of a store's jobs locks, and the job's name for messages."""
    return working_folder(store) / f"job-{job}.lock", f"store.path={store} store.job={job}"


class StreamPositions:
    """States of the stream by the shard that begins there, one sealed file each.

    They belong to the plan with the same uid. A lost file costs only time.
    """

    def __init__(self, folder: Path, uid: bytes) -> None:
        self._folder = folder
        self._uid = uid.hex()

    def load(self) -> dict[int, State]:
        """Every saved state. Raises StoreError: damaged, or of another store."""
        remove_stale(self._folder)
        found: dict[int, State] = {}
        for path in sorted(self._folder.glob("stream-*.json")):
            name = _NAME.fullmatch(path.name)
            value = unsealed(path, advice=_ADVICE)
            if name is None or value.get("format") != _FORMAT or value.get("shard") != int(name[1]):
                raise StoreError(f"{path}: not the content for this file name; {_ADVICE}")
            if value.get("capture_uid") != self._uid:
                raise StoreError(
                    f"{path}: belongs to another store, {value.get('capture_uid')}; {_ADVICE}"
                )
            found[int(name[1])] = value["state"]
        return found

    def save(self, states: Mapping[int, State]) -> None:
        """Save states. Raises StoreError: they cannot be written."""
        for shard, state in states.items():
            if not self._folder.is_dir():
                return  # another job has finished the store
            content = {"format": _FORMAT, "capture_uid": self._uid, "shard": shard, "state": state}
            publish_first(self._folder / f"stream-{shard:06d}.json", sealed(content))
