"""Writers of a store, shard by shard, from any number of processes; the checks of a record."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from megatron_distill.errors import StoreError, counted
from megatron_distill.runtime.atomic_files import (
    flush_folder,
    name_flushed,
    partial_file,
    publish,
    publish_first,
    remove_stale,
    write_errors,
)
from megatron_distill.store.binary import RecordFile, RecordFileWriter, pack, token_digest
from megatron_distill.store.manifest import Manifest, ShardProof, Totals, file_sha256
from megatron_distill.store.plan import (
    MANIFEST,
    PLAN,
    CaptureSettings,
    Identity,
    Plan,
    data_name,
    repair_advice,
    shard_folder,
    sidecar_name,
)
from megatron_distill.store.records import ArraySpec, SampleRecord

__all__ = ["ShardWriter", "StoreWriter", "repeated_ids", "shape_problems", "value_problems"]


_FLAGS = 3


def shape_problems(record: SampleRecord, settings: CaptureSettings) -> Iterator[str]:
    """Arrays whose shape or dtype does not fit the settings."""
    positions = settings.sequence_length
    expected = {
        "tokens_S1": ArraySpec(record.tokens_S1, (positions + 1,), "int32"),
        "document_ids_S1": ArraySpec(record.document_ids_S1, (positions + 1,), "int32"),
        "flags_S1": ArraySpec(record.flags_S1, (positions + 1,), "uint8"),
    }
    if (record.student is None) != (settings.student_length is None):
        has = "has no" if record.student is None else "has"
        yield f"{has} tokens of a student; the plan's student_length is {settings.student_length}"
        return
    if record.student is not None:
        width = (settings.student_length or 0) + 1
        for name, values in vars(record.student).items():
            size = positions + 1 if name == "teacher_chunks_S1" else width
            dtype = "uint8" if name == "flags_W1" else "int32"
            expected[f"student.{name}"] = ArraySpec(values, (size,), dtype)
    entries = record.entries
    if type(entries) is not settings.kind:
        yield f"contains {type(entries).__name__}; the mode of the plan is {settings.mode}"
        return
    yield from entries.settings_problems(settings)
    expected |= entries.arrays(settings)
    knows = settings.is_complete
    if (record.scalars is not None) != knows:
        has = "has no" if knows else "has"
        yield f"{has} scalars; the plan is normalised over {settings.normalised_over}"
    if record.scalars is not None:
        for name, values in vars(record.scalars).items():
            expected[name] = ArraySpec(values, (positions,), "float32")
    for name, (values, shape, dtype) in expected.items():
        found = (getattr(values, "shape", None), str(getattr(values, "dtype", None)))
        if found != (shape, dtype):
            yield f"{name} is {found[1]} of shape {found[0]}; the plan asks for {dtype} {shape}"


def value_problems(record: SampleRecord, settings: CaptureSettings) -> Iterator[str]:
    """Values that no teacher can produce; the shapes must be right."""
    tokens, entries = record.tokens_S1, record.entries
    if tokens.min() < 0 or tokens.max() >= settings.vocab_size:
        yield f"a token is outside of the vocabulary of {settings.vocab_size}"
    sides = [(record.document_ids_S1, record.flags_S1)]
    if record.student is not None:
        if record.student.tokens_W1.min() < 0:
            yield "a token of the student is negative"
        sides.append((record.student.document_ids_W1, record.student.flags_W1))
    if min(documents.min() for documents, _ in sides) < -1:
        yield "a document id is below -1"
    if max(flags.max() for _, flags in sides) > _FLAGS:
        yield f"a flag is above {_FLAGS}"
    ids, _ = entries.ids()
    if ids.min() < 0 or ids.max() >= settings.vocab_size:
        yield f"an id is outside of the vocabulary of {settings.vocab_size}"
    yield from entries.value_problems(settings)
    if record.scalars is not None:
        for name, values in vars(record.scalars).items():
            if not np.isfinite(values).all():
                yield f"{name} is not finite at position {_first(~np.isfinite(values))}"


def repeated_ids(record: SampleRecord) -> Iterator[str]:
    """Ids that occur twice at a position."""
    ids, used = record.entries.ids()
    # Unused entries get distinct numbers below every id.
    ordered = np.sort(np.where(used, ids, -1 - np.arange(ids.shape[1], dtype=np.int32)), axis=1)
    wrong = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    if wrong.any():
        yield f"an id is named twice at position {_first(wrong)}"


def _first(wrong: object) -> int:
    return int(np.flatnonzero(np.asarray(wrong))[0])


class StoreWriter:
    """Begins a store, or resumes one with the same plan.

    Every process that writes shards of the store opens a writer; the caller divides the shards
    among the processes. `named` maps dotted names of differing values to names in the message, see
    `Plan.require_same`. Raises StoreError: the store was started with a different plan, or the
    folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: CaptureSettings,
        identity: Identity,
        samples: int,
        samples_per_shard: int,
        named: Callable[[str], str] | None = None,
    ) -> None:
        self.folder = folder
        self.plan = Plan(settings, identity, samples, samples_per_shard)
        with write_errors(folder):
            shard_folder(folder).mkdir(parents=True, exist_ok=True)
            flush_folder(folder)
        if not publish_first(folder / PLAN, self.plan.content):
            self.plan.require_same(Plan.load(folder), folder, named=named)

    def holes(self) -> list[int]:
        """Planned shards without a sidecar. Removes stale temporary files.

        Raises:
            StoreError: the folder cannot be written.
        """
        for folder in (self.folder, shard_folder(self.folder)):
            remove_stale(folder)
        return [shard for shard in range(self.plan.shards) if not self._sidecar(shard).exists()]

    def _sidecar(self, shard: int) -> Path:
        return shard_folder(self.folder) / sidecar_name(shard)

    def shard_bytes(self, shard: int) -> int:
        """Size of a shard's file; 0 where there is none."""
        path = shard_folder(self.folder) / data_name(shard)
        return path.stat().st_size if path.is_file() else 0

    def shard(self, shard: int) -> ShardWriter:
        """A context that adds a shard's records and commits it at its end.

        An error inside leaves no file. A shard committed in the meantime does not change.
        """
        assert 0 <= shard < self.plan.shards, f"there are {self.plan.shards} shards"
        return ShardWriter(self.folder, self.plan, shard)

    def finish(self) -> Manifest:
        """Write the manifest, which makes the store readable.

        Raises:
            StoreError: a shard is missing or has been replaced.
        """
        holes = self.holes()
        if holes:
            raise StoreError(
                f"{self.folder}: {counted(len(holes), 'shard is', 'shards are')} missing of "
                f"{self.plan.shards}, first {holes[0]}; write them before the store is finished"
            )
        proofs = []
        for shard in range(self.plan.shards):
            proof = ShardProof.load(self.folder, self.plan, shard)
            path, size = shard_folder(self.folder) / data_name(shard), self.shard_bytes(shard)
            if size != proof.file_bytes:
                raise StoreError(
                    f"{path}: {size} bytes instead of {proof.file_bytes}; "
                    f"{repair_advice(self.folder)}"
                )
            proofs.append(proof)
        manifest = Manifest(self.plan, tuple(proofs))
        publish(self.folder / MANIFEST, manifest.content)
        return manifest


