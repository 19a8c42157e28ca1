"""Which tokens of a student's and a teacher's vocabulary stand for the same bytes.

A vocabulary map holds exact pairs (equal bytes, or one role among the special tokens) and one
projection row per student token. A row has the teacher's tokens of the same bytes, with weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_distill.errors import DataError, counted

__all__ = [
    "MOST_PIECES",
    "ROW_TOLERANCE",
    "CommonTokenRule",
    "Evidence",
    "MapColumns",
    "VocabularyMap",
    "VocabularySide",
    "piece_weights",
]

CommonTokenRule = Literal["strict", "relaxed"]

# The ninth weight is 9e-9 of the row, which fp32 does not resolve beside the first.
MOST_PIECES: Final = 8
ROW_TOLERANCE: Final = 1e-6
# Weight of a row's best teacher token from which `relaxed` takes the two as one.
RELAXED_WEIGHT: Final = 0.6


class Evidence(IntEnum):
    """Why a student token has its projection row, or has none."""

    NO_TOKEN = 0
    """The id stands for no token; no row."""
    SPECIAL = 1
    """A special token without a partner; no row."""
    HOLE = 2
    """No tokens of the teacher have its bytes; no row."""
    ROLE = 3
    """A special token, paired with the teacher's special token of its role."""
    EXACT = 4
    """An ordinary token, paired one to one with a teacher token of equal bytes."""
    SHARED = 5
    """A teacher token has its bytes, but is the pair of another student token."""
    ENCODED = 6
    """The teacher's tokenizer encodes its text as tokens of exactly these bytes."""
    SPELLED = 7
    """Spelled with the fewest teacher tokens of these bytes, which no encoding gives."""


WITHOUT_ROW: Final = (Evidence.NO_TOKEN, Evidence.SPECIAL, Evidence.HOLE)
PAIRED: Final = (Evidence.ROLE, Evidence.EXACT)


@dataclass(frozen=True)
class VocabularySide:
    """One tokenizer of a map: its name, its identity and its real vocabulary size.

    collisions: its tokens whose bytes a preferred token of the same vocabulary has as well.
    """

    name: str
    identity: str
    size: int
    collisions: int = 0


