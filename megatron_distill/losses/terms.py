"""A term of the objective, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor

from megatron_distill.ops.divergences import Divergence, WeightedDivergence, divergence_named
from megatron_distill.ops.factors import Factor
from megatron_distill.signals import Support

__all__ = ["Mixture", "TeacherScore", "Term", "TermTeachers", "check_distinct"]

Mixture = Literal["arithmetic", "geometric", "lowest_loss"]
"""How several teachers make one target: a mean of their probabilities, or a choice per sample."""

TeacherScore = Literal["cross_entropy", "entropy", "top_probability"]
"""How good a teacher is on a sample: minus its cross-entropy on the labels, minus its entropy, or
its largest probability."""


@dataclass(frozen=True)
class TermTeachers:
    """The teachers of one term by name with their shares, which have a sum of one.

    ``mixture``: ``arithmetic`` and ``geometric`` are means of the probabilities with these weights,
    ``lowest_loss`` takes the teacher on which the term is lowest, sample by sample. With a
    ``score`` s of each teacher on each sample its weight there is proportional to its share times
    ``e^(alpha s)``, see `TeacherScores`.

    Raises:
        ValueError: no teacher, a repeated one, weights that are not positive and of sum one, a
            score of a choice, or an alpha that is not positive and finite.
    """

    weights: tuple[tuple[str, float], ...]
    mixture: Mixture = "arithmetic"
    score: TeacherScore | None = None
    alpha: float = 1.0

    def __post_init__(self) -> None:
        names, weights = self.names, [weight for _, weight in self.weights]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"teachers {names}: name at least one teacher, and each once")
        if not all(weight > 0 for weight in weights) or not math.isclose(sum(weights), 1.0):
            raise ValueError(f"teachers {names}: weights {weights} must be positive, of sum one")
        if self.score is not None and self.mixture == "lowest_loss":
            raise ValueError(f"teachers {names}: a choice has no weights; remove the score")
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise ValueError(f"teachers {names}: alpha {self.alpha} must be positive and finite")

    @classmethod
    def of(
        cls,
        weights: Mapping[str, float],
        mixture: Mixture = "arithmetic",
        *,
        score: TeacherScore | None = None,
        alpha: float = 1.0,
    ) -> TermTeachers:
        """Teachers in the order of their names, without those of weight zero, of sum one.

        A single teacher is its own mean and its own choice.
        """
        total = sum(weights.values())
        shares = tuple((name, weights[name] / total) for name in sorted(weights) if weights[name])
        return cls(shares, mixture, score, alpha) if len(shares) > 1 else cls(shares)

    @property
    def names(self) -> tuple[str, ...]:
        """The names in order."""
        return tuple(name for name, _ in self.weights)

    @property
    def label(self) -> str:
        """Short name in reports: the only teacher, or all with their shares and the mixture."""
        if len(self.weights) == 1:
            return self.names[0]
        if self.mixture == "lowest_loss":
            return f"lowest_of_{'_'.join(self.names)}"
        shares = "_".join(f"{name}{share:.3g}" for name, share in self.weights)
        if self.score is not None:
            shares += f"_by_{self.score}{self.alpha:g}"
        return shares if self.mixture == "arithmetic" else f"{self.mixture}_{shares}"


@dataclass(frozen=True)
class Term:
    """One divergence from the teacher, of both models at ``temperature``, with its weight.

    ``scale_by_temperature_squared`` multiplies loss and gradient by T^2 (Hinton et al., 2015,
    section 2), so that the temperature does not change the size of gradients. ``top_k`` is the
    number of top-k ids to choose from logits; None uses all of them. ``support`` is the set of
    classes of a divergence on few ids. ``tail``: the ids and the rest as one class.
    ``renormalized``: both models over the ids alone. ``raw``: the sum over the ids. ``parameters``
    are those of the divergence. ``temperatures`` are the first and the last of a scheduled
    temperature; reports have one name throughout the run. ``teachers``, of several: those of this
    term; None for the teacher of each sample, or the only one. ``weight`` may be an fp64 scalar of
    the device, which is not read.

    Raises:
        ValueError: an unknown divergence, parameter or support, or a number out of range.
    """

    divergence: str = "forward_kl"
    weight: Factor = 1.0
    temperature: float = 1.0
    scale_by_temperature_squared: bool = False
    top_k: int | None = None
    support: Support = "tail"
    parameters: Mapping[str, float] = field(default_factory=dict)
    temperatures: tuple[float, float] | None = None
    teachers: TermTeachers | None = None

    def __post_init__(self) -> None:
        divergence_named(self.divergence, **self.parameters)
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"temperature of {self.divergence} is {self.temperature}; "
                "it must be positive and finite"
            )
        if not isinstance(self.weight, Tensor) and not math.isfinite(self.weight):
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
        if self.teachers is not None:
            name += f"_{self.teachers.label}"
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
