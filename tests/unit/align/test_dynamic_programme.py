"""The dynamic programme that the benchmark of alignment runs: scores and groups of known texts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.align import programme

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
