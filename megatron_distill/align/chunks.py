"""Chunks: the smallest groups of student and teacher tokens that end at one byte of the text.

Tokens end at known bytes, so the common boundaries of two tokenizations are the common ends. The
tokens between two successive common boundaries are one chunk. Nothing is searched and nothing is
scored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Chunks", "align_spans", "checked_spans", "chunk_numbers", "chunks_of_ends"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Chunks:
    """Tokens of two sides that belong together.

    student, teacher: int64 `[C, 2]`, the half-open range of tokens of each chunk on each side. The
    ranges ascend and do not overlap. A range begins and ends with a token that has text. Tokens
    without text can lie inside a range where the text's tokens around them share a chunk; they
    belong to none; see `chunk_numbers`.
    """

    student: Ints
    teacher: Ints

    def __post_init__(self) -> None:
        assert self.student.shape == self.teacher.shape == (len(self.student), 2)

    def __len__(self) -> int:
        return len(self.student)

    def first(self, count: int) -> Chunks:
        """The first `count` chunks."""
        return Chunks(self.student[:count], self.teacher[:count])

    def continued(self, student_N: Bools, teacher_M: Bools) -> Chunks:
        """The chunks, each with the marked tokens of either side that follow it without a gap.

        Marked are tokens that continue the characters of the token with text before them, see
        `continued_spans`.
        """
        ranges = []
        for ranges_C2, marked in ((self.student, student_N), (self.teacher, teacher_M)):
            unmarked = np.flatnonzero(~np.append(marked, np.False_))
            stops_C = unmarked[np.searchsorted(unmarked, ranges_C2[:, 1])]
            ranges.append(np.stack([ranges_C2[:, 0], stops_C], axis=1))
        return Chunks(*ranges)

    def without(self, student_N: Bools, teacher_M: Bools) -> Chunks:
        """The chunks in whose ranges no token of either side is marked."""
        is_left_C = np.ones(len(self), np.bool_)
        for ranges_C2, marked in ((self.student, student_N), (self.teacher, teacher_M)):
            before = np.concatenate([np.zeros(1, np.int64), np.cumsum(marked)])
            is_left_C &= before[ranges_C2[:, 0]] == before[ranges_C2[:, 1]]
        return Chunks(self.student[is_left_C], self.teacher[is_left_C])


def align_spans(student_spans: ArrayLike, teacher_spans: ArrayLike) -> Chunks:
    """The minimal chunks of two tokenizations of one text, up to their last common boundary.

    student_spans, teacher_spans: integers `[N, 2]` and `[M, 2]`, the half-open byte range of each
    token in the text's UTF-8. start == stop: a token without text, which is in no chunk; its place
    in the text is not looked at. Bytes between two tokens belong to neither. Time is linear in
    N + M. Raises ValueError: not pairs of integers, a negative byte, a range that ends before it
    starts, ranges with text that overlap or do not ascend.
    """
    student_N2 = checked_spans(student_spans, "student_spans")
    teacher_M2 = checked_spans(teacher_spans, "teacher_spans")
    of_student, of_teacher = _with_text(student_N2), _with_text(teacher_M2)
    return chunks_of_ends(
        (of_student, student_N2[of_student, 1]), (of_teacher, teacher_M2[of_teacher, 1])
    )


def chunks_of_ends(
    student: tuple[Ints, Ints],
    teacher: tuple[Ints, Ints],
    *,
    first: tuple[Ints, Ints] | None = None,
) -> Chunks:
    """The chunks between common ends.

    student, teacher: indices of the tokens with text, and their ends, which ascend strictly. first:
    per such token of each side the place, among tokens with text, of the first one in reach of its
    chunk. None if all are.
    """
    (of_student, student_ends), (of_teacher, teacher_ends) = student, teacher
    _, last_student, last_teacher = np.intersect1d(
        student_ends, teacher_ends, assume_unique=True, return_indices=True
    )
    ranges = []
    for side, (indices, last_C) in enumerate(
        ((of_student, last_student), (of_teacher, last_teacher))
    ):
        begin_C = np.zeros_like(last_C)
        begin_C[1:] = last_C[:-1] + 1
        if first is not None:
            begin_C = np.maximum(begin_C, first[side][last_C])
        ranges.append(np.stack([indices[begin_C], indices[last_C] + 1], axis=1))
    return Chunks(*ranges)


def checked_spans(spans: ArrayLike, name: str) -> Ints:
    """Spans as int64 `[N, 2]`. Raises ValueError as `align_spans` does; `name` begins it."""
    found = np.asarray(spans)
    if found.size == 0:
        return np.zeros((0, 2), np.int64)
    if found.ndim != 2 or found.shape[1] != 2 or found.dtype.kind not in "iu":
        raise ValueError(
            f"{name}: {found.dtype} of shape {found.shape}; give integers of shape [N, 2], the "
            "first byte of each token and the byte after its last"
        )
    found = found.astype(np.int64, copy=False)
    starts, stops = found[:, 0], found[:, 1]
    if starts.min() < 0:
        index = int(np.argmax(starts < 0))
        raise ValueError(f"{name}[{index}] is {_shown(found, index)}: a byte cannot be negative")
    if np.any(stops < starts):
        index = int(np.argmax(stops < starts))
        raise ValueError(f"{name}[{index}] is {_shown(found, index)}: it ends before it starts")
    indices = _with_text(found)
    early = starts[indices[1:]] < stops[indices[:-1]]
    if early.any():
        place = int(np.argmax(early))
        before, index = (int(number) for number in indices[place : place + 2])
        overlaps = stops[index] > starts[before]
        raise ValueError(
            f"{name}[{index}] is {_shown(found, index)} after {_shown(found, before)}: "
            + ("the two overlap" if overlaps else "the spans do not ascend")
        )
    return found


def _shown(spans_N2: Ints, index: int) -> list[int]:
    return [int(number) for number in spans_N2[index]]


def _with_text(spans_N2: Ints) -> Ints:
    return np.flatnonzero(spans_N2[:, 0] < spans_N2[:, 1])


def chunk_numbers(ranges_C2: Ints, spans_N2: Ints, joins_N: Bools | None = None) -> Ints:
    """The chunk of each token of one side, int64 `[N]`; -1 for tokens in none.

    ranges_C2: `Chunks.student` or `Chunks.teacher`. spans_N2: int64, the spans of that side.
    joins_N: tokens without text that are in the chunk in whose range they stand; None: none are.
    """
    edges = np.zeros(len(spans_N2) + 1, np.int64)
    edges[ranges_C2[:, 0]] += 1
    edges[ranges_C2[:, 1]] -= 1
    inside = np.cumsum(edges[:-1]) > 0
    begins = np.zeros(len(spans_N2), np.int64)
    begins[ranges_C2[:, 0]] = 1
    is_part = spans_N2[:, 0] < spans_N2[:, 1]
    if joins_N is not None:
        is_part |= joins_N
    return np.where(inside & is_part, np.cumsum(begins) - 1, -1)
