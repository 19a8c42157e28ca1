"""Aligned documents on disk: found by their text, written as a run reads them for the first time.

A corpus may be larger than a run ever reads, so that nothing is prepared before the first step. The
documents are in segments, each a folder of arrays that are mapped into memory. A segment appears
when it is complete, and never changes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_distill.data.aligned.documents import AlignedDocument, Side, UnknownTokens
from megatron_distill.data.chat.cache import mapped_array
from megatron_distill.data.samples import NO_CHUNK
from megatron_distill.data.text.documents import Document
from megatron_distill.data.tokenizers.protocol import Tokenizer
from megatron_distill.errors import DataError
from megatron_distill.log import get_logger
from megatron_distill.runtime.atomic_files import whole_folder, write_flushed

__all__ = ["CachedDocument", "DocumentCache", "cache_folder", "document_key"]

_LOG = get_logger(__name__)
# With the rules of spans and chunks; raised when they change, so that older caches are not found.
VERSION: Final = 1
SEGMENT_BYTES: Final = 64 << 20  # held in memory; a run that ends within an epoch drops them
_MANIFEST: Final = "manifest.json"
_KEY_BYTES: Final = 16
# `start` and the numbers of tokens are of the arrays `tokens` and `steps`, the student's first. A
# document without chunks has -1 tokens of the student and so many bytes of `reasons`.
_ENTRY: Final = np.dtype(
    [
        ("key", "<u8"),
        ("start", "<i8"),
        ("student", "<i4"),
        ("teacher", "<i4"),
        ("unknown", "<i4", (4,)),
    ]
)
_REFUSED: Final = -1
_FILES: Final[dict[str, np.dtype[Any]]] = {
    "keys": np.dtype("<u8"),  # first halves, ascending; the second halves are in the entries
    "entries": _ENTRY,
    "tokens": np.dtype("<i4"),
    "steps": np.dtype("u1"),
    "reasons": np.dtype("u1"),
}
_OUTSIDE, _BEGINS, _GOES_ON = range(3)  # of a token: in no chunk, or its place in one


@dataclass(frozen=True)
class CachedDocument:
    """A text's tokens of the student and behind them the teacher's, or the reason against chunks.

    steps_n: uint8, whether each token begins a chunk, goes on in it, or is in none. student: number
    of the student's tokens. The arrays may be mapped files.
    """

    tokens_n: NDArray[np.int32]
    steps_n: NDArray[np.uint8]
    student: int
    unknown: UnknownTokens
    reason: str | None = None

    @classmethod
    def of(cls, found: AlignedDocument | DataError) -> CachedDocument:
        """From the result of a `PairEncoder`."""
        if isinstance(found, DataError):
            none = np.zeros(0, np.uint8)
            return cls(none.view(np.int32), none, _REFUSED, UnknownTokens(), str(found))
        sides = found.student, found.teacher
        return cls(
            np.concatenate([side.tokens_n for side in sides]),
            np.concatenate([_steps(side.chunks_n) for side in sides]),
            len(found.student.tokens_n),
            found.unknown,
        )

    def found(self, *, is_end: bool) -> AlignedDocument | DataError:
        """The result of the encoder; is_end: as it was given, whether a document ends here."""
        if self.reason is not None:
            return DataError(self.reason)
        of_student, of_teacher = slice(None, self.student), slice(self.student, None)
        return AlignedDocument(
            self._side(of_student, is_end=is_end),
            self._side(of_teacher, is_end=is_end),
            unknown=self.unknown,
        )

    def _side(self, part: slice, *, is_end: bool) -> Side:
        chunks_n = _chunks(np.asarray(self.steps_n[part]))
        side = Side.of_chunks(np.array(self.tokens_n[part]), chunks_n)
        if is_end and len(side.cuts) > 2:
            side.cuts[-2] = len(chunks_n) - 1  # the end follows all of the text's tokens
        return side

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        reason = "" if self.reason is None else self.reason
        own = _FILES["keys"].itemsize + _ENTRY.itemsize + len(reason.encode())
        return own + self.tokens_n.nbytes + self.steps_n.nbytes


def _steps(chunks_n: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Of ascending chunks, which are numbered from 0 without a gap."""
    steps_n = np.where(chunks_n == NO_CHUNK, _OUTSIDE, _GOES_ON).astype(np.uint8)
    before_n = np.maximum.accumulate(np.append(NO_CHUNK, chunks_n[:-1]))
    steps_n[chunks_n > before_n] = _BEGINS
    return steps_n


