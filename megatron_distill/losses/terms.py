"""A term of the objective, as plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_distill.ops.divergence import WeightedDivergence, divergence_named

__all__ = ["Term", "weighted_divergences"]


@dataclass(frozen=True)
class Term:
    """One divergence from the teacher, of both models at ``temperature``, with its weight.

    ``scale_by_temperature_squared`` multiplies loss and gradient by T^2 (Hinton et al., 2015,
    section 2), so that gradients keep their size when the temperature changes.

    Raises:
        ValueError: unknown divergence, temperature not positive, or weight not finite.
    """

    divergence: str = "forward_kl"
    weight: float = 1.0
    temperature: float = 1.0
    scale_by_temperature_squared: bool = False

    def __post_init__(self) -> None:
        divergence_named(self.divergence)
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"temperature of {self.divergence} is {self.temperature}; "
                "it must be positive and finite"
            )
        if not math.isfinite(self.weight):
            raise ValueError(f"weight of {self.divergence} is {self.weight}; it must be finite")

    @property
    def name(self) -> str:
        """Name in reports: the divergence, with the temperature unless that is one."""
        if self.temperature == 1.0:
            return self.divergence
        return f"{self.divergence}_t{self.temperature:g}"

    @property
    def temperature_factor(self) -> float:
        """T^2 if asked for, else 1: the one place where the convention enters."""
        return self.temperature**2 if self.scale_by_temperature_squared else 1.0


def weighted_divergences(terms: Sequence[Term]) -> tuple[WeightedDivergence, ...]:
    """The terms as the executors take them, weight and temperature factor in one coefficient.

    Raises:
        ValueError: two terms are the same divergence at the same temperature.
    """
    names = [term.name for term in terms]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"terms repeat {', '.join(repeated)}; add their weights up instead")
    return tuple(
        WeightedDivergence(
            divergence_named(term.divergence),
            term.temperature,
            term.weight * term.temperature_factor,
        )
        for term in terms
    )
