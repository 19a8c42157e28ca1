"""Packing of aligned documents: one plan cuts the samples of both models at common boundaries."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_distill.data.aligned.documents import NO_PLACE, AlignedDocument, Side
from megatron_distill.data.samples import (
    CE_TRAINED,
    FULLY_TRAINED,
    KD_TRAINED,
    NO_CHUNK,
    PADDING_DOCUMENT,
    Sample,
    TeacherTokens,
)
from megatron_distill.log import get_logger

__all__ = ["AlignedPacker", "Window"]

_LOG = get_logger(__name__)

Mark = TypeVar("Mark")


@dataclass(frozen=True)
class Window:
    """The size of one model's samples: `width` tokens, filled up with `padding_token`."""

    width: int
    padding_token: int


@dataclass(frozen=True)
class _PackedDocument(Generic[Mark]):
    document: AlignedDocument
    mark: Mark


@dataclass(frozen=True)
class _Piece:
    """Cells [first, stop) of a document, after one token of context if `first` is not 0."""

    document: AlignedDocument
    first: int
    stop: int

    def tokens(self, side: Side) -> slice:
        """The piece's tokens on one side."""
        return side.tokens(self.first, self.stop)


class AlignedPacker(Generic[Mark]):
    """Cuts a row of aligned documents into pairs of windows, one for each model.

    A sample holds the longest run of whole chunks that fits into both windows; the rest of each is
    padding. A document that does not end in a sample continues in the next one. It is a document of
    its own after the last token before the cut. So each label but a document's first is trained
    once. A chunk is valid if all its labels have a token before them in the sample. With places in
    a store they also need one in a record. With places of the student's tokens, labels that a store
    lacks are not distilled.

    Each document carries a mark; `start` gives the mark and the number of the cell with which the
    next sample begins. A chunk longer than a window is left out, counted and logged.
    Labels outside of chunks are distilled if `distils_all`, as terms of one tokenizer need it.
    """

    def __init__(self, student: Window, teacher: Window, *, distils_all: bool = False) -> None:
        self._distils_all = distils_all
        self._student = student
        self._teacher = teacher
        self._segments: deque[_PackedDocument[Mark]] = deque()
        self._offset = 0  # cell of the first document with which the next sample begins
        self._available = np.zeros(2, np.int64)  # tokens of both sides from there on
        self._ended: tuple[Mark, int] | None = None  # the last document used up, and its cells
        self.too_long = 0

    @property
    def is_ready(self) -> bool:
        """Whether no further document could join the next sample."""
        student, teacher = self._available
        return bool(student >= self._student.width or teacher >= self._teacher.width)

    @property
    def start(self) -> tuple[Mark, int] | None:
        """Mark and cell of the document where the next sample begins; None if unknown.

        The end of a document if the next one has not been added.
        """
        return (self._segments[0].mark, self._offset) if self._segments else self._ended

    def add(self, document: AlignedDocument, mark: Mark, *, skip: int = 0) -> None:
        """Append a document without its first `skip` cells; `skip` only for the first document."""
        assert skip == 0 or not self._segments, "only the first document can begin inside"
        if document.chunks <= skip:
            return
        if not self._segments:
            self._offset = skip
        self._segments.append(_PackedDocument(document, mark))
        self._available += document.tokens_from(skip)
        self._leave_out_long()

    def take(self, sample_id: int) -> Sample:
        """Cut the next sample; only when `is_ready`."""
        assert self.is_ready
        return self._cut(sample_id)

    def flush(self, sample_id: int) -> Sample | None:
        """Cut the remaining documents into one padded sample; None if they contain no label."""
        assert not self.is_ready
        has_label = self._offset > 0 or bool((self._available > 1).all())
        sample = self._cut(sample_id) if self._segments and has_label else None
        self._segments.clear()
        self._offset = 0
        self._available[:] = 0
        return sample

    def _cut(self, sample_id: int) -> Sample:
        pieces: list[_Piece] = []
        room = np.array([self._student.width, self._teacher.width])
        while self._segments:
            document, first = self._segments[0].document, self._offset
            stop = document.fitting(first, room)
            if stop == first:
                break
            pieces.append(_Piece(document, first, stop))
            room -= document.tokens_from(first) - document.tokens_from(stop) + (first > 0)
            self._advance(stop)
            if stop < document.chunks:
                break
        self._leave_out_long()
        return self._sample(pieces, sample_id)

    def _leave_out_long(self) -> None:
        """Advance over chunks, at the beginning of the next sample, that fit into no window."""
        widths = np.array([self._student.width, self._teacher.width])
        while self._segments:
            document, first = self._segments[0].document, self._offset
            if document.fitting(first, widths) > first:
                return
            self.too_long += 1
            if self.too_long.bit_count() == 1:  # 1, 2, 4, 8, ...
                sizes = document.tokens_from(first) - document.tokens_from(first + 1)
                _LOG.warning(
                    "a chunk of %d student and %d teacher tokens is longer than "
                    "data.sequence_length = %d or teacher.sequence_length = %d; its labels are "
                    "left out (%d so far)",
                    *(*sizes, self._student.width - 1, self._teacher.width - 1, self.too_long),
                )
            self._advance(first + 1)

    def _advance(self, cell: int) -> None:
        """Begin the next sample at a cell of the first document, or with the next document."""
        document = self._segments[0].document
        self._available -= document.tokens_from(self._offset) - document.tokens_from(cell)
        self._offset = cell
        if cell == document.chunks:
            self._ended = self._segments.popleft().mark, cell
            self._offset = 0

    def _sample(self, pieces: Sequence[_Piece], sample_id: int) -> Sample:
        valid = [_valid_chunks(piece) for piece in pieces]
        sides = [
            _laid_out(window, [(getattr(piece.document, name), piece) for piece in pieces], valid)
            for name, window in (("student", self._student), ("teacher", self._teacher))
        ]
        (tokens, documents, chunks), teacher = sides
        is_real = documents != PADDING_DOCUMENT
        flags = np.where(is_real, FULLY_TRAINED if self._distils_all else CE_TRAINED, 0)
        left_out = np.uint8(0 if self._distils_all else KD_TRAINED)
        filled = 0
        for piece in pieces:
            part = piece.tokens(piece.document.student)
            if piece.document.flags_n is not None:
                place = slice(filled, filled + part.stop - part.start)
                flags[place] = piece.document.flags_n[part] & ~left_out
            filled += part.stop - part.start
        flags |= np.where(chunks != NO_CHUNK, KD_TRAINED, 0)
        places, student_places = self._places(pieces)
        if places is not None:
            places[teacher[2] == NO_CHUNK] = NO_PLACE
        if student_places is not None:
            is_label, lacks = _labels(documents), (student_places[..., 0] == NO_PLACE).any(1)
            flags = np.where(is_label & lacks, flags & ~KD_TRAINED, flags)
            student_places[~is_label | lacks] = NO_PLACE
        return Sample(
            tokens,
            documents,
            flags.astype(np.uint8),
            sample_id,
            teacher=TeacherTokens(*teacher, chunks, places, student_places),
        )

    def _places(
        self, pieces: Sequence[_Piece]
    ) -> tuple[NDArray[np.int32] | None, NDArray[np.int32] | None]:
        """The places of the tokens of both windows, the teacher's first."""
        teacher, student = [], []
        for piece in pieces:
            document = piece.document
            teacher.append((document.places_m2, piece.tokens(document.teacher)))
            student.append((document.student_places_nk2, piece.tokens(document.student)))
        return _laid_out_places(self._teacher, teacher), _laid_out_places(self._student, student)


