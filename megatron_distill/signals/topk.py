"""The teacher's most probable ids of each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from megatron_distill.signals.checks import refuse_choice, require_ids, require_positive
from megatron_distill.signals.targets import ClassDivergence, IdGradient, Support, TermView

__all__ = ["TopK"]


@dataclass(frozen=True)
class TopK:
    """Log-probabilities of the teacher's most probable ids, and of all further ids together.

    Attributes:
        ids: ``[N, K]`` int64 global ids, each at most once per token.
        log_probs: ``[N, K]``, normalised over the whole vocabulary, not over the K ids. An entry of
            -inf is not in the top-k: its id belongs to the tail.
        log_tail: ``[N]`` log of the mass of all further ids; -inf if it is zero.
        temperature: of the teacher's softmax of these values. None: the caller guarantees the
            term's temperature.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together.
    """

    ids: Tensor
    log_probs: Tensor
    log_tail: Tensor
    temperature: float | None = None

    has_mass: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_ids("TopK", self.ids, self.log_probs, "log_probs")
        if not self.log_probs.is_floating_point():
            raise ValueError(f"TopK.log_probs is {self.log_probs.dtype}; it must be floating-point")
        if self.log_tail.shape != self.ids.shape[:1] or not self.log_tail.is_floating_point():
            raise ValueError(
                f"TopK.log_tail is {self.log_tail.dtype} of shape {tuple(self.log_tail.shape)}; it "
                f"must be floating-point, one number for each of {self.ids.shape[0]} tokens"
            )
        if self.temperature is not None:
            require_positive("TopK.temperature", self.temperature)

    @property
    def tokens(self) -> int:
        """Number of tokens N."""
        return self.ids.shape[0]

    def first(self, k: int) -> TopK:
        """The first k ids; the mass of the remaining ones is added to the tail."""
        if k >= self.ids.shape[1]:
            return self
        rest = torch.cat([self.log_probs[:, k:], self.log_tail.unsqueeze(1)], 1).logsumexp(1)
        return replace(self, ids=self.ids[:, :k], log_probs=self.log_probs[:, :k], log_tail=rest)

    def within(self, vocab_size: int) -> TopK:
        """Ids below ``vocab_size`` alone; the mass of the remaining ones is added to the tail."""
        is_real = self.ids < vocab_size
        padding = self.log_probs.masked_fill(is_real, -torch.inf)
        return replace(
            self,
            log_probs=self.log_probs.masked_fill(~is_real, -torch.inf),
            log_tail=torch.cat([padding, self.log_tail.unsqueeze(1)], 1).logsumexp(1),
        )

    def logit_source(self) -> None:
        """None: there are no logits."""
        return

    def token_statistics(self) -> Mapping[str, Tensor]:
        """Empty: the whole distribution is unknown."""
        return {}

    def targets(self, terms: Sequence[TermView]) -> Sequence[TopK]:
        """The top-k at each term's temperature.

        Raises:
            ValueError: a term has a ``top_k``, or needs a normaliser at another temperature.
        """
        refuse_choice(terms, self.ids)
        return [self.target(term) for term in terms]

    def target(self, term: TermView) -> TopK:
        """See `IdSignal`."""
        log_probs = self.log_probs
        if self.temperature is not None and self.temperature != term.temperature:
            if term.support != "renormalized":
                raise ValueError(
                    f"{term.name} is at temperature {term.temperature:g}, the top-k at "
                    f"{self.temperature:g}: support {term.support!r} needs the teacher's "
                    "normaliser at the term's temperature. Take the top-k there, or use "
                    "support='renormalized'"
                )
            log_probs = log_probs * (self.temperature / term.temperature)
        return replace(self, ids=self.ids.long(), log_probs=log_probs, temperature=None)

    def map(self, function: Callable[[Tensor], Tensor]) -> TopK:
        """See `IdTarget`."""
        return replace(
            self,
            ids=function(self.ids),
            log_probs=function(self.log_probs),
            log_tail=function(self.log_tail),
        )

    def needs_rest(self, support: Support) -> bool:
        """See `IdTarget`."""
        return support != "renormalized"

    def valid(self) -> Tensor:
        """See `IdTarget`."""
        return self.log_probs > -torch.inf

    def mass(self) -> Tensor:
        """See `IdTarget`."""
        return self.log_probs.double().exp().sum(1)

    def gradient(
        self, student: Tensor, student_tail: Tensor | None, divergence: ClassDivergence
    ) -> IdGradient:
        """See `IdTarget`."""
        return divergence(self.log_probs, self.log_tail, self.valid(), student, student_tail)
