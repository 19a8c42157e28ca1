"""The documents of a store's samples: the tokens of which text each record has.

A sealed file of each shard lists them, beside its records. With it a run finds the records of a
document by its content, whatever the plan that packed the store's samples.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_distill.errors import StoreError
from megatron_distill.runtime.atomic_files import publish, publish_first
from megatron_distill.store.plan import (
    FORMAT,
    VERSION,
    Plan,
    read_bytes,
    require_version,
    sealed,
    shard_folder,
    sidecar_name,
    unsealed,
)
from megatron_distill.store.reader import StoreSet
from megatron_distill.store.records import Integers

__all__ = [
    "ONE_PLAN",
    "DocumentIndex",
    "documents_name",
    "has_documents",
    "load_documents",
    "pieces_of_sample",
    "list_advice",
    "publish_documents",
    "runs_of_sample",
    "unlisted_shards",
]

# A piece: consecutive tokens of one document in one record. `sample` counts in the shard, `place`
# is that of its first token in the record, `first` the number of that token in the document.
PIECE: Final = np.dtype(
    [("digest", ">u8"), ("sample", "<u4"), ("place", "<u4"), ("first", "<u4"), ("count", "<u4")]
)

# The same with samples numbered over all stores.
_NUMBERED: Final = np.dtype(
    [("digest", "<u8"), ("sample", "<i4"), ("place", "<i4"), ("first", "<i4"), ("count", "<i4")]
)

ONE_PLAN: Final = "capture a store with capture.aligned=true"

Pieces = NDArray[Any]
"""Structured arrays of `PIECE`."""


def documents_name(shard: int) -> str:
    """File name of the documents of a shard."""
    return f"documents-{shard:06d}.json"


def list_advice(store: Path) -> str:
    """The advice at the end of a message about a list: the records do not depend on it."""
    return (
        f"restore the file from a copy, or start the capture of {store} again, which rewrites the "
        "list from the texts without the teacher"
    )


def runs_of_sample(
    document_ids_S1: Integers, documents: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first place and the number of tokens of each document of a sample.

    Documents are numbered from 0, and padding is last. documents: at least so many are counted.
    """
    counts = np.bincount(document_ids_S1[document_ids_S1 >= 0], minlength=documents)
    return np.cumsum(counts) - counts, counts


def pieces_of_sample(
    sample: int, document_ids_S1: Integers, parts: Sequence[tuple[bytes, int]]
) -> Pieces:
    """The pieces of a sample: of each document its digest and the number of its first token.

    `sample`: its number in the shard. See `runs_of_sample`.
    """
    places, counts = runs_of_sample(document_ids_S1, len(parts))
    assert len(counts) == len(parts), "each document of a sample has a digest"
    found = np.zeros(len(parts), PIECE)
    digests = [int.from_bytes(digest, "big") for digest, _ in parts]
    found["digest"] = np.array(digests, np.uint64)
    found["sample"] = sample
    found["place"] = places
    found["first"] = [first for _, first in parts]
    found["count"] = counts
    return found


def publish_documents(folder: Path, plan: Plan, shard: int, pieces: Sequence[Pieces]) -> None:
    """Write the documents of a shard's samples; an equal file stays. Raises StoreError."""
    path = shard_folder(folder) / documents_name(shard)
    content = sealed(
        {
            "format": FORMAT,
            "version": VERSION,
            "capture_uid": plan.uid.hex(),
            "shard": shard,
            "documents": base64.b64encode(b"".join(one.tobytes() for one in pieces)).decode(
                "ascii"
            ),
        }
    )
    if not publish_first(path, content) and read_bytes(path) != content:
        publish(path, content)


def has_documents(folder: Path) -> bool:
    """Whether any shard of a store lists its documents."""
    return any(shard_folder(folder).glob("documents-*.json"))


def unlisted_shards(folder: Path, plan: Plan) -> list[int]:
    """Existing shards whose list is missing or damaged, ascending."""
    return [
        shard
        for shard in range(plan.shards)
        if (shard_folder(folder) / sidecar_name(shard)).exists()
        and not _is_listed(folder, plan, shard)
    ]


