"""Windows of aligned conversations: whole ones in both models' tokens, or cut at a chunk's end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_distill.data.aligned.documents import AlignedDocument, Side
from megatron_distill.data.aligned.packing import AlignedPacker, Window
from megatron_distill.data.chat.cache import PreparedConversations, TeacherArrays
from megatron_distill.data.samples import Sample, State

__all__ = ["AlignedLayout", "AlignedPiece"]


@dataclass(frozen=True, slots=True)
class AlignedPiece:
    """The first `chunks` chunks of a conversation, and its length in the unit of the layout."""

    number: int
    chunks: int
    length: int


@dataclass(frozen=True)
class AlignedLayout:
    """How conversations become samples of two models; a `Layout`.

    A length is the share of a window that a conversation fills, on the side where that is larger,
    in units of 1 / (width of the student's window * width of the teacher's). `distils_all`: as in
    `AlignedPacker`.
    """

    prepared: PreparedConversations
    student: Window
    teacher: Window
    truncation: str
    distils_all: bool = False

    def __post_init__(self) -> None:
        assert self.truncation in ("right", "drop", "error"), self.truncation

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
            f"{own} tokens of the student and {other} of the teacher",
            f"{self.student.width} and {self.teacher.width} fit (data.sequence_length + 1, "
            "teacher.sequence_length + 1)",
        )

    def pieces(self, number: int) -> list[AlignedPiece]:
        """See `Layout`; a long conversation ends behind the last chunk that fits on both sides."""
        length = int(self.lengths[number])
        if length > self.width and self.truncation != "right":
            return []
        document = self._document(number)
        chunks = document.chunks
        if length > self.width:
            chunks = document.fitting(0, np.array([self.student.width, self.teacher.width]))
            own, other = (side.cuts[chunks] for side in (document.student, document.teacher))
            length = int(self._in_units(int(own), int(other)))
        return [AlignedPiece(number, chunks, length)] if chunks else []

    def trained(self, piece: AlignedPiece) -> int:
        """See `Layout`."""
        start, stop = self.prepared.bounds(piece.number)
        chunks_n = self._of_teacher.chunks_n[start:stop]
        return int(np.count_nonzero((chunks_n >= 0) & (chunks_n < piece.chunks)))

    def sample(self, pieces: Sequence[AlignedPiece], sample_id: int) -> Sample:
        """See `Layout`."""
        packer = AlignedPacker[int](self.student, self.teacher, distils_all=self.distils_all)
        for piece in pieces:
            packer.add(self._document(piece.number).first(piece.chunks), piece.number)
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
