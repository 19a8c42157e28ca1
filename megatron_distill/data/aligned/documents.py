"""One document in the student's and the teacher's tokens, with the chunks that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_distill.align import align_spans, chunk_numbers, continued_spans
from megatron_distill.data.samples import NO_CHUNK
from megatron_distill.data.tokenizers.protocol import Tokenizer, encoded_or_refused
from megatron_distill.errors import DataError

__all__ = [
    "NOT_WANTED",
    "NO_PLACE",
    "AlignedDocument",
    "PairEncoder",
    "Side",
    "UnknownTokens",
    "is_unknown",
]

NO_PLACE: Final = -1  # in place of a record, where a store has none of a token
NOT_WANTED: Final = -2  # in place of a record, where the store's teacher takes no sample


@dataclass(frozen=True)
class Side:
    """A document's tokens of one tokenizer, divided at the C chunks' ends.

    Attributes:
        tokens_n: int32 token ids.
        chunks_n: int32, the chunk of each token, ascending; -1 for a token in none.
        cuts: int64 [C + 1], the token where each chunk's cell ends, from 0 to n. A cell holds its
            chunk's tokens and the tokens in no chunk before them.
    """

    tokens_n: NDArray[np.int32]
    chunks_n: NDArray[np.int32]
    cuts: NDArray[np.int64]

    def with_end(self, token: int) -> Side:
        """The same with one more token, a chunk of its own."""
        count = len(self.cuts) - 1
        return Side(
            np.append(self.tokens_n, np.int32(token)),
            np.append(self.chunks_n, np.int32(count)),
            np.append(self.cuts, len(self.tokens_n) + 1),
        )

    def with_begin(self, token: int) -> Side:
        """The same after one more token, which is in no chunk."""
        return Side(
            np.append(np.int32(token), self.tokens_n),
            np.append(np.int32(NO_CHUNK), self.chunks_n),
            np.append(0, self.cuts[1:] + 1),
        )

    @classmethod
    def of_chunks(cls, tokens_n: NDArray[np.int32], chunks_n: NDArray[np.int32]) -> Side:
        """Divide tokens by the chunk of each."""
        inside = np.flatnonzero(chunks_n != NO_CHUNK)
        numbers = chunks_n[inside]
        count = int(numbers[-1]) + 1 if len(numbers) else 0
        last = inside[np.searchsorted(numbers, np.arange(count), side="right") - 1]
        cuts = np.append(0, last + 1).astype(np.int64)
        if count:
            cuts[-1] = len(tokens_n)
        return cls(tokens_n, chunks_n, cuts)

    def tokens(self, first: int, stop: int) -> slice:
        """The tokens of cells [first, stop), behind one of context if `first` is not 0."""
        return slice(int(self.cuts[first]) - (first > 0), int(self.cuts[stop]))

    def part(self, first: int, stop: int) -> Side:
        """The tokens of some cells, numbered from 0; the token of context is in no chunk."""
        inside = self.tokens(first, stop)
        chunks_n = self.chunks_n[inside]
        return Side(
            self.tokens_n[inside],
            np.where(chunks_n >= first, chunks_n - first, NO_CHUNK).astype(np.int32),
            np.append(0, self.cuts[first + 1 : stop + 1] - inside.start),
        )


@dataclass(frozen=True)
class UnknownTokens:
    """Numbers of tokens of both sides, and of those that stand for a text without a token.

    One such token stands for many texts, so its probability is not that of the text: chunks with
    one are not distilled.
    """

    tokens: int = 0
    unknown: int = 0
    teacher_tokens: int = 0
    teacher_unknown: int = 0

    @classmethod
    def of(cls, is_unknown_n: NDArray[np.bool_], is_unknown_m: NDArray[np.bool_]) -> UnknownTokens:
        """From whether each token is unknown."""
        own, other = (int(np.count_nonzero(side)) for side in (is_unknown_n, is_unknown_m))
        return cls(len(is_unknown_n), own, len(is_unknown_m), other)

    def merge(self, other: UnknownTokens) -> UnknownTokens:
        """The sums of both."""
        return UnknownTokens(**{name: n + vars(other)[name] for name, n in vars(self).items()})

    def __bool__(self) -> bool:
        return self.unknown + self.teacher_unknown > 0

    def __str__(self) -> str:
        own = self.unknown / max(1, self.tokens)
        other = self.teacher_unknown / max(1, self.teacher_tokens)
        return (
            f"{own:.2%} of the student's tokens and {other:.2%} of the teacher's are unknown "
            "tokens; chunks with one are not distilled"
        )


@dataclass(frozen=True)
class AlignedDocument:
    """A document, or a piece of a long one, in the tokens of both models.

    flags_n: uint8, loss masks and weights of the student's tokens as labels, as in `Sample`;
    distillation trains those in chunks. None: cross-entropy trains all. unknown: of the tokens.
    places_m2: int32, record and position in a store that predict each token of the teacher, -1 for
    none, `NOT_WANTED` where no term takes a record. student_places_nk2 has the same of the
    student's tokens in k stores. None: records are not found by documents.
    """

    student: Side
    teacher: Side
    flags_n: NDArray[np.uint8] | None = None
    unknown: UnknownTokens = UnknownTokens()
    places_m2: NDArray[np.int32] | None = None
    student_places_nk2: NDArray[np.int32] | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks, the same on both sides."""
        return len(self.student.cuts) - 1

    def part(self, first: int, stop: int) -> AlignedDocument:
        """The cells [first, stop) as a document; see `Side.part`."""
        flags_n = self.flags_n
        if flags_n is not None:
            flags_n = flags_n[self.student.tokens(first, stop)]
        places_m2, student_places_nk2 = self.places_m2, self.student_places_nk2
        if places_m2 is not None:
            places_m2 = places_m2[self.teacher.tokens(first, stop)]
        if student_places_nk2 is not None:
            student_places_nk2 = student_places_nk2[self.student.tokens(first, stop)]
        return AlignedDocument(
            self.student.part(first, stop),
            self.teacher.part(first, stop),
            flags_n,
            places_m2=places_m2,
            student_places_nk2=student_places_nk2,
        )

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

    def fitting_before_end(self, room: NDArray[np.int64]) -> int:
        """The first of the last cells that fit into the room of both sides, with their context.

        The number of cells if none fits. For a document that does not fit as a whole.
        """
        firsts = []
        for side, free in zip((self.student, self.teacher), room, strict=True):
            start = side.cuts[-1] - free + 1
            firsts.append(int(np.searchsorted(side.cuts, start, side="left")))
        return min(self.chunks, max(1, *firsts))


