"""Chunks of two tokenizations, token by token."""

from __future__ import annotations

from collections.abc import Sequence

Range = tuple[int, int]


def chunks_of(student: Sequence[Range], teacher: Sequence[Range]) -> list[tuple[Range, Range]]:
    """Cut at every byte at which a token with text ends on both sides.

    Each chunk's ranges go from its first to behind its last token with text.
    """
    ends = {stop for start, stop in student if start < stop}
    ends &= {stop for start, stop in teacher if start < stop}
    found: list[tuple[Range, Range]] = []
    before = 0
    for end in sorted(ends):
        sides: list[Range] = []
        for spans in (student, teacher):
            inside = [
                index
                for index, (start, stop) in enumerate(spans)
                if start < stop and before < stop <= end
            ]
            sides.append((inside[0], inside[-1] + 1))
        found.append((sides[0], sides[1]))
        before = end
    return found