class MapColumns(NamedTuple):
    """The part of a vocabulary map for the student columns [start, stop), as plain arrays.

    columns_p int64: columns of common tokens, counted from `start`; teacher_ids_p int64: their
    teacher ids. Row i of the projection, of student id start + i, is row_teacher_ids_n and
    row_weights_n (fp32) from row_offsets[i] to row_offsets[i + 1] (int64).
    """

    columns_p: NDArray[np.int64]
    teacher_ids_p: NDArray[np.int64]
    row_offsets: NDArray[np.int64]
    row_teacher_ids_n: NDArray[np.int64]
    row_weights_n: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class VocabularyMap:
    """Exact pairs and projection rows of two vocabularies; `check` holds for every instance.

    student_ids_p, teacher_ids_p int64: pairs, by student id. row_offsets int64 [V_s + 1],
    row_teacher_ids_n int64, row_weights_n fp32: projection rows; within a row the first piece comes
    first. evidence_V uint8 [V_s]: an `Evidence` per student id. pieces_V int32 [V_s]: how many
    teacher tokens spell the token, 0 without a row. special_pairs: spellings of paired special
    tokens beyond the roles. Raises DataError where the parts do not fit together.
    """

    student: VocabularySide
    teacher: VocabularySide
    student_ids_p: NDArray[np.int64]
    teacher_ids_p: NDArray[np.int64]
    row_offsets: NDArray[np.int64]
    row_teacher_ids_n: NDArray[np.int64]
    row_weights_n: NDArray[np.float32]
    evidence_V: NDArray[np.uint8]
    pieces_V: NDArray[np.int32]
    special_pairs: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check(self)

    @property
    def holes(self) -> NDArray[np.int64]:
        """Student ids whose bytes no tokens of the teacher have, int64 [N]."""
        return np.flatnonzero(self.evidence_V == Evidence.HOLE)

    @property
    def exact_pairs(self) -> int:
        """The number of pairs of ordinary tokens; pairs of special tokens are not counted."""
        return int((self.evidence_V == Evidence.EXACT).sum())

    def counts(self) -> Mapping[Evidence, int]:
        """Return the number of student ids of each kind of evidence."""
        found = np.bincount(self.evidence_V, minlength=len(Evidence))
        return {kind: int(found[kind]) for kind in Evidence}

    def row(self, student_id: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Teacher ids and weights of a student token, both empty without a row."""
        part = slice(self.row_offsets[student_id], self.row_offsets[student_id + 1])
        return self.row_teacher_ids_n[part], self.row_weights_n[part]

    def common(
        self, partition: CommonTokenRule = "strict"
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Student and teacher ids of common tokens, int64 [P], one to one, by student id.

        strict: the exact pairs. relaxed: also tokens whose best weight is at least 0.6. Of several
        for one teacher token the highest weight counts, then an exact pair, then the lowest id.
        """
        if partition == "strict":
            return self.student_ids_p, self.teacher_ids_p
        rows = np.flatnonzero(np.diff(self.row_offsets))
        best = np.maximum.reduceat(self.row_weights_n, self.row_offsets[rows])
        # The first place of each row's best weight.
        row_n = np.repeat(np.arange(len(rows)), np.diff(self.row_offsets)[rows])
        places = np.flatnonzero(self.row_weights_n == best[row_n])
        places = places[np.unique(row_n[places], return_index=True)[1]]
        is_near = best >= RELAXED_WEIGHT
        rows, teacher = rows[is_near], self.row_teacher_ids_n[places[is_near]]
        is_pair = np.isin(self.evidence_V[rows], PAIRED)
        order = np.lexsort((rows, ~is_pair, -best[is_near], teacher))
        first = order[np.unique(teacher[order], return_index=True)[1]]
        first = first[np.argsort(rows[first])]
        return rows[first].astype(np.int64), teacher[first]

    def student_to_teacher(self, partition: CommonTokenRule = "strict") -> NDArray[np.int64]:
        """Return the teacher id of every student id, int64 [V_s], -1 for uncommon tokens."""
        found_V = np.full(self.student.size, -1, np.int64)
        student_ids, teacher_ids = self.common(partition)
        found_V[student_ids] = teacher_ids
        return found_V

    def uncommon_teacher_ids(self, partition: CommonTokenRule = "strict") -> NDArray[np.int64]:
        """Teacher ids without a common token, ascending, int64 [N]."""
        return self._others(self.common(partition)[1])

    @property
    def unreached_teacher_ids(self) -> NDArray[np.int64]:
        """Teacher ids in no projection row, ascending, int64 [N]; they are in the rest class."""
        return self._others(self.row_teacher_ids_n)

    def _others(self, teacher_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        is_other = np.ones(self.teacher.size, bool)
        is_other[teacher_ids] = False
        return np.flatnonzero(is_other)

    def columns(
        self, start: int, stop: int, *, partition: CommonTokenRule = "strict"
    ) -> MapColumns:
        """Return the part for the student columns [start, stop) of a vocabulary shard.

        Columns beyond the real vocabulary are padding: they are uncommon, and their rows are empty.
        """
        assert 0 <= start <= stop, "a range of columns"
        student_ids, teacher_ids = self.common(partition)
        part = slice(*np.searchsorted(student_ids, (start, stop)))
        real = np.arange(start, stop + 1).clip(max=self.student.size)
        offsets = self.row_offsets[real]
        rows = slice(offsets[0], offsets[-1])
        return MapColumns(
            student_ids[part] - start,
            teacher_ids[part],
            offsets - offsets[0],
            self.row_teacher_ids_n[rows],
            self.row_weights_n[rows],
        )


def piece_weights(pieces: int) -> NDArray[np.float32]:
    """Weights of a token's first pieces, fp32 [min(pieces, 8)]: 0.9 * 0.1^i, of sum 1.

    Source: the projection matrices of X-Token (arXiv 2605.21699).
    """
    weights = 0.9 * 0.1 ** np.arange(min(pieces, MOST_PIECES))
    found: NDArray[np.float32] = (weights / weights.sum()).astype(np.float32)
    return found


def check(vocabulary_map: VocabularyMap) -> None:
    """Raise DataError for a map whose parts do not fit together."""
    for problem in (_shape_problem, _pair_problem, _row_problem, _evidence_problem):
        found = problem(vocabulary_map)
        if found is not None:
            raise DataError(found)


def _shape_problem(given: VocabularyMap) -> str | None:
    size, offsets = given.student.size, given.row_offsets
    wanted = {
        "student_ids_p": (np.int64, given.student_ids_p.shape[:1]),
        "teacher_ids_p": (np.int64, given.student_ids_p.shape[:1]),
        "row_offsets": (np.int64, (size + 1,)),
        "row_teacher_ids_n": (np.int64, given.row_teacher_ids_n.shape[:1]),
        "row_weights_n": (np.float32, given.row_teacher_ids_n.shape[:1]),
        "evidence_V": (np.uint8, (size,)),
        "pieces_V": (np.int32, (size,)),
    }
    for name, (kind, shape) in wanted.items():
        array = getattr(given, name)
        if array.dtype != kind or array.shape != shape:
            return (
                f"{name} is {array.dtype} {list(array.shape)}, not {np.dtype(kind)} {list(shape)}"
            )
    if offsets[0] != 0 or offsets[-1] != len(given.row_weights_n) or (np.diff(offsets) < 0).any():
        return f"row_offsets do not rise from 0 to {len(given.row_weights_n):,}, the row entries"
    return None


def _pair_problem(given: VocabularyMap) -> str | None:
    sides = (
        ("student", given.student_ids_p, given.student.size),
        ("teacher", given.teacher_ids_p, given.teacher.size),
        ("teacher", given.row_teacher_ids_n, given.teacher.size),
    )
    for side, ids, size in sides:
        outside = ids[(ids < 0) | (ids >= size)]
        if len(outside):
            return f"{side} id {outside[0]} is outside of its vocabulary of {size:,}"
    if (np.diff(given.student_ids_p) <= 0).any():
        return "the student ids of the pairs do not rise"
    if len(np.unique(given.teacher_ids_p)) < len(given.teacher_ids_p):
        return "two student tokens are paired with one teacher token"
    return None


def _row_problem(given: VocabularyMap) -> str | None:
    lengths_V = np.diff(given.row_offsets)
    row_n = np.repeat(np.arange(given.student.size), lengths_V)
    bad = row_n[~(given.row_weights_n > 0)]
    if len(bad):
        return f"student id {bad[0]} has a weight that is not positive"
    sums_V = np.zeros(given.student.size)
    np.add.at(sums_V, row_n, given.row_weights_n.astype(np.float64))
    bad = np.flatnonzero((lengths_V > 0) & ~(np.abs(sums_V - 1) <= ROW_TOLERANCE))
    if len(bad):
        return f"the row of student id {bad[0]} sums to {sums_V[bad[0]]:.7f}, not to 1"
    cells = np.sort(row_n * np.int64(given.teacher.size) + given.row_teacher_ids_n)
    bad = cells[1:][cells[1:] == cells[:-1]]
    if len(bad):
        return f"the row of student id {bad[0] // given.teacher.size} repeats a teacher id"
    return None


def _evidence_problem(given: VocabularyMap) -> str | None:
    evidence_V, lengths_V = given.evidence_V, np.diff(given.row_offsets)
    if (evidence_V >= len(Evidence)).any():
        return f"evidence {evidence_V.max()} is unknown"
    is_without = np.isin(evidence_V, WITHOUT_ROW)
    for bad, text in (
        (is_without != (lengths_V == 0), "has a row without evidence, or evidence without a row"),
        (is_without != (given.pieces_V == 0), "has pieces without a row, or a row without pieces"),
        (lengths_V > given.pieces_V, "has a row longer than its number of pieces"),
    ):
        if bad.any():
            number = int(np.flatnonzero(bad)[0])
            return f"student id {number} {text} ({Evidence(evidence_V[number]).name})"
    if not np.array_equal(np.flatnonzero(np.isin(evidence_V, PAIRED)), given.student_ids_p):
        return "the pairs are not the tokens with evidence of a pair"
    starts = given.row_offsets[given.student_ids_p]
    if (lengths_V[given.student_ids_p] != 1).any() or (
        given.row_teacher_ids_n[starts] != given.teacher_ids_p
    ).any():
        return "a pair's projection row is not its teacher token alone"
    if given.exact_pairs == 0:
        return (
            f"{given.student.name} and {given.teacher.name}: no token of the student "
            f"({counted(given.student.size, 'id')}) has the bytes of one of the teacher "
            f"({counted(given.teacher.size, 'id')}). Take tokenizers of the same kind of text"
        )
    return None
