"""What one pass over the logits of a vocabulary shard measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron_distill.ops.classes import Model
from megatron_distill.ops.divergence import WeightedDivergence

__all__ = ["Softmax", "Sweep"]

# A model and a temperature.
Softmax = tuple[Model, float]


@dataclass(frozen=True)
class Sweep:
    """What one pass over the logits measures.

    Attributes:
        models: whose logits there are.
        terms: the divergences between them.
        student_temperatures: further ones of the student's softmax, for what is not between logits.
        full: also softmaxes at temperature one, label logits, entropies and the top token.
        infinite: whether logits may be -inf. Such an id has no probability, and where that is so on
            both sides it counts for nothing.
    """

    models: tuple[Model, ...]
    terms: tuple[WeightedDivergence, ...]
    full: bool
    infinite: bool = False
    student_temperatures: tuple[float, ...] = ()

    @cached_property
    def temperatures(self) -> tuple[float, ...]:
        """Temperatures at which both models have a softmax; one comes first in a full sweep."""
        wanted = [1.0] if self.full else []
        return tuple(dict.fromkeys(wanted + [term.temperature for term in self.terms]))

    @cached_property
    def softmaxes(self) -> tuple[Softmax, ...]:
        """Every model at every temperature, and the student at those of its own."""
        shared = [(model, value) for value in self.temperatures for model in self.models]
        own: list[Softmax] = [("student", value) for value in self.student_temperatures]
        return tuple(dict.fromkeys(shared + own))

    @cached_property
    def ratio_temperatures(self) -> tuple[float, ...]:
        """Temperatures at which the average of the log ratio is measured: those of the terms."""
        return tuple(dict.fromkeys(term.temperature for term in self.terms))

    @cached_property
    def curved(self) -> tuple[WeightedDivergence, ...]:
        """The terms whose gradients need slopes."""
        return tuple(term for term in self.terms if not term.divergence.is_linear)

    @property
    def exact(self) -> bool:
        """Whether exponentials are wanted to the last bit: slopes compare those of both models."""
        return bool(self.curved)

    @cached_property
    def extremes(self) -> tuple[str, ...]:
        """Statistics that are logits: each model's peak, and the teacher's at the student's top."""
        names = tuple(f"{model}_peak" for model in self.models)
        compares = bool(self.curved) or (self.full and "teacher" in self.models)
        return (*names, "teacher_at_top") if compares else names

    @cached_property
    def sums(self) -> Mapping[str, Softmax]:
        """Statistics that are sums, and whose exponentials each is a sum of: in the order of
        softmaxes their masses, then those with weights."""
        sums = {"{}_mass@{}".format(*softmax): softmax for softmax in self.softmaxes}
        if self.full:
            sums |= {f"{model}_log": (model, 1.0) for model in self.models}
        for temperature in self.ratio_temperatures:
            sums[f"ratio@{temperature}"] = ("teacher", temperature)
        return sums

    @cached_property
    def summed_softmaxes(self) -> tuple[int, ...]:
        """Of each sum the number of its softmax."""
        return tuple(self.softmaxes.index(softmax) for softmax in self.sums.values())

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Rows of the packet, in order: numbers per token that a rank sends."""
        labels = [f"{model}_label" for model in self.models] if self.full else []
        return (*self.extremes, *self.sums, *labels)
