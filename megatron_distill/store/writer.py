"""Writers of a store, shard by shard, from any number of processes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from megatron_distill.errors import StoreError, counted
from megatron_distill.runtime.atomic_files import (
    flush_folder,
    partial_file,
    publish,
    publish_first,
    remove_stale,
    write_errors,
)
from megatron_distill.store.binary import pack, token_digest
from megatron_distill.store.checks import shape_problems, value_problems
from megatron_distill.store.container import RecordFile, RecordFileWriter
from megatron_distill.store.manifest import Manifest, ShardProof, Totals, file_sha256
from megatron_distill.store.plan import (
    MANIFEST,
    PLAN,
    CaptureSettings,
    Identity,
    Plan,
    data_name,
    shard_folder,
    sidecar_name,
)
from megatron_distill.store.records import SampleRecord
from megatron_distill.store.sealed import repair_advice

__all__ = ["ShardWriter", "StoreWriter"]


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
                f"{self.folder}: {len(holes)} of {self.plan.shards} shards are missing, first "
                f"{holes[0]}; write them before the store is finished"
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
            os.fsync(self._descriptor)
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
            self._partial.replace(self._path)
            flush_folder(self._path.parent)
        publish(self._sidecar, proof.content(self._plan))

    def _require_readable(self, count: int) -> None:
        file = RecordFile(self._partial, count=count)
        try:
            file.read([count - 1])
        finally:
            file.close()