class ShardWriter:
    """Writes the records of one shard in the order of their ids; a context manager."""

    def __init__(self, folder: Path, plan: Plan, shard: int) -> None:
        self._plan = plan
        self._shard = shard
        self._path = shard_folder(folder) / data_name(shard)
        self._sidecar = shard_folder(folder) / sidecar_name(shard)
        self._claim = partial_file(self._path)
        self._next = plan.first(shard)
        self._root = hashlib.blake2b(digest_size=32)
        self._totals: list[Totals] = []

    def __enter__(self) -> ShardWriter:
        self._partial, self._descriptor = self._claim.__enter__()
        try:
            self._file = RecordFileWriter(self._partial, named=self._path)
        except StoreError as error:
            self._claim.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def add(self, record: SampleRecord) -> None:
        """Append the next sample's record.

        Raises:
            StoreError: it is not the next one, does not fit the plan, has values that no teacher
                can produce, or cannot be written.
        """
        end = self._plan.first(self._shard) + self._plan.count(self._shard)
        where = f"{self._path}: sample {record.sample_id}"
        if record.sample_id != self._next or self._next == end:
            raise StoreError(f"{where}: the next sample must be {self._next} of {end}")
        settings = self._plan.settings
        for problems in (shape_problems, value_problems):
            for problem in problems(record, settings):
                raise StoreError(f"{where}: {problem}")
        self._file.write(pack(record, settings, self._plan.uid))
        self._next += 1
        self._root.update(token_digest(record.tokens_S1))
        self._totals.append(Totals.of_record(record))

    def abandon(self) -> None:
        """Remove the temporary file, instead of leaving the context."""
        try:
            self._file.abandon()
        finally:
            self._claim.__exit__(None, None, None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abandon()
            return
        try:
            self._commit()
        finally:
            self._claim.__exit__(None, None, None)

    def _commit(self) -> None:
        """Commit the shard; every step is flushed to disk before the next begins."""
        count = self._plan.count(self._shard)
        added = self._next - self._plan.first(self._shard)
        if added != count:
            self._file.abandon()
            raise StoreError(f"{self._path}: {counted(added, 'record')} written instead of {count}")
        self._file.close()
        self._require_readable(count)
        with write_errors(self._path):
            size = os.fstat(self._descriptor).st_size
        proof = ShardProof(
            shard=self._shard,
            first_sample=self._plan.first(self._shard),
            count=count,
            file_bytes=size,
            sha256=file_sha256(self._partial),
            token_root=self._root.hexdigest(),
            totals=Totals.of_all(self._totals),
        )
        if self._sidecar.exists():
            return  # another process was faster; a committed shard does not change
        with write_errors(self._path):
            name_flushed(self._partial, self._descriptor, self._path)
        publish(self._sidecar, proof.content(self._plan))

    def _require_readable(self, count: int) -> None:
        file = RecordFile(self._partial, count=count)
        try:
            file.read([count - 1])
        finally:
            file.close()
