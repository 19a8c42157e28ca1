"""A teacher, and the protocols of its signals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from torch import Tensor

from megatron_distill.signals.logits import LogitSource
from megatron_distill.signals.targets import IdTarget, TermView

if TYPE_CHECKING:
    from megatron_distill.runtime.batch import Batch

__all__ = ["IdSignal", "Signal", "Teacher", "WithFeatures"]


class Signal(Protocol):
    """The teacher's side of an objective for N tokens: logits, or a target for each term."""

    @property
    def tokens(self) -> int:
        """Number of tokens N."""
        ...

    def logit_source(self) -> LogitSource | None:
        """The logits that terms are taken between, or choose their ids from; None without any."""
        ...

    def targets(self, terms: Sequence[TermView]) -> Sequence[IdTarget] | None:
        """The target of each term where there are no logits, else None.

        Raises:
            ValueError: a term is not defined on this signal.
        """
        ...

    def token_statistics(self) -> Mapping[str, Tensor]:
        """Statistics ``[N]`` of the whole distribution that no logits are needed for.

        Names: ``entropy`` in nats, ``label_log_prob``.
        """
        ...


class IdSignal(Signal, Protocol):
    """A signal on few ids, of which a part of the tokens can be taken."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same of each tensor ``[N, ...]``: some tokens of it, or in another memory."""
        ...

    def target(self, term: TermView) -> IdTarget:
        """The signal as the target of one term.

        Raises:
            ValueError: the term is not defined on this signal.
        """
        ...


@dataclass(frozen=True)
class WithFeatures:
    """A teacher's signal for a micro-batch, with outputs of some of its layers.

    Attributes:
        signal: as without features: None on ranks whose pipeline stage needs none.
        features: outputs of this rank's pipeline stage that the student's are compared with: by
            kind and the number of the teacher's layer, from 1. ``output`` is ``[s, b, H]``,
            ``query`` ``[s, b, n, d]`` and ``key`` ``[S, b, g, d]`` of this rank's heads; tokens as
            the student's layers hold them.
    """

    signal: Signal | None
    features: Mapping[tuple[str, int], Tensor]


class Teacher(Protocol):
    """Any source of signals for the micro-batches of a step, before the student's schedule."""

    def signals(
        self, batches: Sequence[Batch]
    ) -> Sequence[Signal] | Sequence[None] | Sequence[WithFeatures]:
        """One signal per micro-batch; None on ranks whose pipeline stage needs none."""
        ...
