"""Chunks of one text in two tokenizers, and the dynamic programme that finds them."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.align import programme
from megatron_distill.align import (
    Chunks,
    Coverage,
    align_spans,
    chunk_numbers,
    chunks_that_fit,
    coverage,
)
from tests.reference.alignment import Range, chunks_of


def of_lengths(*lengths: int) -> list[Range]:
    return list(pairwise(accumulate(lengths, initial=0)))


def pairs(chunks: Chunks) -> list[tuple[Range, Range]]:
    assert chunks.student.dtype == chunks.teacher.dtype == np.int64
    ranges = zip(chunks.student.tolist(), chunks.teacher.tolist(), strict=True)
    return [((a, b), (c, d)) for (a, b), (c, d) in ranges]


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [
        ([(0, 2), (2, 11)], [(0, 2), (2, 6), (6, 11)], [((0, 1), (0, 1)), ((1, 2), (1, 3))]),
        ([(0, 3), (3, 5)], [(0, 2), (2, 5)], [((0, 2), (0, 2))]),
        ([(0, 2), (2, 4), (4, 6)], [(0, 2), (2, 5)], [((0, 1), (0, 1))]),
        (of_lengths(2, 3), of_lengths(1, 1, 1, 2), [((0, 1), (0, 2)), ((1, 2), (2, 4))]),
        (
            of_lengths(5, 1, 3, 4),
            of_lengths(3, 3, 1, 2, 2, 2),
            [((0, 2), (0, 2)), ((2, 3), (2, 4)), ((3, 4), (4, 6))],
        ),
        # [ab, c] and [a, b, c]; [un, happiness] and [un, happ, iness]; [a, b, cd] and [ab, c, d];
        # [aa] and [a, a]; [x, b] and [y, b], whose first tokens are of other text
        (of_lengths(2, 1), of_lengths(1, 1, 1), [((0, 1), (0, 2)), ((1, 2), (2, 3))]),
        (of_lengths(2, 9), of_lengths(2, 4, 5), [((0, 1), (0, 1)), ((1, 2), (1, 3))]),
        (of_lengths(1, 1, 2), of_lengths(2, 1, 1), [((0, 2), (0, 1)), ((2, 3), (1, 3))]),
        (of_lengths(2), of_lengths(1, 1), [((0, 1), (0, 2))]),
        (of_lengths(1, 1), of_lengths(1, 1), [((0, 1), (0, 1)), ((1, 2), (1, 2))]),
        # [ab, cd] and [abc, d]; [abcde] and [a, b, c, d, e]; [x, y] and [z] of other lengths
        (of_lengths(2, 2), of_lengths(3, 1), [((0, 2), (0, 2))]),
        (of_lengths(5), of_lengths(1, 1, 1, 1, 1), [((0, 1), (0, 5))]),
        (of_lengths(1, 1), of_lengths(3), []),
        # begin and end of text, written as their tokenizers do, and a token without text inside
        (
            [(0, 0), (0, 3), (3, 3), (3, 5), (0, 0)],
            [(0, 2), (2, 2), (2, 3), (3, 5), (5, 5)],
            [((1, 2), (0, 3)), ((3, 4), (3, 4))],
        ),
        # the space between words is of no token on one side
        ([(0, 5), (6, 11)], [(0, 5), (5, 11)], [((0, 1), (0, 1)), ((1, 2), (1, 2))]),
        ([], [(0, 2)], []),
        ([], [], []),
    ],
)
def test_chunks_by_hand(
    student: list[Range], teacher: list[Range], expected: list[tuple[Range, Range]]
) -> None:
    assert pairs(align_spans(student, teacher)) == expected
    swapped = [(right, left) for left, right in expected]
    assert pairs(align_spans(np.array(teacher, np.int32), student)) == swapped
    assert chunks_of(student, teacher) == expected


@st.composite
def tokenizations(draw: st.DrawFn) -> tuple[list[Range], list[Range]]:
    """Two ways to cut some bytes, with tokens without text, gaps, and a side that ends early."""
    sides: list[list[Range]] = []
    total = draw(st.integers(0, 60))
    for _ in range(2):
        end = draw(st.integers(max(0, total - 5), total))
        cuts = sorted(draw(st.sets(st.integers(0, end))) | {0, end})
        spans: list[Range] = []
        for start, stop in pairwise(cuts):
            spans += [(start, start)] * draw(st.integers(0, 2))
            if draw(st.integers(0, 12)) != 7:
                spans.append((start, stop))
        sides.append(spans + [(end, end)] * draw(st.integers(0, 2)))
    return sides[0], sides[1]


@settings(max_examples=50, deadline=None)
@given(sides=tokenizations())
def test_chunks_are_those_of_the_slow_reference(sides: tuple[list[Range], list[Range]]) -> None:
    student, teacher = sides
    chunks = align_spans(student, teacher)
    assert pairs(chunks) == chunks_of(student, teacher)
    for spans, ranges_C2 in ((student, chunks.student), (teacher, chunks.teacher)):
        spans_N2 = np.array(spans, np.int64).reshape(-1, 2)
        numbers = chunk_numbers(ranges_C2, spans_N2).tolist()
        expected = [-1] * len(spans)
        for chunk, (begin, end) in enumerate(ranges_C2.tolist()):
            for token in range(begin, end):
                if spans[token][0] < spans[token][1]:
                    expected[token] = chunk
        assert numbers == expected


def test_tokens_that_continue_characters_join_the_chunk_before_them() -> None:
    # A character of three tokens within and behind a chunk, and an added space behind it.
    student = np.array([(0, 2), (2, 2), (2, 5), (5, 5), (5, 5), (5, 6), (6, 6)])
    continues = np.array([0, 1, 0, 1, 1, 0, 0], bool)
    teacher = np.array([(0, 5), (5, 5), (5, 6)])
    chunks = align_spans(student, teacher)
    assert pairs(chunks) == [((0, 3), (0, 1)), ((5, 6), (2, 3))]
    whole = chunks.continued(continues, np.array([0, 1, 0], bool))
    assert pairs(whole) == [((0, 5), (0, 2)), ((5, 6), (2, 3))]
    numbers = chunk_numbers(whole.student, student, continues)
    assert numbers.tolist() == [0, 0, 0, 0, 0, 1, -1]
    assert chunk_numbers(whole.student, student).tolist() == [0, -1, 0, -1, -1, 1, -1]
    unknown = np.arange(7) == 4  # one of the tokens that continue
    assert pairs(whole.without(unknown, np.zeros(3, bool))) == [((5, 6), (2, 3))]
    assert len(chunks.first(0).continued(continues, np.zeros(3, bool))) == 0


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 2), (-1, 3)], r"teacher_spans\[1\] is \[-1, 3\]: a byte cannot be negative"),
        ([(0, 2), (4, 3)], r"teacher_spans\[1\] is \[4, 3\]: it ends before it starts"),
        ([(0, 2), (2, 2), (1, 3)], r"teacher_spans\[2\] is \[1, 3\] after \[0, 2\]: the two over"),
        ([(3, 5), (0, 3)], r"teacher_spans\[1\] is \[0, 3\] after \[3, 5\]: the spans do not asc"),
        ([(0.0, 2.0)], r"teacher_spans: float64 of shape \(1, 2\); give integers"),
        ([0, 2], r"teacher_spans: int64 of shape \(2,\); give integers of shape \[N, 2\]"),
    ],
)
def test_ranges_that_are_wrong_are_named(spans: list[Range], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        align_spans([(0, 2)], spans)


def test_both_sides_are_cut_behind_one_chunk() -> None:
    chunks = align_spans(of_lengths(2, 3, 4, 1), of_lengths(1, 1, 3, 2, 2, 1))
    assert pairs(chunks)[2] == ((2, 3), (3, 5))
    fits = [
        chunks_that_fit(chunks, student_length=student, teacher_length=teacher)
        for student, teacher in ((9, 9), (4, 5), (3, 9), (9, 4), (0, 9), (9, 1))
    ]
    assert fits == [4, 3, 3, 2, 0, 0]
    assert pairs(chunks.first(2)) == pairs(chunks)[:2]
    empty = align_spans([], [])
    assert chunks_that_fit(empty, student_length=5, teacher_length=5) == 0


def test_figures_of_one_text_and_their_sums() -> None:
    student = np.array([(0, 0), (0, 5), (5, 8), (8, 9), (9, 12)])
    teacher = np.array([(0, 3), (3, 5), (5, 8), (8, 12), (12, 14)])
    found = coverage(align_spans(student, teacher), student, teacher)
    side = found.student
    assert (side.tokens, side.aligned_tokens, side.bytes, side.aligned_bytes) == (5, 4, 12, 12)
    assert (side.labels, side.aligned_labels) == (4, 4)
    side = found.teacher
    assert (side.tokens, side.aligned_tokens, side.bytes, side.aligned_bytes) == (5, 4, 14, 12)
    # The first token of the teacher is no label, which leaves two chunks of three.
    assert (side.labels, side.aligned_labels) == (4, 3)
    assert (found.chunks, found.trained_chunks) == (3, 2)
    shapes = (found.one_to_one, found.one_to_many, found.many_to_one, found.many_to_many)
    assert shapes == (1, 1, 1, 0)
    assert (found.largest_student, found.largest_teacher) == (2, 2)
    labels = np.array([False, False, True, True, True])
    asked = coverage(
        align_spans(student, teacher), student, teacher,
        student_labels_N=labels, teacher_labels_M=labels,
    )  # fmt: skip
    assert (asked.trained_chunks, asked.student.labels, asked.teacher.aligned_labels) == (2, 3, 2)
    nothing = coverage(align_spans([], []), np.zeros((0, 2), int), np.zeros((0, 2), int))
    assert (nothing.texts, nothing.texts_without_chunks, nothing.chunks) == (1, 1, 0)
    both = found.merge(asked).merge(nothing)
    assert (both.texts, both.chunks, both.trained_chunks, both.one_to_many) == (3, 6, 4, 2)
    assert (both.student.tokens, both.teacher.aligned_bytes, both.largest_teacher) == (10, 24, 2)
    assert Coverage().merge(found) == found


# Tokens of both sides, the best score, and how many tokens of each side the groups have.
CASES = [
    ("ab c", "a b c", 6.0, [(1, 2), (1, 1)]),
    ("un happiness", "un happ iness", 6.0, [(1, 1), (1, 2)]),
    ("abc", "a b c", 4.5, [(1, 3)]),
    ("a b cd", "ab c d", 6.0, [(2, 1), (1, 2)]),
    ("aa", "a a", 3.0, [(1, 2)]),
    ("x b", "y b", 0.0, [(1, 1), (1, 1)]),
    # Other texts: a student's token alone, then two that differ.
    ("x y", "z", -4.5, [(1, 0), (1, 1)]),
    # Many to many, and more tokens than it joins: groups of other texts.
    ("ab cd", "abc d", -6.0, [(1, 1), (1, 1)]),
    ("abcde", "a b c d e", -9.0, None),
]


@pytest.mark.parametrize(("student", "teacher", "score", "groups"), CASES)
def test_scores_and_groups_are_those_of_the_recurrence(
    student: str, teacher: str, score: float, groups: list[tuple[int, int]] | None
) -> None:
    found, ends = programme(student.encode().split(), teacher.encode().split())
    assert found == score
    steps = [(after[0] - at[0], after[1] - at[1]) for at, after in pairwise([(0, 0), *ends[::-1]])]
    if groups is not None:
        assert steps == groups
    else:
        assert sorted(steps) == [(0, 1)] * 4 + [(1, 1)]
