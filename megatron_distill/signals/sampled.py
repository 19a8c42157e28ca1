"""Ids drawn from the teacher, an unbiased target of forward KL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from megatron_distill.signals.checks import refuse_choice, require_ids
from megatron_distill.signals.targets import ClassDivergence, IdGradient, Support, TermView

__all__ = ["Sampled"]


@dataclass(frozen=True)
class Sampled:
    """Ids drawn from the teacher with replacement, and how often each was drawn.

    Attributes:
        ids: ``[N, K]`` int64 global ids.
        counts: ``[N, K]``, integers or importance weights; an id of count 0 was not drawn. They are
            divided by their sum per token.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together.
    """

    ids: Tensor
    counts: Tensor

    has_mass: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_ids("Sampled", self.ids, self.counts, "counts")

    @property
    def tokens(self) -> int:
        """Number of tokens N."""
        return self.ids.shape[0]

    def within(self, vocab_size: int) -> Sampled:
        """Draws of ids below ``vocab_size`` alone."""
        return replace(self, counts=self.counts.masked_fill(self.ids >= vocab_size, 0))

    def logit_source(self) -> None:
        """None: there are no logits."""
        return

    def token_statistics(self) -> Mapping[str, Tensor]:
        """Empty: the whole distribution is unknown."""
        return {}

    def targets(self, terms: Sequence[TermView]) -> Sequence[Sampled]:
        """The draws for each term, their counts divided by their sum.

        Raises:
            ValueError: a term has a ``top_k``, or is not linear in the teacher.
        """
        refuse_choice(terms, self.ids)
        return [self.target(term) for term in terms]

    def target(self, term: TermView) -> Sampled:
        """See `IdSignal`."""
        if not term.is_forward_kl:
            raise ValueError(
                f"{term.divergence} is not defined on sampled ids: only forward_kl is linear in "
                "the teacher's probabilities, so that samples estimate it without bias"
            )
        counts = self.counts.to(torch.float64)
        total = counts.sum(1, keepdim=True)
        return Sampled(self.ids.long(), torch.where(total == 0, 0.0, counts / total))

    def map(self, function: Callable[[Tensor], Tensor]) -> Sampled:
        """See `IdTarget`."""
        return replace(self, ids=function(self.ids), counts=function(self.counts))

    def needs_rest(self, support: Support) -> bool:  # noqa: ARG002
        """Yes: the cross-entropy has the student's normaliser."""
        return True

    def valid(self) -> Tensor:
        """See `IdTarget`."""
        return self.counts != 0

    def mass(self) -> Tensor:
        """Unknown; see ``has_mass``."""
        raise TypeError("draws do not say how probable the drawn ids are")

    def gradient(
        self,
        student: Tensor,
        student_tail: Tensor | None,  # noqa: ARG002
        divergence: ClassDivergence,  # noqa: ARG002
    ) -> IdGradient:
        """Cross-entropy ``-sum w log q``: gradient ``(sum w) q - w``.

        Source: Anshumann et al., arXiv 2503.16870, section 3: unbiased because it is linear in w.
        """
        weights = self.counts.double()
        value = -torch.where(weights == 0, 0.0, weights * student).sum(1)
        slope = weights.sum(1)
        return IdGradient(value, slope, slope.unsqueeze(1) * student.exp() - weights, False)
