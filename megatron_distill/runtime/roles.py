"""Roles of a launch: ranks that train the student, and ranks that only run its teacher."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = ["STUDENT", "TEACHER", "Role", "Roles"]

STUDENT: Final = "student"
TEACHER: Final = "teacher"
_SHOWN: Final = 8


@dataclass(frozen=True)
class Role:
    """Consecutive ranks of a launch with a default process group of their own."""

    name: str
    first: int
    size: int

    @property
    def ranks(self) -> range:
        """The role's ranks in the launch."""
        return range(self.first, self.first + self.size)


@dataclass(frozen=True)
class Roles:
    """The division of a launch of `size` ranks: first the student's, then `teachers` ranks.

    Without teachers every rank is of one world, and ranks are named by their number alone.
    """

    size: int
    teachers: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.teachers < self.size, (self.teachers, self.size)

    @property
    def are_split(self) -> bool:
        """Whether the teacher has ranks of its own."""
        return self.teachers > 0

    @property
    def student(self) -> Role:
        """The ranks that train the student."""
        return Role(STUDENT, 0, self.size - self.teachers)

    @property
    def teacher(self) -> Role:
        """The ranks that run the teacher only."""
        return Role(TEACHER, self.size - self.teachers, self.teachers)

    def of(self, rank: int) -> Role:
        """Return the role of a rank of the launch."""
        return self.student if rank < self.student.size else self.teacher

    def name(self, rank: int) -> str:
        """Return the name of a rank in messages: `rank 3`, or `teacher.1` with two roles."""
        if not self.are_split:
            return f"rank {rank}"
        role = self.of(rank)
        return f"{role.name}.{rank - role.first}"

    def names(self, ranks: Iterable[int]) -> str:
        """Return the names of several ranks; of many the first only, with their number."""
        ranks = list(ranks)
        shown, more = ranks[:_SHOWN], len(ranks) - _SHOWN
        tail = f" and {more} more" if more > 0 else ""
        if self.are_split:
            return f"{', '.join(map(self.name, shown))}{tail}"
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, shown))}{tail}"
