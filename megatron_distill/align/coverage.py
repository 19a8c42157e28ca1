"""Coverage: of two tokenizations by chunks, and of two vocabularies by a map."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_distill.align.build_map import MappedTokenizer
from megatron_distill.align.chunks import Chunks, Ints, chunk_numbers
from megatron_distill.align.vocabulary_map import PAIRED, WITHOUT_ROW, VocabularyMap

__all__ = [
    "Coverage",
    "SideCoverage",
    "TextCoverage",
    "chunks_that_fit",
    "coverage",
    "differing_rows",
    "text_coverage",
]

Flags = NDArray[np.bool_]


def chunks_that_fit(chunks: Chunks, *, student_length: int, teacher_length: int) -> int:
    """How many of the first chunks end within the first tokens of both sides.

    student_length, teacher_length: numbers of tokens. Cut both sides behind the last of these
    chunks, and no side has a tail that the other one lacks.
    """
    return min(
        int(np.searchsorted(ranges_C2[:, 1], length, side="right"))
        for ranges_C2, length in (
            (chunks.student, student_length),
            (chunks.teacher, teacher_length),
        )
    )


@dataclass(frozen=True)
class SideCoverage:
    """Tokens, bytes and labels of one side, and those of them that are in chunks.

    Bytes are those that tokens cover. Labels are the tokens that a loss is asked of. Unknown tokens
    stand for text that the vocabulary lacks.
    """

    tokens: int = 0
    aligned_tokens: int = 0
    bytes: int = 0
    aligned_bytes: int = 0
    labels: int = 0
    aligned_labels: int = 0
    unknown: int = 0

    def merge(self, other: SideCoverage) -> SideCoverage:
        """The sums of both."""
        names = [field.name for field in fields(SideCoverage)]
        return SideCoverage(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True)
class Coverage:
    """Sums over texts of both sides, and of their chunks by the numbers of tokens.

    one_to_many: one token of the student, several of the teacher. trained_chunks: all of whose
    tokens are labels on both sides. largest_student, largest_teacher: tokens of the largest chunk.
    """

    student: SideCoverage = SideCoverage()
    teacher: SideCoverage = SideCoverage()
    texts: int = 0
    texts_without_chunks: int = 0
    chunks: int = 0
    trained_chunks: int = 0
    one_to_one: int = 0
    one_to_many: int = 0
    many_to_one: int = 0
    many_to_many: int = 0
    largest_student: int = 0
    largest_teacher: int = 0

    def merge(self, other: Coverage) -> Coverage:
        """The figures of both together."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        return replace(
            self,
            student=self.student.merge(other.student),
            teacher=self.teacher.merge(other.teacher),
            largest_student=max(self.largest_student, other.largest_student),
            largest_teacher=max(self.largest_teacher, other.largest_teacher),
            **sums,
        )


_SUMMED: Final = (
    "texts", "texts_without_chunks", "chunks", "trained_chunks",
    "one_to_one", "one_to_many", "many_to_one", "many_to_many",
)  # fmt: skip


def coverage(
    chunks: Chunks,
    student_spans_N2: Ints,
    teacher_spans_M2: Ints,
    *,
    student_labels_N: Flags | None = None,
    teacher_labels_M: Flags | None = None,
) -> Coverage:
    """The figures of one text.

    spans: int64, byte ranges. labels: whether each token is the label of a loss; None for all but
    the first token, which has no position before it.
    """
    sides: list[SideCoverage] = []
    counts: list[Ints] = []
    trained_C = np.ones(len(chunks), np.bool_)
    for ranges_C2, spans_N2, labels_N in (
        (chunks.student, student_spans_N2, student_labels_N),
        (chunks.teacher, teacher_spans_M2, teacher_labels_M),
    ):
        labels_N = np.arange(len(spans_N2)) > 0 if labels_N is None else labels_N
        chunk_N = chunk_numbers(ranges_C2, spans_N2)
        inside_N = chunk_N >= 0
        bytes_N = spans_N2[:, 1] - spans_N2[:, 0]
        sides.append(
            SideCoverage(
                tokens=len(spans_N2),
                aligned_tokens=int(np.count_nonzero(inside_N)),
                bytes=int(bytes_N.sum()),
                aligned_bytes=int(bytes_N[inside_N].sum()),
                labels=int(np.count_nonzero(labels_N)),
                aligned_labels=int(np.count_nonzero(labels_N & inside_N)),
            )
        )
        counts.append(np.bincount(chunk_N[inside_N], minlength=len(chunks)))
        trained_C[chunk_N[inside_N & ~labels_N]] = False
    one_student, one_teacher = (count_C == 1 for count_C in counts)
    return Coverage(
        student=sides[0],
        teacher=sides[1],
        texts=1,
        texts_without_chunks=int(len(chunks) == 0),
        chunks=len(chunks),
        trained_chunks=int(np.count_nonzero(trained_C)),
        one_to_one=int(np.count_nonzero(one_student & one_teacher)),
        one_to_many=int(np.count_nonzero(one_student & ~one_teacher)),
        many_to_one=int(np.count_nonzero(~one_student & one_teacher)),
        many_to_many=int(np.count_nonzero(~one_student & ~one_teacher)),
        largest_student=int(counts[0].max(initial=0)),
        largest_teacher=int(counts[1].max(initial=0)),
    )


