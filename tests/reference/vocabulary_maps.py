"""Vocabulary maps from their definitions, one token at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def equal_bytes(student: Sequence[bytes | None], teacher: Sequence[bytes | None]) -> int:
    """The number of pairs of tokens of equal bytes, each token in one pair at most."""
    counts, its = Counter(filter(None, student)), Counter(filter(None, teacher))
    return sum(min(number, its[token]) for token, number in counts.items())


def can_be_spelled(token: bytes, tokens: frozenset[bytes]) -> bool:
    """Whether tokens one after another have these bytes."""
    reached = {0}
    for stop in range(1, len(token) + 1):
        if any(token[start:stop] in tokens for start in reached):
            reached.add(stop)
    return len(token) in reached


def dense_weights(pieces: Sequence[int], size: int) -> NDArray[np.float64]:
    """Row of the projection matrix of a token with these pieces: 0.9 * 0.1^i, of sum 1."""
    row = np.zeros(size)
    for place, number in enumerate(pieces):
        row[number] += 0.9 * 0.1**place
    return row / row.sum()


def relaxed_pairs(
    rows: Mapping[int, Mapping[int, float]], pairs: Mapping[int, int]
) -> dict[int, int]:
    """Student to teacher ids of tokens whose best weight is at least 0.6, one to one."""
    claims: dict[int, list[tuple[float, bool, int]]] = {}
    for student, row in rows.items():
        if row:
            best = max(row, key=lambda number: row[number])
            if row[best] >= 0.6:
                claims.setdefault(best, []).append((-row[best], student not in pairs, student))
    return {min(claim)[2]: teacher for teacher, claim in claims.items()}
