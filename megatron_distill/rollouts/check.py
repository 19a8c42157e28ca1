"""Log-probabilities of written ids, compared with those of another pass over the same texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_distill.errors import CheckpointError
from megatron_distill.models.generation import WriteRow, Written
from megatron_distill.models.generation.model import CachedGPT

__all__ = ["LogProbCheck", "TextSample", "TextsToLogProbs"]

_Text = tuple[tuple[int, ...], tuple[int, ...]]

TextsToLogProbs = Callable[[CachedGPT, Sequence[_Text]], Sequence[Sequence[float]]]
"""Returns the log-probability of each written id of (prompt, written ids); on all ranks."""


@dataclass(frozen=True)
class LogProbCheck:
    """Absolute differences between two passes per token, in nats, and what they are of.

    texts, tokens: that are compared.
    """

    texts: int
    tokens: int
    mean_difference: float
    max_difference: float


@dataclass
class TextSample:
    """The first texts that a start writes, at most `most` of them; the same on every rank."""

    most: int
    texts: list[_Text] = field(default_factory=list)
    log_probs: list[tuple[float, ...]] = field(default_factory=list)

    def take(self, rows: Sequence[WriteRow], written: Sequence[Written]) -> None:
        """Add the texts of a part, those without an id left out."""
        for row, text in zip(rows, written, strict=True):
            if len(self.texts) < self.most and text.ids:
                self.texts.append((row.ids, text.ids))
                self.log_probs.append(text.log_probs)

    def compared(self, other: Sequence[Sequence[float]]) -> LogProbCheck:
        """Return the differences to other log-probabilities of the same ids; there are texts.

        Raises CheckpointError where one is not a number.
        """
        found = [
            abs(own - again)
            for mine, theirs in zip(self.log_probs, other, strict=True)
            for own, again in zip(mine, theirs, strict=True)
        ]
        if not all(map(math.isfinite, found)):
            raise CheckpointError(
                "the forward pass of training gives a written text a log-probability that is not a "
                "number; its weights or precision are at fault"
            )
        mean = math.fsum(found) / len(found)
        return LogProbCheck(len(self.texts), len(found), mean, max(found))