def _chunks(steps_n: NDArray[np.uint8]) -> NDArray[np.int32]:
    numbers_n = np.cumsum(steps_n == _BEGINS, dtype=np.int32) - np.int32(1)
    return np.where(steps_n == _OUTSIDE, np.int32(NO_CHUNK), numbers_n)


def document_key(document: Document) -> bytes:
    """16 bytes that identify a text, and whether a document begins or ends with it."""
    edges = bytes((document.is_start, document.is_end))
    return hashlib.blake2b(document.text.encode(), digest_size=_KEY_BYTES, salt=edges).digest()


def cache_folder(
    parent: Path, student: Tokenizer, teacher: Tokenizer, begins: tuple[int | None, int | None]
) -> Path:
    """The folder of documents in the tokens of a pair of tokenizers.

    begins: the id before each document on both sides, as in `PairEncoder`.
    """
    both = [[one.identity, one.eos_id, one.unknown_id] for one in (student, teacher)]
    settings = json.dumps([VERSION, both, begins])
    return parent / f"documents-{hashlib.sha256(settings.encode()).hexdigest()[:24]}"


class _CacheSegment:
    """Documents that are on disk as a whole, mapped into memory."""

    def __init__(self, folder: Path, lengths: dict[str, int]) -> None:
        arrays = {
            name: mapped_array(folder / name, kind, lengths[name]) for name, kind in _FILES.items()
        }
        self._keys: NDArray[np.uint64] = arrays["keys"]
        self._entries: NDArray[np.void] = arrays["entries"]
        self._tokens_n: NDArray[np.int32] = arrays["tokens"]
        self._steps_n: NDArray[np.uint8] = arrays["steps"]
        self._reasons: NDArray[np.uint8] = arrays["reasons"]
        self.size = sum(kind.itemsize * lengths[name] for name, kind in _FILES.items())

    @classmethod
    def opened(cls, folder: Path) -> _CacheSegment | None:
        """The segment in a folder; None if it is damaged."""
        try:
            stored = json.loads((folder / _MANIFEST).read_bytes())
            lengths = {name: int(stored[name]) for name in _FILES}
            sizes = {name: (folder / name).stat().st_size for name in _FILES}
        except (OSError, ValueError, TypeError, KeyError):
            return None
        if any(sizes[name] != lengths[name] * kind.itemsize for name, kind in _FILES.items()):
            return None
        return cls(folder, lengths)

    def rows(self, halves_n2: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The row of each key, -1 for those that are not here."""
        rows_n = np.searchsorted(self._keys, halves_n2[:, 0])
        rows_n = np.minimum(rows_n, len(self._keys) - 1)
        is_here_n = self._keys[rows_n] == halves_n2[:, 0]
        is_here_n &= self._entries["key"][rows_n] == halves_n2[:, 1]
        return np.where(is_here_n, rows_n, -1)

    def document(self, row: int) -> CachedDocument:
        """A document, whose arrays are read when they are used."""
        _, start, student, teacher, unknown = self._entries[row].item()
        if student == _REFUSED:
            reason = bytes(self._reasons[start : start + teacher]).decode()
            return CachedDocument(
                self._tokens_n[:0], self._steps_n[:0], _REFUSED, UnknownTokens(), reason
            )
        part = slice(start, start + student + teacher)
        counts = UnknownTokens(*(int(count) for count in unknown))
        return CachedDocument(self._tokens_n[part], self._steps_n[part], student, counts)


def _write(folder: Path, documents: dict[bytes, CachedDocument]) -> None:
    """Write a segment into a folder that exists. Raises OSError."""
    keys = np.frombuffer(b"".join(documents), "<u8").reshape(-1, 2)
    order = np.argsort(keys[:, 0], kind="stable")
    entries = np.zeros(len(keys), _ENTRY)
    entries["key"] = keys[:, 1]
    reasons = bytearray()
    tokens = 0
    for entry, document in zip(entries, documents.values(), strict=True):
        if document.reason is None:
            count = len(document.tokens_n)
            sizes = (tokens, document.student, count - document.student)
            tokens += count
        else:
            reason = document.reason.encode()
            sizes = (len(reasons), _REFUSED, len(reason))
            reasons += reason
        entry["start"], entry["student"], entry["teacher"] = sizes
        entry["unknown"] = astuple(document.unknown)
    arrays: dict[str, NDArray[Any]] = {
        "keys": keys[order, 0],
        "entries": entries[order],
        "tokens": np.concatenate([one.tokens_n for one in documents.values()]),
        "steps": np.concatenate([one.steps_n for one in documents.values()]),
        "reasons": np.frombuffer(bytes(reasons), np.uint8),
    }
    for name, kind in _FILES.items():
        write_flushed(folder / name, np.ascontiguousarray(arrays[name], kind).tobytes())
    lengths = {name: len(array) for name, array in arrays.items()}
    write_flushed(folder / _MANIFEST, json.dumps(lengths, indent=1).encode())


class DocumentCache:
    """Documents of all sources in the tokens of two tokenizers, found by their texts.

    New ones are held in memory up to SEGMENT_BYTES, or to the end of an epoch, and then written,
    until the folder has `most_bytes`. Several processes may read and write one folder. A damaged
    segment is removed with a warning. Where the folder cannot be written, there is a warning, and
    documents are encoded as without a cache. Not thread-safe.

    Attributes:
        folder: of the segments.
        is_open: whether new documents are written: it is not full, and nothing has failed.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        self._segments: dict[str, _CacheSegment] = {}
        self._pending: dict[bytes, CachedDocument] = {}
        self._written_bytes = self._pending_bytes = 0
        self.is_open = True
        self._open_new()

    def find(self, keys: Sequence[bytes]) -> list[CachedDocument | None]:
        """The document of each key; None for those that are not in the cache."""
        found = [self._pending.get(key) for key in keys]
        missing = np.array([place for place, one in enumerate(found) if one is None], np.int64)
        halves_n2 = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
        for segment in self._segments.values():
            if not len(missing):
                break
            rows = segment.rows(halves_n2[missing])
            for place, row in zip(missing[rows >= 0], rows[rows >= 0], strict=True):
                found[place] = segment.document(int(row))
            missing = missing[rows < 0]
        return found

    def add(self, key: bytes, encoded: AlignedDocument | DataError) -> None:
        """Add the result of an encoder, unless it is there already or the cache is full."""
        if not self.is_open or key in self._pending:
            return
        document = CachedDocument.of(encoded)
        if self._written_bytes + self._pending_bytes + document.size > self._most_bytes:
            _LOG.info(
                "%s: holds data.document_cache_gib=%g; further documents are encoded in each epoch",
                self.folder,
                self._most_bytes / 2**30,
            )
            self.flush()
            self.is_open = False
            return
        self._pending[key] = document
        self._pending_bytes += document.size
        if self._pending_bytes >= SEGMENT_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the documents that are held in memory alone."""
        self._open_new()  # what another process wrote meanwhile is not written again
        pending, self._pending, self._pending_bytes = self._pending, {}, 0
        if pending:
            there = self.find(list(pending))
            pending = {
                key: document
                for (key, document), other in zip(pending.items(), there, strict=True)
                if other is None
            }
        if not pending:
            return
        number = 1 + max((int(name) for name in self._segments), default=-1)
        place = self.folder / f"{number:06d}"
        try:
            with whole_folder(place, is_whole=lambda path: (path / _MANIFEST).is_file()) as partial:
                _write(partial, pending)
        except OSError as error:
            self.is_open = False
            _LOG.warning(
                "%s: cannot be written (%s), so that documents are encoded in each epoch; free "
                "disk space, set data.cache to a folder with space, or data.document_cache_gib=0",
                self.folder,
                error.strerror,
            )
        self._open_new()

    def _open_new(self) -> None:
        """Open the segments that are not open yet, and remove damaged ones."""
        for path in sorted(self.folder.glob("[0-9]*")):
            if not path.name.isdigit() or path.name in self._segments:
                continue
            segment = _CacheSegment.opened(path)
            if segment is None:
                _LOG.warning("%s: is damaged and removed; its documents are encoded again", path)
                shutil.rmtree(path, ignore_errors=True)
            else:
                self._segments[path.name] = segment
                self._written_bytes += segment.size
