"""Windows of aligned conversations: whole ones in both models' tokens, or cut at a chunk's end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_distill.data.aligned.documents import AlignedDocument, Side
from megatron_distill.data.aligned.packing import AlignedPacker, Window
from megatron_distill.data.chat.cache import PreparedConversations, TeacherArrays
from megatron_distill.data.chat.source import TRUNCATIONS
from megatron_distill.data.samples import Sample, State
from megatron_distill.errors import counted

__all__ = ["AlignedLayout", "AlignedPiece"]


@dataclass(frozen=True, slots=True)
class AlignedPiece:
    """Chunks [first, stop) of a conversation, and their length in the unit of the layout."""

    number: int
    first: int
    stop: int
    length: int


@dataclass(frozen=True)
class AlignedLayout:
    """How conversations become samples of two models; a `Layout`.

    A length is the share of a window that a conversation fills, on the side where that is larger.
    Its unit is 1 / (width of the student's window * width of the teacher's). `distils_all`: as in
    `AlignedPacker`.
    """

    prepared: PreparedConversations
    student: Window
    teacher: Window
    truncation: str
    distils_all: bool = False

    def __post_init__(self) -> None:
        assert self.truncation in TRUNCATIONS, self.truncation

    @property
    def identity(self) -> State:
        """See `Layout`."""
        return {
            "sequence_length": self.student.width - 1,
            "teacher_sequence_length": self.teacher.width - 1,
        }

    @property
    def width(self) -> int:
        """See `Layout`."""
        return self.student.width * self.teacher.width

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """See `Layout`."""
        return np.asarray(self._in_units(*self._tokens), np.int64)

    @cached_property
    def _tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of each conversation on both sides."""
        own = np.diff(self.prepared.index["stop"], prepend=0)
        return np.asarray(own, np.int64), np.diff(self._of_teacher.stops, prepend=0)

    @property
    def _of_teacher(self) -> TeacherArrays:
        assert self.prepared.teacher is not None, "it was prepared for two tokenizers"
        return self.prepared.teacher

    def _in_units(
        self, student: NDArray[np.int64] | int, teacher: NDArray[np.int64] | int
    ) -> NDArray[np.int64]:
        return np.maximum(
            np.asarray(student) * self.teacher.width, np.asarray(teacher) * self.student.width
        )

    def describe(self, number: int) -> tuple[str, str]:
        """See `Layout`."""
        own, other = (int(tokens[number]) for tokens in self._tokens)
        return (
            f"{counted(own, 'token')} of the student and {other:,} of the teacher",
            f"{self.student.width} and {self.teacher.width} fit (data.sequence_length + 1, "
            "teacher.sequence_length + 1)",
        )

    def pieces(self, number: int) -> list[AlignedPiece]:
        """See `Layout`; a long conversation is cut between chunks, at the same place on both sides.

        A piece that does not begin the conversation has the token before it as context, so that
        each label of `split` is trained once. A chunk too long for a window is in no piece.
        """
        length = int(self.lengths[number])
        is_long = length > self.width
        if is_long and self.truncation in ("drop", "error"):
            return []
        document = self._document(number)
        if not is_long:
            whole = AlignedPiece(number, 0, document.chunks, length)
            return [whole] if document.chunks else []
        return [
            AlignedPiece(number, first, stop, self._length(document, first, stop))
            for first, stop in self._cut(document)
        ]

    def _cut(self, document: AlignedDocument) -> Iterator[tuple[int, int]]:
        """The pieces of a conversation that is too long, as ranges of chunks."""
        room = np.array([self.student.width, self.teacher.width])
        first = 0
        if self.truncation == "left":
            first = document.fitting_before_end(room)
        while first < document.chunks:
            stop = document.fitting(first, room)
            if stop > first:
                yield first, stop
            if self.truncation != "split":
                return
            first = max(stop, first + 1)

    def _length(self, document: AlignedDocument, first: int, stop: int) -> int:
        parts = (side.tokens(first, stop) for side in (document.student, document.teacher))
        own, other = (part.stop - part.start for part in parts)
        return int(self._in_units(own, other))

    def trained(self, piece: AlignedPiece) -> int:
        """See `Layout`."""
        start, stop = self.prepared.bounds(piece.number)
        chunks_n = self._of_teacher.chunks_n[start:stop]
        return int(np.count_nonzero((chunks_n >= piece.first) & (chunks_n < piece.stop)))

    def sample(self, pieces: Sequence[AlignedPiece], sample_id: int) -> Sample:
        """See `Layout`."""
        packer = AlignedPacker[int](self.student, self.teacher, distils_all=self.distils_all)
        for piece in pieces:
            part = self._document(piece.number).part(piece.first, piece.stop)
            packer.add(part, piece.number)
        sample = packer.take(sample_id) if packer.is_ready else packer.flush(sample_id)
        assert sample is not None, "each piece has a chunk"
        return sample

    def _document(self, number: int) -> AlignedDocument:
        start, stop = self.prepared.bounds(number)
        other = self._of_teacher
        first = int(other.stops[number - 1]) if number else 0
        last = int(other.stops[number])
        return AlignedDocument(
            Side.of_chunks(self.prepared.tokens_n[start:stop], other.chunks_n[start:stop]),
            Side.of_chunks(other.tokens_m[first:last], other.chunks_m[first:last]),
            self.prepared.flags_n[start:stop],
        )
