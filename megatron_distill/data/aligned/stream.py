"""Text documents in the tokens of two tokenizers, as the input of a packed stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from megatron_distill.data.aligned.cache import CachedDocument, DocumentCache, document_key
from megatron_distill.data.aligned.documents import (
    NO_PLACE,
    NOT_WANTED,
    AlignedDocument,
    PairEncoder,
    UnknownTokens,
)
from megatron_distill.data.aligned.packing import AlignedPacker, Window
from megatron_distill.data.samples import State
from megatron_distill.data.text.documents import Document
from megatron_distill.data.text.stream import (
    DocumentBlock,
    DocumentMark,
    StreamPosition,
    document_batches,
)
from megatron_distill.data.worker_processes import WorkerPool
from megatron_distill.errors import DataError, counted
from megatron_distill.log import get_logger

if TYPE_CHECKING:  # worker processes need neither the store nor torch
    from megatron_distill.store import DocumentIndex

__all__ = [
    "EncodingPool",
    "RecordsOfDocuments",
    "TwoTokenizers",
    "Unaligned",
    "check_unaligned",
    "encoding_pool",
]

_LOG = get_logger(__name__)
_REPORTED = 10  # documents that are logged one by one
_FEWEST_JUDGED: Final = 100  # the share is that of at least as many
_MOST_ABSENT: Final = 10_000  # of which a store has none: it is of other texts
# Texts, each with whether it ends its document and whether it begins it.
_Texts = list[tuple[str, bool, bool]]
EncodingPool = WorkerPool[_Texts, list[AlignedDocument | DataError]]


def check_unaligned(
    count: int, total: int, share: float, *, name: str, unit: str, last: str
) -> None:
    """Raise DataError if more than a share of a source is left out for want of a chunk.

    Of fewer than 100 the share is that of 100: of a stream it would be exceeded there anyway.
    """
    if count > share * max(total, _FEWEST_JUDGED):
        raise DataError(
            f"data.max_unaligned={share:g}: {count} of {counted(total, unit)} of data source "
            f"{name} have no chunk that both tokenizers share; the last is {last}. Correct the "
            "text, or raise data.max_unaligned to leave them out"
        )


class Unaligned:
    """Counts what tokenizers cannot express: unaligned documents, and unknown tokens.

    More than a share of such documents is an error. Unknown tokens are warned of once.

    Attributes:
        name: of the source.
        share: largest share.
        documents: counted so far.
        count: those of them that cannot be aligned.
    """

    def __init__(self, name: str, share: float) -> None:
        self.documents = 0
        self.count = 0
        self.name = name
        self.share = share
        self._last = ""
        self._unknown = UnknownTokens()

    def add(self, place: str, found: AlignedDocument | DataError) -> None:
        """Count a document, or the reason for which it is left out.

        Raises DataError: more documents were left out than the share allows.
        """
        self.documents += 1
        if isinstance(found, AlignedDocument):
            self._unknown = self._unknown.merge(found.unknown)
        else:
            self.count += 1
            self._last = f"{place}: {found}"
            if self.count <= _REPORTED or self.count.bit_count() == 1:
                _LOG.warning("%s: left out: %s", self.name, self._last)
            check_unaligned(
                *(self.count, self.documents, self.share),
                name=self.name,
                unit="document",
                last=self._last,
            )
        if self.documents == _FEWEST_JUDGED and self._unknown:
            _LOG.warning("%s: %s", self.name, self._unknown)


@dataclass
class RecordsOfDocuments:
    """Finds the records of a source's documents in a store, whose key in a run is `key`.

    `index` None: the store's teacher takes no sample of the source, and its documents need none.
    A document without any is left out. More than a share of documents that the store lacks, or has
    a part of, is an error. With any share it is one that the store has none of many documents: no
    sample would ever be full. `is_of_student`: the records are of the student's tokens. All
    documents then stay, since the other teacher has them.
    """

    index: DocumentIndex | None
    name: str
    share: float
    key: str = "teacher.store"
    is_of_student: bool = False
    documents: int = field(default=0, init=False)
    lacking: int = field(default=0, init=False)
    absent: int = field(default=0, init=False)

    def joined(self, document: Document, found: AlignedDocument) -> AlignedDocument | None:
        """The document with the places of its tokens in records; None: the store has none of it.

        Raises DataError: the store lacks more documents than the share allows. Raises StoreError:
        a record has other tokens of it.
        """
        tokens = len((found.student if self.is_of_student else found.teacher).tokens_n)
        if self.index is None:
            return self._with(found, np.full((tokens, 2), NOT_WANTED, np.int32))
        places_m2 = self.index.places(document.text_digest, tokens)
        self.documents += 1
        if places_m2 is None or (places_m2[1:, 0] < 0).any():
            self.lacking += 1
            self.absent += places_m2 is None
            self._check(document.place, is_absent=places_m2 is None)
        if places_m2 is None and self.is_of_student:
            places_m2 = np.full((tokens, 2), NO_PLACE, np.int32)
        return None if places_m2 is None else self._with(found, places_m2)

    def _with(self, found: AlignedDocument, places_n2: NDArray[np.int32]) -> AlignedDocument:
        if not self.is_of_student:
            return replace(found, places_m2=places_n2)
        before, own = found.student_places_nk2, places_n2[:, None]
        joined = own if before is None else np.concatenate([before, own], 1)
        return replace(found, student_places_nk2=joined)

    def _check(self, place: str, *, is_absent: bool) -> None:
        had = "has none of" if is_absent else "has only a part of"
        way = "train without these texts"
        if self.is_of_student:
            way = "leave them out of the terms without alignment"
        if self.lacking <= _REPORTED or self.lacking.bit_count() == 1:
            _LOG.warning("%s: %s: %s %s it", self.name, place, self.key, had)
        if self.lacking > self.share * max(self.documents, _FEWEST_JUDGED):
            raise DataError(
                f"data.max_unaligned={self.share:g}: {self.key} does not have "
                f"{self.lacking} of {counted(self.documents, 'document')} of data source "
                f"{self.name} as a whole; it {had} {place}. Use the corpus of the capture with its "
                "data.validation_fraction and data.add_bos, capture more samples of it, or raise "
                f"data.max_unaligned to {way}"
            )
        if self.absent == self.documents == _MOST_ABSENT:
            raise DataError(
                f"{self.key} has none of the first {self.documents:,} documents of data source "
                f"{self.name}, the last of which is {place}. Use the corpus of the capture, or "
                "remove this source"
            )


@dataclass
class EpochCount:
    """Counts the documents of the epoch that a stream is in, by their use.

    A stream without one document that is used must end: no sample would ever be full, and its files
    would be read again and again.
    """

    epoch: int
    is_whole: bool  # whether its first document was seen
    documents: int = 0
    cached: int = 0
    unaligned: int = 0
    absent: int = 0  # of which a store has no record
    last: str = ""

    @classmethod
    def begun(cls, position: StreamPosition) -> EpochCount:
        """The count at the first document of a stream or epoch."""
        is_first = position.block == position.document == 0
        return cls(position.epoch, is_first)

    def require_used(self, name: str, share: float, *, store: str) -> None:
        """Raise DataError if the epoch, seen as a whole, had no document to be used.

        store: its key, if the documents are joined with one.
        """
        if not self.is_whole or self.documents > self.unaligned + self.absent:
            return
        reasons = {
            "have no chunk that both tokenizers share": self.unaligned,
            f"are not in {store}": self.absent,
        }
        found = ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
        raise DataError(
            f"data.max_unaligned={share:g}: no sample can be made of data source {name}: of the "
            f"{counted(self.documents, 'document')} of an epoch {found}; the last is {self.last}. "
            "Correct data.sources and both tokenizers, or remove this source"
        )


@dataclass(frozen=True)
class _Batch:
    """Documents that are encoded together, but for those that the cache has.

    keys: of the cache; empty without one. known: the document in the cache, None for the others.
    """

    documents: Sequence[tuple[Document, DocumentMark]]
    keys: Sequence[bytes]
    known: Sequence[CachedDocument | None]

    @classmethod
    def of(
        cls, documents: Sequence[tuple[Document, DocumentMark]], cache: DocumentCache | None
    ) -> _Batch:
        """Look up documents in a cache."""
        if cache is None:
            return cls(documents, (), [None] * len(documents))
        keys = [document_key(document) for document, _ in documents]
        return cls(documents, keys, cache.find(keys))

    @property
    def position(self) -> StreamPosition:
        """Of the first document; all are of one epoch."""
        return self.documents[0][1].position

    @property
    def cached(self) -> int:
        """The number of documents that the cache had."""
        return sum(one is not None for one in self.known)

    def texts(self) -> _Texts:
        """The texts to encode, which may be none."""
        return [
            (document.text, document.is_end, document.is_start)
            for (document, _), known in zip(self.documents, self.known, strict=True)
            if known is None
        ]

    def added(
        self, encoded: Sequence[AlignedDocument | DataError], cache: DocumentCache | None
    ) -> Iterator[tuple[Document, DocumentMark, AlignedDocument | DataError]]:
        """Add what was encoded of `texts` to the cache; yield all documents in their order."""
        if cache is not None:
            missing = [key for key, one in zip(self.keys, self.known, strict=True) if one is None]
            for key, item in zip(missing, encoded, strict=True):
                cache.add(key, item)
        new = iter(encoded)
        for (document, mark), known in zip(self.documents, self.known, strict=True):
            item = next(new) if known is None else known.found(is_end=document.is_end)
            yield document, mark, item


@dataclass(frozen=True)
class TwoTokenizers:
    """Documents in the student's and the teacher's tokens; a `Tokenization`.

    Texts are tokenised and aligned by the workers of a pool, which sources may share; see
    `encoding_pool`. `distils_all`: as in `AlignedPacker`. `records`: join them with stores by
    document. `cache`: of the documents; None: each epoch encodes them.
    """

    encoder: PairEncoder
    student_length: int
    teacher_length: int
    pool: EncodingPool
    unaligned: Unaligned
    distils_all: bool = False
    records: tuple[RecordsOfDocuments, ...] = ()
    cache: DocumentCache | None = None

    @property
    def identity(self) -> State:
        """See `Tokenization`."""
        return {
            "tokenizer": self.encoder.student.identity,
            "sequence_length": self.student_length,
            "teacher_tokenizer": self.encoder.teacher.identity,
            "teacher_sequence_length": self.teacher_length,
            "begin_token": self.encoder.begins[0],
            "teacher_begin_token": self.encoder.begins[1],
        }

    def packer(self) -> AlignedPacker[DocumentMark]:
        """See `Tokenization`."""
        student, teacher = self.encoder.student, self.encoder.teacher
        return AlignedPacker(
            Window(self.student_length + 1, student.eos_id),
            Window(self.teacher_length + 1, teacher.eos_id),
            distils_all=self.distils_all,
        )

    def encoded(
        self, blocks: Iterable[DocumentBlock]
    ) -> Iterator[tuple[AlignedDocument, DocumentMark]]:
        """See `Tokenization`; a document that cannot be aligned is left out and counted."""
        in_work: deque[_Batch] = deque()
        count: EpochCount | None = None

        def texts() -> Iterator[_Texts]:
            for block in blocks:
                for documents in document_batches(block):
                    in_work.append(_Batch.of(documents, self.cache))
                    yield in_work[-1].texts()

        with self.pool.results(texts()) as results:
            for encoded in results:
                batch = in_work.popleft()
                if count is None or batch.position.epoch != count.epoch:
                    self._end_epoch(count)
                    count = EpochCount.begun(batch.position)
                count.cached += batch.cached
                for document, mark, item in batch.added(encoded, self.cache):
                    joined = self._joined(document, item, count)
                    if joined is not None:
                        yield joined, mark
        if self.cache is not None:
            self.cache.flush()

    def _end_epoch(self, count: EpochCount | None) -> None:
        """Check an epoch that has ended, and write what it has added; None before the first one."""
        if count is None:
            return
        store = next((one.key for one in self.records if not one.is_of_student), "")
        count.require_used(self.unaligned.name, self.unaligned.share, store=store)
        if self.cache is not None and self.cache.is_open and count.cached < count.documents:
            self.cache.flush()
            _LOG.info(
                "%s: %s of an epoch, of which %d were in %s before",
                *(self.unaligned.name, counted(count.documents, "document")),
                *(count.cached, self.cache.folder),
            )

    def _joined(
        self, document: Document, item: AlignedDocument | DataError, count: EpochCount
    ) -> AlignedDocument | None:
        """The document with its records, if it is joined with stores; None if it is left out."""
        self.unaligned.add(document.place, item)
        count.documents += 1
        count.last = document.place
        if not isinstance(item, AlignedDocument):
            count.unaligned += 1
            return None
        for records in self.records:
            joined = records.joined(document, item)
            if joined is None:
                count.absent += 1
                return None
            item = joined
        return item


def encoding_pool(encoder: PairEncoder, workers: int) -> EncodingPool:
    """Processes that tokenise and align the texts of all streams that use them; 0: none."""
    return WorkerPool(partial(_encode, encoder), workers)


def _encode(encoder: PairEncoder, batch: _Texts) -> list[AlignedDocument | DataError]:
    if not batch:
        return []  # all documents were in the cache
    texts, ends, starts = zip(*batch, strict=True)
    return encoder(texts, ends, starts=starts)
