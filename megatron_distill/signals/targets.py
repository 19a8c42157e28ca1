"""The conversion of a signal on few ids to the target of a term."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple, Protocol, Self

from torch import Tensor

__all__ = ["ClassDivergence", "IdGradient", "IdTarget", "Support", "TermView"]

# The classes of a divergence on few ids: the ids and all further ids as one more class, both models
# renormalised over the ids, or the raw sum over the ids.
Support = Literal["tail", "renormalized", "raw"]


class TermView(Protocol):
    """The fields of a term that decide whether it is defined on a signal."""

    @property
    def name(self) -> str:
        """Name in reports."""
        ...

    @property
    def divergence(self) -> str:
        """Name of the divergence."""
        ...

    @property
    def temperature(self) -> float:
        """Temperature of both softmaxes."""
        ...

    @property
    def top_k(self) -> int | None:
        """Number of ids to choose from a signal on the whole vocabulary."""
        ...

    @property
    def support(self) -> Support:
        """The classes of a divergence on few ids."""
        ...

    @property
    def is_forward_kl(self) -> bool:
        """Whether the divergence is linear in the teacher's probabilities."""
        ...


class IdGradient(NamedTuple):
    """Value and gradient of a divergence on K ids of each token, before weights and the factor 1/T.

    Attributes:
        value: ``[N]`` fp64.
        slope: ``[N]``, the gradient on a logit outside of the ids is ``slope * q_j``.
        inside: ``[N, K]``, the gradient on the logits of the ids.
        is_steep: whether the slope may be so large that the ids must be excluded from it exactly.
    """

    value: Tensor
    slope: Tensor
    inside: Tensor
    is_steep: bool


class ClassDivergence(Protocol):
    """A divergence between two distributions over the K ids, and the further ids as a class."""

    def __call__(
        self,
        log_probs: Tensor,
        log_tail: Tensor,
        valid: Tensor,
        student: Tensor,
        student_tail: Tensor | None,
    ) -> IdGradient:
        """Value and gradient.

        Shapes: the teacher's log-probabilities ``[N, K]`` and those of the tail ``[N]``; bool ``[N,
        K]`` of the ids that take part. The student's are as in `IdTarget.gradient`.
        """
        ...


class IdTarget(Protocol):
    """The teacher's side of one term on K ids of each token.

    ``has_mass``: whether the teacher's probabilities of the ids are known.
    """

    has_mass: ClassVar[bool]

    @property
    def ids(self) -> Tensor:
        """``[N, K]`` global ids; a token may hold an id twice."""
        ...

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply ``function`` to each tensor ``[N, ...]``: select tokens, or copy to a device."""
        ...

    def needs_rest(self, support: Support) -> bool:
        """Whether the student's probability outside of the ids enters the term."""
        ...

    def valid(self) -> Tensor:
        """bool ``[N, K]``: the ids that take part."""
        ...

    def mass(self) -> Tensor:
        """``[N]`` fp64, the teacher's probability of the ids; only where ``has_mass``."""
        ...

    def gradient(
        self, student: Tensor, student_tail: Tensor | None, divergence: ClassDivergence
    ) -> IdGradient:
        """Value and gradient, given the student's log-probabilities in fp64.

        Shapes: ``student [N, K]`` at the ids and ``student_tail [N]`` of all further ones, both at
        the term's temperature. Without the rest normalised over the ids.
        """
        ...