def _is_listed(folder: Path, plan: Plan, shard: int) -> bool:
    try:
        load_documents(folder, plan, shard)
    except StoreError:
        return False
    return True


def load_documents(folder: Path, plan: Plan, shard: int) -> Pieces:
    """Read the documents of a shard. Raises StoreError: missing, damaged, or of another one."""
    path, advice = shard_folder(folder) / documents_name(shard), list_advice(folder)
    value = unsealed(path, advice=advice)
    require_version(path, value)
    if (value.get("capture_uid"), value.get("shard")) != (plan.uid.hex(), shard):
        raise StoreError(
            f"{path}: belongs to shard {value.get('shard')} of capture {value.get('capture_uid')}, "
            f"not to shard {shard} of {plan.uid.hex()}; {advice}"
        )
    try:
        content = base64.b64decode(value["documents"], validate=True)
        pieces = np.frombuffer(content, PIECE)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: not in the format of this release ({error})") from error
    width = plan.settings.sequence_length + 1
    ends = pieces["place"].astype(np.int64) + pieces["count"]
    if len(pieces) and (pieces["sample"].max() >= plan.count(shard) or ends.max() > width):
        raise StoreError(f"{path}: names tokens that the shard does not have; {advice}")
    return pieces


class DocumentIndex:
    """Where the tokens of each document are in the records of stores.

    Samples are numbered as in the `StoreSet`. Raises StoreError: a store does not list its
    documents, or a list is damaged. `remedy`: the advice in the place of lists. Memory: 32 bytes
    for each different piece of a text.

    Attributes:
        pieces: number of different pieces.
    """

    def __init__(self, stores: StoreSet, *, remedy: str = ONE_PLAN) -> None:
        tables: list[Pieces] = []
        before = 0
        self._folders = ", ".join(str(store.folder) for store in stores.stores)
        for store in stores.stores:
            if not has_documents(store.folder):
                raise StoreError(
                    f"{store.folder}: has no lists of documents, by which samples that are packed "
                    "for two tokenizers find records. Start the same capture again, which writes "
                    f"them without running the teacher, or {remedy}"
                )
            for shard in range(store.plan.shards):
                pieces = load_documents(store.folder, store.plan, shard).astype(_NUMBERED)
                pieces["sample"] += before + store.plan.first(shard)
                tables.append(pieces)
            before += store.samples
        found = _different(np.concatenate(tables))
        # Of equal tokens the ones painted last are used: those with the longest context, and of
        # these the first in the store.
        order = np.lexsort((-found["sample"], -found["first"], found["digest"]))
        self._pieces = found[order]
        self._digests = np.ascontiguousarray(self._pieces["digest"])
        self.pieces = len(self._pieces)

    def places(self, digest: bytes, count: int) -> Integers | None:
        """Record and position that predict each of a document's tokens: int32 [count, 2].

        -1 for a token that no record predicts, such as a document's first one. None: no record has
        a token of the document. Raises StoreError: a record has tokens beyond `count`.
        """
        number = np.uint64(int.from_bytes(digest, "big"))
        begin = int(np.searchsorted(self._digests, number))
        end = int(np.searchsorted(self._digests, number, side="right"))
        if begin == end:
            return None
        found = np.full((count, 2), -1, np.int32)
        for _, sample, place, first, size in self._pieces[begin:end].tolist():
            if first + size > count:
                raise StoreError(
                    f"{self._folders}: has {first + size} tokens of a document of which the "
                    f"teacher's tokenizer gives {count} in this run; set data.add_bos as in the "
                    "capture"
                )
            labels = slice(first + 1, first + size)
            found[labels, 0] = sample
            found[labels, 1] = np.arange(place, place + size - 1)
        return found


def _different(pieces: Pieces) -> Pieces:
    """One of each set of pieces with the same tokens of a text: the first in the stores.

    A text may occur very often, in a corpus or in several epochs.
    """
    names = ("digest", "first", "count")
    ordered = pieces[np.lexsort([pieces[name] for name in ("sample", "count", "first", "digest")])]
    is_new = np.ones(len(ordered), np.bool_)
    is_new[1:] = np.any([ordered[name][1:] != ordered[name][:-1] for name in names], axis=0)
    return ordered[is_new]