def _valid_chunks(piece: _Piece) -> NDArray[np.bool_]:
    """Of a piece's chunks, those whose labels all have a token before them: bool [stop - first]."""
    valid = np.ones(piece.stop - piece.first, np.bool_)
    if piece.first == 0:
        for side in (piece.document.student, piece.document.teacher):
            if side.chunks_n[0] != NO_CHUNK:
                valid[side.chunks_n[0]] = False
    places_m2 = piece.document.places_m2
    if places_m2 is not None:
        part = piece.tokens(piece.document.teacher)
        chunks_n = piece.document.teacher.chunks_n[part] - piece.first
        valid[chunks_n[(chunks_n >= 0) & (places_m2[part, 0] == NO_PLACE)]] = False
    return valid


def _laid_out_places(
    window: Window, parts: Sequence[tuple[NDArray[np.int32] | None, slice]]
) -> NDArray[np.int32] | None:
    """Record and position of each token of a window, int32 [width, .., 2].

    parts: the places of each piece's document, and the tokens of the piece.
    """
    if not parts or parts[0][0] is None:
        return None
    places = np.full((window.width, *parts[0][0].shape[1:]), NO_PLACE, np.int32)
    filled = 0
    for values, part in parts:
        assert values is not None, "a sample is joined as a whole"
        stop = filled + part.stop - part.start
        places[filled:stop] = values[part]
        filled = stop
    return places


def _labels(documents_S1: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Whether each token has one of its document before it in the sample: bool [S + 1]."""
    is_same = documents_S1[1:] == documents_S1[:-1]
    return np.append(False, is_same & (documents_S1[1:] != PADDING_DOCUMENT))


def _laid_out(
    window: Window, pieces: Sequence[tuple[Side, _Piece]], valid: Sequence[NDArray[np.bool_]]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Token ids, document numbers and chunk numbers of one side's window."""
    tokens = np.full(window.width, window.padding_token, np.int32)
    documents = np.full(window.width, PADDING_DOCUMENT, np.int32)
    chunks = np.full(window.width, NO_CHUNK, np.int32)
    filled = count = 0
    for number, (side, piece) in enumerate(pieces):
        part = piece.tokens(side)
        place = slice(filled, filled + part.stop - part.start)
        tokens[place], documents[place] = side.tokens_n[part], number
        ranks = np.where(valid[number], np.cumsum(valid[number]) - 1 + count, NO_CHUNK)
        inside = side.chunks_n[part] - piece.first
        chunks[place] = np.where(inside >= 0, ranks[np.maximum(inside, 0)], NO_CHUNK)
        filled, count = place.stop, count + int(valid[number].sum())
    return tokens, documents, chunks
