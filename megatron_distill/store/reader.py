"""Readers of stores by sample id; every record is verified before use."""

from __future__ import annotations

import glob
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Final

from megatron_distill.errors import StoreError, counted
from megatron_distill.store.binary import RecordFile, decode, decode_tokens, require_record
from megatron_distill.store.manifest import Manifest
from megatron_distill.store.plan import (
    PLAN,
    CaptureSettings,
    Identity,
    Plan,
    Support,
    data_name,
    repair_advice,
    shard_folder,
)
from megatron_distill.store.records import Header, SampleRecord, SampleTokens

__all__ = ["StoreReader", "StoreSet", "find_stores"]


_OPEN_FILES: Final = 32


class StoreReader:
    """A complete store, for one process and thread; a forked child reopens its files.

    Attributes:
        folder: path of the store.
        plan: capture settings, identity and shards.
        manifest: checksums of its shards.
    """

    def __init__(self, folder: Path, plan: Plan, manifest: Manifest) -> None:
        self.folder = folder
        self.plan = plan
        self.manifest = manifest
        self._files: OrderedDict[int, RecordFile] = OrderedDict()
        self._process = os.getpid()

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        teacher: str | None = None,
        tokenizer: str | None = None,
        dataset: str | None = None,
        vocab_size: int | None = None,
        sequence_length: int | None = None,
    ) -> StoreReader:
        """Open a store and compare its identity with the given parts.

        Raises:
            StoreError: incomplete, of another version, damaged, or not of that identity.
        """
        plan = Plan.load(folder)
        wanted: dict[str, tuple[object, object, str]] = {
            "teacher": (teacher, plan.identity.teacher, "name the teacher it was captured from"),
            "tokenizer": (tokenizer, plan.identity.tokenizer, "use its tokenizer"),
            "dataset": (dataset, plan.identity.dataset, "use the data it was captured on"),
            "vocab_size": (vocab_size, plan.settings.vocab_size, "use its tokenizer"),
            "sequence_length": (
                sequence_length,
                plan.settings.sequence_length,
                "set the sequence length to the store's",
            ),
        }
        for name, (expected, found, change) in wanted.items():
            if expected is not None and expected != found:
                raise StoreError(
                    f"{folder}: its {name} is {found}, this run's {expected}; {change}, or capture "
                    "a store for this run"
                )
        manifest = Manifest.load(folder, plan)
        manifest.require_sidecars(folder)
        return cls(folder, plan, manifest)

    @property
    def settings(self) -> CaptureSettings:
        """The capture settings."""
        return self.plan.settings

    @property
    def identity(self) -> Identity:
        """The teacher and the data of the store."""
        return self.plan.identity

    @property
    def samples(self) -> int:
        """Number of samples; their ids count from 0."""
        return self.plan.samples

    def require(
        self,
        *,
        support: Support | None = None,
        k: int | None = None,
        temperatures: Collection[float] = (),
    ) -> None:
        """Raise StoreError unless the records support this support, k, and these temperatures."""
        settings = self.settings
        if support is not None and support not in settings.supports:
            can = ", ".join(settings.supports) or "terms on sampled ids"
            lacks = f" (it lacks {', '.join(settings.lacks)})" if settings.lacks else ""
            raise StoreError(
                f"{self.folder}: cannot serve support {support}{lacks}; it serves {can}: change the"
                " term, or capture a store that can"
            )
        if k is not None and k < 1:
            raise StoreError(f"{self.folder}: top_k is {k}; set it to at least 1")
        if k is not None and (not settings.kind.is_ranked or k > settings.k):
            raise StoreError(
                f"{self.folder}: contains {settings.k} {settings.kind.adjective} ids per position,"
                f" not a top-{k}; use a smaller top_k, or capture a store with a larger k"
            )
        # Ratios of probabilities are known at every temperature, but normalisers only at some.
        if support != "renormalized":
            for temperature in temperatures:
                if temperature not in (1.0, *settings.temperatures):
                    raise StoreError(
                        f"{self.folder}: not captured at temperature {temperature:g}, only at "
                        f"{', '.join(f'{t:g}' for t in (1.0, *settings.temperatures))}; change the "
                        "temperature, or capture a store with it"
                    )

    def packed(self, sample_id: int) -> bytes:
        """A sample's record as bytes for `unpack`, checked. Raises StoreError."""
        ((content, _),) = self._checked([sample_id])
        return content

    def packed_with_tokens(self, sample_id: int) -> tuple[bytes, SampleTokens]:
        """A sample's record as bytes for `unpack`, checked, and its tokens. Raises StoreError."""
        ((content, header),) = self._checked([sample_id])
        return content, decode_tokens(content, header)

    def read(self, sample_ids: Sequence[int], k: int | None = None) -> list[SampleRecord]:
        """Records of samples in the order of `sample_ids`, each with the first k ids.

        Raises:
            StoreError: a shard or a record is missing, damaged or not of this store, or k is larger
                than the store's.
        """
        if k is not None:
            self.require(k=k)
        return [decode(content, header, k) for content, header in self._checked(sample_ids)]

    def _checked(self, sample_ids: Sequence[int]) -> list[tuple[bytes, Header]]:
        by_shard: dict[int, list[int]] = {}
        for place, sample_id in enumerate(sample_ids):
            if not 0 <= sample_id < self.samples:
                raise StoreError(
                    f"{self.folder}: no sample {sample_id}; the store contains 0 to "
                    f"{self.samples - 1}"
                )
            by_shard.setdefault(sample_id // self.plan.samples_per_shard, []).append(place)
        found: dict[int, tuple[bytes, Header]] = {}
        for shard, places in by_shard.items():
            wanted = [sample_ids[place] for place in places]
            for place, content, sample_id in zip(
                places, self._from_shard(shard, wanted), wanted, strict=True
            ):
                found[place] = content, self._header(content, sample_id)
        return [found[place] for place in range(len(sample_ids))]

    def _from_shard(self, shard: int, sample_ids: Sequence[int]) -> list[bytes]:
        file, first = self._file(shard, wanted_by=sample_ids[0]), self.plan.first(shard)
        try:
            return file.read([sample_id - first for sample_id in sample_ids])
        except StoreError as error:
            if len(sample_ids) == 1:
                text = "damaged: its bytes do not match their checksums"
                raise self._damaged(self.place(sample_ids[0]), text) from error
        # The joint read failed: reading one by one finds the damaged sample.
        return [content for one in sample_ids for content in self._from_shard(shard, [one])]

    def _header(self, content: bytes, sample_id: int) -> Header:
        try:
            return require_record(
                content,
                capture_uid=self.plan.uid,
                sample_id=sample_id,
                settings=self.settings,
            )
        except StoreError as error:
            raise self._damaged(self.place(sample_id), str(error)) from error

    def _damaged(self, where: str | Path, text: str) -> StoreError:
        """The error with place, cause and advice."""
        return StoreError(f"{where}: {text}; {repair_advice(self.folder)}")

    def place(self, sample_id: int) -> str:
        """A sample's location for messages: its shard's file and its id."""
        return f"{self._path(sample_id // self.plan.samples_per_shard)}: sample {sample_id}"

    def _path(self, shard: int) -> Path:
        return shard_folder(self.folder) / data_name(shard)

    def _file(self, shard: int, *, wanted_by: int) -> RecordFile:
        if os.getpid() != self._process:
            self._files.clear()
            self._process = os.getpid()
        if shard in self._files:
            self._files.move_to_end(shard)
            return self._files[shard]
        path, proof = self._path(shard), self.manifest.shards[shard]
        if path.is_file() and path.stat().st_size != proof.file_bytes:
            text = f"{path.stat().st_size} bytes instead of {proof.file_bytes}"
            raise self._damaged(path, f"{text} (sample {wanted_by})")
        try:
            file = self._files[shard] = RecordFile(path, count=proof.count)
        except StoreError as error:
            text = str(error).removeprefix(f"{path}: ")
            raise self._damaged(path, f"{text} (sample {wanted_by})") from error
        if len(self._files) > _OPEN_FILES:
            self._files.popitem(last=False)[1].close()
        return file

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        while self._files:
            self._files.popitem()[1].close()

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def find_stores(patterns: Sequence[str]) -> list[Path]:
    """Store folders of paths and globs, sorted by name. Raises StoreError: one matches none."""
    found: set[str] = set()
    for pattern in patterns:
        path = str(Path(pattern).expanduser())
        names = [path] if Path(path).exists() else glob.glob(path)  # noqa: PTH207
        stores = [name for name in names if (Path(name) / PLAN).is_file()]
        if not stores:
            raise StoreError(f"{pattern}: no teacher store found; correct the path")
        found.update(stores)
    if not found:
        raise StoreError("no teacher store is named; give at least one path")
    return [Path(name) for name in sorted(found)]


class StoreSet:
    """Samples of all stores under one numbering: the first store's, then the second's, and so on.

    Raises StoreError: the stores differ in teacher, tokenizer or capture settings.
    """

    def __init__(self, stores: Sequence[StoreReader]) -> None:
        assert stores, "a set of stores has at least one"
        self.stores = tuple(stores)
        self._ends = list(accumulate(store.samples for store in stores))
        first = stores[0]
        for store in stores[1:]:
            for name, one, other in (
                ("teacher", first.identity.teacher, store.identity.teacher),
                ("tokenizer", first.identity.tokenizer, store.identity.tokenizer),
                (
                    "student_tokenizer",
                    first.identity.student_tokenizer,
                    store.identity.student_tokenizer,
                ),
                ("capture", first.settings, store.settings),
            ):
                if one != other:
                    raise StoreError(
                        f"{store.folder}: its {name} is {other}, that of {first.folder} {one}; read"
                        " together only stores that were captured alike"
                    )

    @classmethod
    def open(
        cls,
        patterns: Sequence[str],
        *,
        teacher: str | None = None,
        tokenizer: str | None = None,
        vocab_size: int | None = None,
        sequence_length: int | None = None,
    ) -> StoreSet:
        """Open the stores of paths and globs. Raises StoreError as `StoreReader.open`."""
        return cls(
            [
                StoreReader.open(
                    folder,
                    teacher=teacher,
                    tokenizer=tokenizer,
                    vocab_size=vocab_size,
                    sequence_length=sequence_length,
                )
                for folder in find_stores(patterns)
            ]
        )

    @property
    def samples(self) -> int:
        """Samples of all stores."""
        return self._ends[-1]

    def _locate(self, number: int) -> tuple[int, int]:
        if not 0 <= number < self.samples:
            raise StoreError(
                f"no sample {number}: the stores contain {counted(self.samples, 'sample')}"
            )
        store = bisect_right(self._ends, number)
        return store, number - (self._ends[store - 1] if store else 0)

    def packed(self, number: int) -> bytes:
        """A sample's record as bytes for `unpack`; its sample id is the number within its store."""
        store, sample_id = self._locate(number)
        return self.stores[store].packed(sample_id)

    def packed_with_tokens(self, number: int) -> tuple[bytes, SampleTokens]:
        """As `packed`, and the sample's tokens."""
        store, sample_id = self._locate(number)
        return self.stores[store].packed_with_tokens(sample_id)

    def place(self, number: int) -> str:
        """A sample's location for messages: its shard's file and its id there."""
        store, sample_id = self._locate(number)
        return self.stores[store].place(sample_id)

    def read(self, numbers: Sequence[int], k: int | None = None) -> list[SampleRecord]:
        """Records in the order of `numbers`; their sample ids are numbers of the set."""
        by_store: dict[int, list[tuple[int, int]]] = {}
        for place, number in enumerate(numbers):
            store, sample_id = self._locate(number)
            by_store.setdefault(store, []).append((place, sample_id))
        found: dict[int, SampleRecord] = {}
        for store, wanted in by_store.items():
            records = self.stores[store].read([sample_id for _, sample_id in wanted], k)
            for (place, _), record in zip(wanted, records, strict=True):
                found[place] = replace(record, sample_id=numbers[place])
        return [found[place] for place in range(len(numbers))]

    def close(self) -> None:
        """Close all files."""
        for store in self.stores:
            store.close()
