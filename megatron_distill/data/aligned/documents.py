"""One document in the student's and the teacher's tokens, with the chunks that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_distill.align import Chunks, align_spans, token_spans
from megatron_distill.data.samples import NO_CHUNK
from megatron_distill.data.tokenizers.protocol import Tokenizer
from megatron_distill.errors import DataError

__all__ = ["AlignedDocument", "PairEncoder", "Side"]


@dataclass(frozen=True)
class Side:
    """A document's tokens of one tokenizer, divided at the C chunks' ends.

    Attributes:
        tokens_n: int32 token ids.
        chunks_n: int32, the chunk of each token, ascending; -1 for a token without text.
        cuts: int64 [C + 1], the token where each chunk's cell ends, from 0 to n. A cell holds its
            chunk's tokens and the tokens without text before them.
    """

    tokens_n: NDArray[np.int32]
    chunks_n: NDArray[np.int32]
    cuts: NDArray[np.int64]

    @classmethod
    def of(cls, tokens_n: NDArray[np.int32], ranges_c2: NDArray[np.int64]) -> Side:
        """Divide tokens by the half-open token ranges of their chunks."""
        count = len(ranges_c2)
        marks = np.zeros(len(tokens_n) + 1, np.int32)
        np.add.at(marks, ranges_c2[:, 0], 1)
        number_n = np.cumsum(marks[:-1], dtype=np.int32) - 1
        stops_n = np.append(ranges_c2[:, 1], 0)[number_n]
        is_outside = (number_n < 0) | (np.arange(len(tokens_n)) >= stops_n)
        cuts = np.concatenate([[0], ranges_c2[:, 1]]).astype(np.int64)
        if count:
            cuts[-1] = len(tokens_n)
        return cls(tokens_n, np.where(is_outside, NO_CHUNK, number_n).astype(np.int32), cuts)

    @classmethod
    def of_chunks(cls, tokens_n: NDArray[np.int32], chunks_n: NDArray[np.int32]) -> Side:
        """Divide tokens by the chunk of each."""
        is_last_n = (chunks_n != NO_CHUNK) & (np.append(chunks_n[1:], NO_CHUNK) != chunks_n)
        cuts = np.append(0, np.flatnonzero(is_last_n) + 1).astype(np.int64)
        if len(cuts) > 1:
            cuts[-1] = len(tokens_n)
        return cls(tokens_n, chunks_n, cuts)

    def first(self, chunks: int) -> Side:
        """The tokens up to the end of a chunk's cell."""
        stop = int(self.cuts[chunks])
        return Side(self.tokens_n[:stop], self.chunks_n[:stop], self.cuts[: chunks + 1])


@dataclass(frozen=True)
class AlignedDocument:
    """A document, or a piece of a long one, in the tokens of both models.

    flags_n: uint8, loss masks and weights of the student's tokens as labels, as in `Sample`;
    distillation trains those in chunks. None: cross-entropy trains all.
    """

    student: Side
    teacher: Side
    flags_n: NDArray[np.uint8] | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks, the same on both sides."""
        return len(self.student.cuts) - 1

    def first(self, chunks: int) -> AlignedDocument:
        """The document up to the end of a chunk's cell."""
        student = self.student.first(chunks)
        flags_n = None if self.flags_n is None else self.flags_n[: len(student.tokens_n)]
        return AlignedDocument(student, self.teacher.first(chunks), flags_n)

    def tokens_from(self, cell: int) -> NDArray[np.int64]:
        """The number of tokens on both sides from a cell on."""
        return np.array([side.cuts[-1] - side.cuts[cell] for side in (self.student, self.teacher)])

    def fitting(self, first: int, room: NDArray[np.int64]) -> int:
        """The end of the cells from `first` that fit into the room of both sides, int64 [2].

        Behind a document's first cell one token of context is needed.
        """
        stops = [self.chunks]
        for side, free in zip((self.student, self.teacher), room, strict=True):
            end = side.cuts[first] - (first > 0) + free
            stops.append(int(np.searchsorted(side.cuts, end, side="right")) - 1)
        return max(first, min(stops))


@dataclass(frozen=True)
class PairEncoder:
    """Tokenises texts twice and aligns the tokens by their bytes; picklable, for worker processes.

    The end-of-document tokens of both tokenizers are a chunk of their own where a text ends.
    """

    student: Tokenizer
    teacher: Tokenizer

    def __call__(
        self, texts: Sequence[str], ends: Sequence[bool]
    ) -> list[AlignedDocument | DataError]:
        """The aligned document of each text, or why its tokens cannot be aligned.

        Raises DataError for a text that a tokenizer cannot encode.
        """
        students, teachers = self.student.encode_batch(texts), self.teacher.encode_batch(texts)
        rows = zip(texts, ends, students, teachers, strict=True)
        return [self._aligned(text, is_end, own, other) for text, is_end, own, other in rows]

    def _aligned(
        self, text: str, is_end: bool, student_n: NDArray[np.int32], teacher_n: NDArray[np.int32]
    ) -> AlignedDocument | DataError:
        try:
            chunks = align_spans(
                token_spans(self.student, student_n, text),
                token_spans(self.teacher, teacher_n, text),
            )
        except DataError as error:
            return error
        if is_end:
            student_n = np.append(student_n, np.int32(self.student.eos_id))
            teacher_n = np.append(teacher_n, np.int32(self.teacher.eos_id))
            chunks = _with_end(chunks, len(student_n), len(teacher_n))
        if not len(chunks.student):
            return DataError("the tokenizers share no boundary inside it")
        return AlignedDocument(
            Side.of(student_n, chunks.student), Side.of(teacher_n, chunks.teacher)
        )


def _with_end(chunks: Chunks, student_tokens: int, teacher_tokens: int) -> Chunks:
    """The chunks and one more: the last token of each side."""
    return Chunks(
        np.concatenate([chunks.student, [[student_tokens - 1, student_tokens]]]),
        np.concatenate([chunks.teacher, [[teacher_tokens - 1, teacher_tokens]]]),
    )
