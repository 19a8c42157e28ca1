"""The signals of several teachers for the tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_distill.signals.logits import LogitSource
from megatron_distill.signals.targets import IdTarget, TermView
from megatron_distill.signals.teacher import Signal

__all__ = ["SignalsByTeacher"]


@dataclass(frozen=True)
class SignalsByTeacher:
    """The signals of a micro-batch by teacher; a `Signal` for a loss with several."""

    tokens: int
    by_teacher: Mapping[str, Signal]

    def logit_source(self) -> LogitSource | None:
        """None: each teacher has logits of its own."""
        return None

    def targets(self, terms: Sequence[TermView]) -> Sequence[IdTarget] | None:
        """Each teacher has targets of its own.

        Raises:
            ValueError: always.
        """
        names = ", ".join(self.by_teacher)
        raise ValueError(f"{len(terms)} terms have the teachers {names}; take one of them")

    def token_statistics(self) -> Mapping[str, Tensor]:
        """Empty: each teacher has statistics of its own."""
        return {}
