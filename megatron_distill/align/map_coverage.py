"""How much of two vocabularies, and of a text's tokens, a vocabulary map covers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_distill.align.build_map import MappedTokenizer
from megatron_distill.align.vocabulary_map import PAIRED, WITHOUT_ROW, VocabularyMap

__all__ = ["TextCoverage", "differing_rows", "text_coverage"]

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
