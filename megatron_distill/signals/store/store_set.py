"""Several stores of one teacher as one, in the order of their names."""

from __future__ import annotations

import glob
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from megatron_distill.errors import StoreError
from megatron_distill.signals.store.plan import PLAN
from megatron_distill.signals.store.reader import StoreReader
from megatron_distill.signals.store.records import SampleRecord, SampleTokens

__all__ = ["StoreSet", "find_stores"]


def find_stores(patterns: Sequence[str]) -> list[Path]:
    """The folders that paths and globs name, by name. Raises StoreError: one names no store."""
    found: set[str] = set()
    for pattern in patterns:
        path = str(Path(pattern).expanduser())
        names = [path] if Path(path).exists() else glob.glob(path)  # noqa: PTH207
        stores = [name for name in names if (Path(name) / PLAN).is_file()]
        if not stores:
            raise StoreError(f"{pattern}: names no teacher store; correct the path")
        found.update(stores)
    if not found:
        raise StoreError("no teacher store is named; give at least one path")
    return [Path(name) for name in sorted(found)]


class StoreSet:
    """Samples of all stores under one numbering: the first store's, then the second's, and so on.

    Raises StoreError: the stores are not of one teacher, tokenizer and capture settings.
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
        """Open the stores that paths and globs name. Raises StoreError as `StoreReader.open`."""
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
            raise StoreError(f"no sample {number}: the stores hold {self.samples}")
        store = bisect_right(self._ends, number)
        return store, number - (self._ends[store - 1] if store else 0)

    def packed(self, number: int) -> bytes:
        """A sample's record as bytes for `unpack`; its sample id is that within its store."""
        store, sample_id = self._locate(number)
        return self.stores[store].packed(sample_id)

    def packed_with_tokens(self, number: int) -> tuple[bytes, SampleTokens]:
        """As `packed`, and the sample's tokens."""
        store, sample_id = self._locate(number)
        return self.stores[store].packed_with_tokens(sample_id)

    def place(self, number: int) -> str:
        """Where a sample is, for messages: its shard's file and its id there."""
        store, sample_id = self._locate(number)
        return self.stores[store].place(sample_id)

    def read(self, numbers: Sequence[int], k: int | None = None) -> list[SampleRecord]:
        """Records in the order asked for, their sample ids being numbers of the set."""
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
