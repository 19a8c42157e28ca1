"""A term of the objective, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from megatron_distill.ops.divergences import Divergence, WeightedDivergence, divergence_named
from megatron_distill.signals import Support

__all__ = ["Term", "check_distinct"]


@dataclass(frozen=True)
class Term:
    """One divergence from the teacher, of both models at ``temperature``, with its weight.

    ``scale_by_temperature_squared`` multiplies loss and gradient by T^2 (Hinton et al., 2015,
    section 2), so that the temperature does not change the size of gradients. ``top_k`` is the
    number of top-k ids to choose from logits; None uses all of them. ``support`` is the set of
    classes of a divergence on few ids: the ids and their ``tail`` as one more class, both models
    ``renormalized`` over the ids, or the ``raw`` sum over the ids. ``parameters`` are those of the
    divergence. ``temperatures`` are the first and the last of a scheduled temperature; reports have
    one name throughout the run.

    Raises:
        ValueError: an unknown divergence, parameter or support, or a number out of range.
    """

    divergence: str = "forward_kl"
    weight: float = 1.0
    temperature: float = 1.0
    scale_by_temperature_squared: bool = False
    top_k: int | None = None
    support: Support = "tail"
    parameters: Mapping[str, float] = field(default_factory=dict)
    temperatures: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        divergence_named(self.divergence, **self.parameters)
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"temperature of {self.divergence} is {self.temperature}; "
                "it must be positive and finite"
            )
        if not math.isfinite(self.weight):
            raise ValueError(f"weight of {self.divergence} is {self.weight}; it must be finite")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k of {self.divergence} is {self.top_k}; it must be at least 1")
        if self.support not in get_args(Support):
            known = ", ".join(get_args(Support))
            raise ValueError(f"support of {self.divergence} is {self.support!r}; known: {known}")

    @property
    def row(self) -> Divergence:
        """The divergence with its parameters."""
        return divergence_named(self.divergence, **self.parameters)

    @property
    def is_forward_kl(self) -> bool:
        """Whether the term is linear in the teacher's probabilities."""
        return self.row.is_linear

    @property
    def name(self) -> str:
        """Name in reports: the divergence, with settings that are not the default."""
        name = self.row.name
        if self.temperatures is not None:
            first, last = self.temperatures
            name += f"_t{first:g}to{last:g}"
        elif self.temperature != 1.0:
            name += f"_t{self.temperature:g}"
        if self.top_k is not None:
            name += f"_top{self.top_k}"
        if self.support != "tail":
            name += f"_{self.support}"
        return name

    @property
    def temperature_factor(self) -> float:
        """T^2 if configured, else 1; the only place of this convention."""
        return self.temperature**2 if self.scale_by_temperature_squared else 1.0

    @property
    def weighted(self) -> WeightedDivergence:
        """The term for the executors, with weight and temperature factor in one coefficient."""
        return WeightedDivergence(self.row, self.temperature, self.weight * self.temperature_factor)


def check_distinct(terms: Sequence[Term]) -> None:
    """Refuse repeated terms.

    Raises:
        ValueError: two terms are equal except for their weight.
    """
    names = [term.name for term in terms]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"terms repeat {', '.join(repeated)}; add their weights up instead")
