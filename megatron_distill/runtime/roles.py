"""Roles of a launch: ranks that train the student, and ranks that only run a teacher."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = ["STUDENT", "Role", "Roles"]

STUDENT: Final = "student"
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
    """The division of a launch of `size` ranks: first the student's, then those of each teacher.

    `teacher_ranks`: name and number of ranks of each teacher with ranks of its own, in the order of
    the ranks. The names are configuration keys. Without them every rank is of one world, and ranks
    are named by their number alone.
    """

    size: int
    teacher_ranks: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        assert all(ranks > 0 for _, ranks in self.teacher_ranks), self.teacher_ranks
        assert self.student.size > 0, self

    @property
    def are_split(self) -> bool:
        """Whether a teacher has ranks of its own."""
        return bool(self.teacher_ranks)

    @property
    def student(self) -> Role:
        """The ranks that train the student."""
        return Role(STUDENT, 0, self.size - sum(ranks for _, ranks in self.teacher_ranks))

    @property
    def teachers(self) -> tuple[Role, ...]:
        """The ranks that run one teacher only, for each teacher with ranks of its own."""
        found, first = [], self.student.size
        for name, ranks in self.teacher_ranks:
            found.append(Role(name, first, ranks))
            first += ranks
        return tuple(found)

    def teacher(self, name: str) -> Role:
        """Return the ranks that run a teacher only, by its key in the configuration."""
        (found,) = [role for role in self.teachers if role.name == name]
        return found

    def of(self, rank: int) -> Role:
        """Return the role of a rank of the launch."""
        (found,) = [role for role in (self.student, *self.teachers) if rank in role.ranks]
        return found

    def name(self, rank: int) -> str:
        """Return the name of a rank in messages: `rank 3`, or `teacher.1` with several roles."""
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
