"""The protocols of a teacher and its signals."""

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
        """The logits for terms between logits and for a choice of ids; None without any."""
        ...

    def targets(self, terms: Sequence[TermView]) -> Sequence[IdTarget] | None:
        """The target of each term where there are no logits, else None.

        Raises:
            ValueError: a term is not defined on this signal.
        """
        ...

    def token_statistics(self) -> Mapping[str, Tensor]:
        """Statistics ``[N]`` of the whole distribution that are known without logits.

        Names: ``entropy`` in nats, ``label_log_prob``.
        """
        ...


class IdSignal(Signal, Protocol):
    """A signal on few ids, with a selection of tokens."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply ``function`` to each tensor ``[N, ...]``: select tokens, or copy to a device."""
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
        signal: None on ranks whose pipeline stage needs none.
        features: teacher outputs for the student layers of this rank's pipeline stage, by kind and
            number of the teacher's layer, from 1. ``output`` is ``[s, b, H]``, ``query``
            ``[s, b, n, d]`` and ``key`` ``[S, b, g, d]`` of this rank's heads; tokens in the layout
            of the student's layers.
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