@dataclass(frozen=True)
class PairEncoder:
    """Tokenises texts twice and aligns the tokens by their bytes; picklable, for worker processes.

    The end-of-document tokens of both tokenizers are a chunk of their own where a text ends. Chunks
    with an unknown token are left out.
    begins: the id before each document on both sides, in no chunk; None for none.
    """

    student: Tokenizer
    teacher: Tokenizer
    begins: tuple[int | None, int | None] = (None, None)

    def __call__(
        self, texts: Sequence[str], ends: Sequence[bool], *, starts: Sequence[bool] | None = None
    ) -> list[AlignedDocument | DataError]:
        """The aligned document of each text, or why it cannot be encoded or its tokens aligned.

        ends, starts: whether a document ends behind the text, and begins with it; None: all begin.
        """
        students = encoded_or_refused(self.student, texts)
        teachers = encoded_or_refused(self.teacher, texts)
        rows = zip(texts, ends, starts or [True] * len(texts), students, teachers, strict=True)
        return [
            self._aligned(text, (is_start, is_end), own, other)
            for text, is_end, is_start, own, other in rows
        ]

    def _aligned(
        self,
        text: str,
        edges: tuple[bool, bool],
        student_n: NDArray[np.int32] | DataError,
        teacher_n: NDArray[np.int32] | DataError,
    ) -> AlignedDocument | DataError:
        is_start, is_end = edges
        if isinstance(student_n, DataError):
            return student_n
        if isinstance(teacher_n, DataError):
            return teacher_n
        try:
            own, others = (
                continued_spans(tokenizer, ids_n, text)
                for tokenizer, ids_n in ((self.student, student_n), (self.teacher, teacher_n))
            )
            chunks = align_spans(own[0], others[0]).continued(own[1], others[1])
        except DataError as error:
            return error
        if text and not len(chunks):
            return DataError("the tokenizers share no boundary inside it")
        unknown = is_unknown(self.student, student_n), is_unknown(self.teacher, teacher_n)
        chunks = chunks.without(*unknown)
        if text and not len(chunks):
            return DataError("each of its chunks has an unknown token")
        student = Side.of_chunks(student_n, _numbers(chunks.student, *own))
        teacher = Side.of_chunks(teacher_n, _numbers(chunks.teacher, *others))
        if is_end:
            student = student.with_end(self.student.eos_id)
            teacher = teacher.with_end(self.teacher.eos_id)
        if is_start:
            student, teacher = (
                side if begin is None else side.with_begin(begin)
                for side, begin in zip((student, teacher), self.begins, strict=True)
            )
        return AlignedDocument(student, teacher, unknown=UnknownTokens.of(*unknown))


def is_unknown(tokenizer: Tokenizer, ids_n: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Whether each token stands for a text that the vocabulary lacks."""
    if tokenizer.unknown_id is None:
        return np.zeros(len(ids_n), np.bool_)
    return ids_n == tokenizer.unknown_id


def _numbers(
    ranges_c2: NDArray[np.int64], spans_n2: NDArray[np.int64], continues_n: NDArray[np.bool_]
) -> NDArray[np.int32]:
    return chunk_numbers(ranges_c2, spans_n2, continues_n).astype(np.int32)
