"""Text documents in the tokens of two tokenizers, as the input of a packed stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from megatron_distill.data.aligned.documents import AlignedDocument, PairEncoder, UnknownTokens
from megatron_distill.data.aligned.packing import AlignedPacker, Window
from megatron_distill.data.samples import State
from megatron_distill.data.text.documents import Document
from megatron_distill.data.text.stream import Block, StreamPosition, document_batches
from megatron_distill.data.worker_processes import WorkerPool
from megatron_distill.errors import DataError, counted
from megatron_distill.log import get_logger

__all__ = ["EncodingPool", "TwoTokenizers", "Unaligned", "check_unaligned", "encoding_pool"]

_LOG = get_logger(__name__)
_REPORTED = 10  # documents that are logged one by one
_FEWEST_JUDGED: Final = 100  # the share is that of at least as many
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
    """

    def __init__(self, name: str, share: float) -> None:
        self.documents = 0
        self.count = 0
        self._name = name
        self._share = share
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
                _LOG.warning("%s: left out: %s", self._name, self._last)
            check_unaligned(
                *(self.count, self.documents, self._share),
                name=self._name,
                unit="document",
                last=self._last,
            )
        if self.documents == _FEWEST_JUDGED and self._unknown:
            _LOG.warning("%s: %s", self._name, self._unknown)


@dataclass(frozen=True)
class TwoTokenizers:
    """Documents in the student's and the teacher's tokens; a `Tokenization`.

    Texts are tokenised and aligned by the workers of a pool, which sources may share; see
    `encoding_pool`. `distils_all`: as in `AlignedPacker`.
    """

    encoder: PairEncoder
    student_length: int
    teacher_length: int
    pool: EncodingPool
    unaligned: Unaligned
    distils_all: bool = False

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

    def packer(self) -> AlignedPacker[StreamPosition]:
        """See `Tokenization`."""
        student, teacher = self.encoder.student, self.encoder.teacher
        return AlignedPacker(
            Window(self.student_length + 1, student.eos_id),
            Window(self.teacher_length + 1, teacher.eos_id),
            distils_all=self.distils_all,
        )

    def encoded(self, blocks: Iterable[Block]) -> Iterator[tuple[AlignedDocument, StreamPosition]]:
        """See `Tokenization`; a document that cannot be aligned is left out and counted."""
        in_work: deque[list[tuple[Document, StreamPosition]]] = deque()

        def texts() -> Iterator[_Texts]:
            for block in blocks:
                for batch in document_batches(block):
                    in_work.append(batch)
                    yield [(one.text, one.is_end, one.is_start) for one, _ in batch]

        with self.pool.results(texts()) as results:
            for found in results:
                for (document, place), item in zip(in_work.popleft(), found, strict=True):
                    self.unaligned.add(document.place, item)
                    if isinstance(item, AlignedDocument):
                        yield item, place


def encoding_pool(encoder: PairEncoder, workers: int) -> EncodingPool:
    """Processes that tokenise and align the texts of all streams that use them; 0: none."""
    return WorkerPool(partial(_encode, encoder), workers)


def _encode(encoder: PairEncoder, batch: _Texts) -> list[AlignedDocument | DataError]:
    texts, ends, starts = zip(*batch, strict=True)
    return encoder(texts, ends, starts=starts)