_TEXTS: Final = 64


@dataclass(frozen=True)
class TextCoverage:
    """Tokens of a text under both tokenizers.

    *_tokens: all. *_paired: those with an exact pair. student_in_rows: those with a projection row;
    teacher_in_rows: those that a row reaches.
    """

    bytes: int
    student_tokens: int
    student_paired: int
    student_in_rows: int
    teacher_tokens: int
    teacher_paired: int
    teacher_in_rows: int


def text_coverage(
    found: VocabularyMap,
    student: MappedTokenizer,
    teacher: MappedTokenizer,
    texts: Iterable[str],
) -> TextCoverage:
    """Count a text's tokens in pairs and in rows. Raises DataError as the tokenizers do."""
    is_paired_t = np.zeros(found.teacher.size, bool)
    is_paired_t[found.teacher_ids_p] = True
    is_reached_t = np.ones(found.teacher.size, bool)
    is_reached_t[found.unreached_teacher_ids] = False
    is_paired_s = np.isin(found.evidence_V, PAIRED)
    is_in_row_s = ~np.isin(found.evidence_V, WITHOUT_ROW)
    size = 0
    student_V = np.zeros(found.student.size, np.int64)
    teacher_V = np.zeros(found.teacher.size, np.int64)
    for some in _batched(texts):
        size += sum(len(text.encode()) for text in some)
        for tokenizer, counts_V in ((student, student_V), (teacher, teacher_V)):
            for ids_n in tokenizer.encode_batch(some):
                counts_V += np.bincount(ids_n, minlength=len(counts_V))
    return TextCoverage(
        bytes=size,
        student_tokens=int(student_V.sum()),
        student_paired=int(student_V[is_paired_s].sum()),
        student_in_rows=int(student_V[is_in_row_s].sum()),
        teacher_tokens=int(teacher_V.sum()),
        teacher_paired=int(teacher_V[is_paired_t].sum()),
        teacher_in_rows=int(teacher_V[is_reached_t].sum()),
    )


def _batched(texts: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(texts)
    while some := list(islice(remaining, _TEXTS)):
        yield some


def differing_rows(first: VocabularyMap, second: VocabularyMap) -> NDArray[np.int64]:
    """Student ids whose pair, evidence or projection row differ, for maps of equal vocabularies."""
    assert first.student.size == second.student.size, "maps of one student"
    differs_V = first.evidence_V != second.evidence_V
    differs_V |= first.pieces_V != second.pieces_V
    differs_V |= first.student_to_teacher() != second.student_to_teacher()
    lengths_V = np.diff(first.row_offsets)
    differs_V |= lengths_V != np.diff(second.row_offsets)
    # The remaining rows have equal lengths: compare them entry by entry.
    same_n = np.repeat(~differs_V, lengths_V)
    same_m = np.repeat(~differs_V, np.diff(second.row_offsets))
    unequal = first.row_teacher_ids_n[same_n] != second.row_teacher_ids_n[same_m]
    unequal |= first.row_weights_n[same_n] != second.row_weights_n[same_m]
    row_n = np.repeat(np.arange(len(lengths_V)), lengths_V)[same_n]
    differs_V[row_n[unequal]] = True
    return np.flatnonzero(differs_V)
