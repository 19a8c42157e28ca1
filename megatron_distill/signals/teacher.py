"""The protocols of a teacher and its signals, and the signals of several teachers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from torch import Tensor

from megatron_distill.signals.logits import LogitSource
from megatron_distill.signals.targets import IdTarget, TermView

if TYPE_CHECKING:
    from megatron_distill.runtime.batch import Batch

__all__ = [
    "IdSignal",
    "OnDemand",
    "Signal",
    "Signals",
    "SignalsByTeacher",
    "Teacher",
    "WithFeatures",
]

Given = TypeVar("Given")


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

    def within(self, vocab_size: int) -> Self:
        """Ids below ``vocab_size`` alone, where a signal was stored with padding columns."""
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
            ``[s, b, n, d]`` and ``key`` ``[S, b, g, d]`` of this rank's heads. Tokens in the layout
            of the student's layers.
    """

    signal: Signal | None
    features: Mapping[tuple[str, int], Tensor]


class Signals(Protocol):
    """The signals of a step's micro-batches: a list, or `OnDemand`.

    The student's step takes element i in the forward step of micro-batch i, in that of a stage's
    last chunk. All ranks of a stage take them in the same order. An element may be computed, and
    communicate, when it is taken. It is the same each time, but only the element taken last is sure
    to be free of work.
    """

    def __len__(self) -> int:
        """Number of micro-batches."""
        ...

    def __getitem__(self, micro_batch: int, /) -> Signal | WithFeatures | None:
        """The signal of a micro-batch; None on ranks whose pipeline stage needs none."""
        ...

    def __iter__(self) -> Iterator[Signal | WithFeatures | None]:
        """The signals of all micro-batches in order; a list of them holds every one."""
        ...


class OnDemand(Generic[Given]):
    """Signals computed when they are taken; only the one taken last is in memory."""

    def __init__(self, count: int, compute: Callable[[int], Given]) -> None:
        self._count = count
        self._compute = compute
        self._held: tuple[int, Given] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, micro_batch: int) -> Given:
        """See `Signals`. Raises IndexError past the last micro-batch."""
        if not 0 <= micro_batch < self._count:
            raise IndexError(f"micro-batch {micro_batch} of {self._count}")
        if self._held is None or self._held[0] != micro_batch:
            self._held = None  # its memory is free for the next one
            self._held = micro_batch, self._compute(micro_batch)
        return self._held[1]

    def __iter__(self) -> Iterator[Given]:
        return (self[micro_batch] for micro_batch in range(self._count))


class Teacher(Protocol):
    """Any source of signals for the micro-batches of a step."""

    def signals(self, batches: Sequence[Batch]) -> Signals:
        """One signal per micro-batch, computed before the student's schedule or during it."""
        ...


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
