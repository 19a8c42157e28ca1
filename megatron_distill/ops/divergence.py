"""The table of divergences between a teacher p and a student q over one vocabulary.

The student's logit gradient of every divergence follows from its slope ``s = dl/dq`` alone (see
`pushforward`). A row therefore says how its value is summed up over a shard and what its pull
``-q dl/dq`` is. Both work on shard exponentials ``e^(z/T - peak)``, which one normaliser per token
turns into probabilities, and may overwrite what they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import Tensor

__all__ = ["DIVERGENCES", "Divergence", "Model", "WeightedDivergence", "divergence_named"]

Model = Literal["student", "teacher"]


@dataclass(frozen=True)
class Divergence:
    """One row: a divergence that is an expectation of the log ratio ``log p - log q``.

    Attributes:
        name: what configurations call it.
        expectation: the model under which the log ratio is averaged. Its normaliser is also that of
            ``weighted_log_ratio`` and ``pull``.
        weighted_log_ratio: (student, teacher, log ratio) -> summands of the value, in place of the
            log ratio.
        pull: (student, teacher) -> ``-q dl/dq``.
        pull_total: the sum of the pull over the whole vocabulary.
    """

    name: str
    expectation: Model
    weighted_log_ratio: Callable[[Tensor, Tensor, Tensor], Tensor]
    pull: Callable[[Tensor, Tensor], Tensor]
    pull_total: float


@dataclass(frozen=True)
class WeightedDivergence:
    """A divergence of both models at one temperature, and its constant factor in the objective."""

    divergence: Divergence
    temperature: float
    coefficient: float

    @property
    def key(self) -> str:
        """What tells this term from others of one objective."""
        return f"{self.divergence.name}@{self.temperature}"


def _ratio_under_teacher(_student: Tensor, teacher: Tensor, log_ratio: Tensor) -> Tensor:
    return log_ratio.mul_(teacher)


def _teacher(_student: Tensor, teacher: Tensor) -> Tensor:
    return teacher


# sum p log(p/q): slope -p/q, so the pull is p itself and p/q is never formed.
_FORWARD_KL = Divergence(
    name="forward_kl",
    expectation="teacher",
    weighted_log_ratio=_ratio_under_teacher,
    pull=_teacher,
    pull_total=1.0,
)

DIVERGENCES: Mapping[str, Divergence] = MappingProxyType(
    {row.name: row for row in (_FORWARD_KL,)},
)


def divergence_named(name: str) -> Divergence:
    """The row of that name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in DIVERGENCES:
        known = ", ".join(sorted(DIVERGENCES))
        raise ValueError(f"unknown divergence {name!r}; known: {known}")
    return DIVERGENCES[name]
