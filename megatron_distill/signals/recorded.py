"""A teacher's stored signals: one for each term of the objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_distill.errors import counted
from megatron_distill.signals.targets import IdTarget, TermView

if TYPE_CHECKING:
    from megatron_distill.signals.teacher import IdSignal

__all__ = ["Recorded"]


@dataclass(frozen=True)
class Recorded:
    """Signals that were stored for each term, and two statistics of each token.

    Attributes:
        by_term: for each term of the objective, in its order, at the term's temperature.
        entropy: ``[N]`` fp32 of the teacher's whole distribution, in nats; None if unknown.
        label_log_prob: ``[N]`` fp32, the teacher's log-probability of the label; None if unknown.
        names: of the terms that ``by_term`` belongs to; ``()``: all terms, in their order.

    Raises:
        ValueError: no signal is given, or the numbers of tokens or of names differ.
    """

    by_term: tuple[IdSignal, ...]
    entropy: Tensor | None = None
    label_log_prob: Tensor | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.by_term:
            raise ValueError("Recorded.by_term is empty; it must hold something for each term")
        if self.names and len(self.names) != len(self.by_term):
            raise ValueError(f"Recorded.names are {self.names} for {len(self.by_term)} signals")
        for index, signal in enumerate(self.by_term):
            if signal.tokens != self.tokens:
                raise ValueError(
                    f"Recorded.by_term.{index} has {signal.tokens} tokens, the first {self.tokens}"
                )
        for name, values in (("entropy", self.entropy), ("label_log_prob", self.label_log_prob)):
            if values is not None and values.shape != (self.tokens,):
                raise ValueError(
                    f"Recorded.{name} is of shape {tuple(values.shape)}; it must be one number for "
                    f"each of {self.tokens} tokens"
                )

    @property
    def tokens(self) -> int:
        """Number of tokens N."""
        return self.by_term[0].tokens

    def logit_source(self) -> None:
        """None: there are no logits."""
        return

    def token_statistics(self) -> Mapping[str, Tensor]:
        """``entropy`` and ``label_log_prob``, where they are known."""
        known = {"entropy": self.entropy, "label_log_prob": self.label_log_prob}
        return {name: values for name, values in known.items() if values is not None}

    def targets(self, terms: Sequence[TermView]) -> Sequence[IdTarget]:
        """The signal of each term as its target.

        Raises:
            ValueError: the numbers of signals and terms differ, a term has no signal, or a signal
                does not fit its term.
        """
        if self.names:
            by_name = dict(zip(self.names, self.by_term, strict=True))
            unknown = [term.name for term in terms if term.name not in by_name]
            if unknown:
                raise ValueError(f"Recorded has {', '.join(self.names)}, not {', '.join(unknown)}")
            return [by_name[term.name].target(term) for term in terms]
        if len(self.by_term) != len(terms):
            raise ValueError(
                f"Recorded has {counted(len(self.by_term), 'term')}, the objective {len(terms)}"
            )
        pairs = zip(self.by_term, terms, strict=True)
        return [signal.target(term) for signal, term in pairs]

    def map(self, function: Callable[[Tensor], Tensor]) -> Recorded:
        """Apply ``function`` to each tensor; a signal shared by terms stays shared."""
        mapped: dict[int, IdSignal] = {}
        for signal in self.by_term:
            if id(signal) not in mapped:
                mapped[id(signal)] = signal.map(function)
        return replace(
            self,
            by_term=tuple(mapped[id(signal)] for signal in self.by_term),
            entropy=None if self.entropy is None else function(self.entropy),
            label_log_prob=None if self.label_log_prob is None else function(self.label_log_prob),
        )
