"""How large the losses of one objective are against each other: raw losses in, weights out.

Plain floats only: what is measured of a step comes in, what multiplies its losses goes out. The
scheme is the ratio balancing of NVIDIA ModelOpt's `LogitsAndIntermediatesLossBalancer`; the
formulas, and where ours differ, are in docs/balancing.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = [
    "BalanceMode",
    "BalanceState",
    "LossWeights",
    "RatioBalance",
    "RawLosses",
    "Scales",
    "ScheduleKind",
    "ValueSchedule",
    "scaled_weights",
    "weighted_sum",
]


BalanceMode = Literal["fixed", "schedule", "magnitude", "gradient_norm"]


@dataclass(frozen=True)
class LossWeights:
    """What multiplies each raw loss, value and gradient alike.

    Attributes:
        ce: of the cross-entropy on the labels.
        terms: of each divergence, in the order of the objective.
        features: of each pair of hidden states, in the order of the objective.
    """

    ce: float
    terms: tuple[float, ...]
    features: tuple[float, ...] = ()


@dataclass(frozen=True)
class RawLosses:
    """The size of each loss without its weight: its mean over the trained tokens, or the norm of
    its gradient.

    Attributes:
        ce: of the cross-entropy on the labels.
        terms: of each divergence (a factor T^2 included). Of gradients there is one norm, of all
            terms together with their weights.
        features: of each pair of hidden states.
    """

    ce: float
    terms: tuple[float, ...]
    features: tuple[float, ...] = ()

    @property
    def is_finite(self) -> bool:
        """Whether every size is a number."""
        return all(map(math.isfinite, (self.ce, *self.terms, *self.features)))


@dataclass(frozen=True)
class Scales:
    """The two ratios of the balanced total, constants to the gradient.

    Attributes:
        feature: s_f, from the feature losses to the divergences.
        kd: s_k, from both together to the cross-entropy.
    """

    feature: float = 1.0
    kd: float = 1.0


@dataclass(frozen=True)
class RatioBalance:
    """``s_f = KD / max(F, eps)``, ``kd = KD + s_f F``, ``s_k = CE / max(kd, eps)``.

    CE, KD and F are the losses with their own weights. What is zero has no ratio: where the
    numerator or the denominator is zero (no such tokens, student equal to teacher, no features) the
    scale is one.

    Attributes:
        epsilon: least denominator.
        clamp: c keeps both scales in [1/c, c]; None leaves them as they are.
    """

    epsilon: float = 1e-8
    clamp: float | None = None

    def scales(self, raw: RawLosses, weights: LossWeights) -> Scales:
        """The ratios of a step of these sizes; ones where a size is not finite."""
        if not raw.is_finite:
            return Scales()
        kd = weighted_sum(raw.terms, weights.terms)
        features = weighted_sum(raw.features, weights.features)
        feature_scale = self._ratio(kd, features)
        task = weights.ce * raw.ce
        return Scales(feature_scale, self._ratio(task, kd + feature_scale * features))

    def _ratio(self, wanted: float, found: float) -> float:
        if wanted <= 0.0 or found <= 0.0:
            return 1.0
        ratio = wanted / max(found, self.epsilon)
        if self.clamp is not None:
            ratio = min(max(ratio, 1 / self.clamp), self.clamp)
        return ratio


def scaled_weights(weights: LossWeights, *, alpha: float, scales: Scales) -> LossWeights:
    """The weights of ``CE + alpha s_k (KD + s_f F)``, one for each raw loss."""
    kd = alpha * scales.kd
    return LossWeights(
        weights.ce,
        tuple(kd * weight for weight in weights.terms),
        tuple(kd * scales.feature * weight for weight in weights.features),
    )


def weighted_sum(raw: Sequence[float], weights: Sequence[float]) -> float:
    """``sum of weight * raw``.

    Raises:
        ValueError: there are not as many weights as losses.
    """
    return sum((weight * loss for weight, loss in zip(weights, raw, strict=True)), 0.0)


@dataclass(frozen=True)
class BalanceState:
    """The running mean of raw losses, and over how many steps.

    The mean is exponential and of the losses themselves, not of their logarithms: a loss of zero is
    a loss as any other then, and would be minus infinity there. It starts at zero and is divided by
    ``1 - decay^count``, as Adam's are (Kingma and Ba, 2015, section 3), so that the first steps are
    not too small. A decay of zero is the last step alone.
    """

    measure: BalanceMode | None = None
    count: int = 0
    decayed: RawLosses | None = None

    def updated(self, raw: RawLosses, *, measure: BalanceMode, decay: float) -> BalanceState:
        """The state after a step of these losses; itself where one is not finite."""
        if not raw.is_finite:
            return self
        old = self.decayed
        if old is None:
            old = RawLosses(0.0, (0.0,) * len(raw.terms), (0.0,) * len(raw.features))
        return BalanceState(measure, self.count + 1, _mixed(old, raw, decay))

    def fits(self, measure: BalanceMode, *, terms: int, features: int) -> bool:
        """Whether the state is of this measure and of so many losses, or of none yet."""
        return self.decayed is None or (
            self.measure == measure
            and len(self.decayed.terms) == terms
            and len(self.decayed.features) == features
        )

    def mean(self, *, decay: float) -> RawLosses | None:
        """The running mean; None before the first step."""
        if self.decayed is None:
            return None
        share = 1 - decay**self.count
        return RawLosses(
            self.decayed.ce / share,
            tuple(value / share for value in self.decayed.terms),
            tuple(value / share for value in self.decayed.features),
        )

    def as_dict(self) -> dict[str, object]:
        """Plain values, for a checkpoint; nothing before the first step."""
        return asdict(self) if self.decayed is not None else {}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> BalanceState:
        """The state that `as_dict` wrote, also through JSON.

        Raises:
            KeyError, TypeError: the values are others.
        """
        if not saved:
            return cls()
        values = saved["decayed"]
        losses = RawLosses(values["ce"], tuple(values["terms"]), tuple(values["features"]))
        return cls(saved["measure"], saved["count"], losses)


def _mixed(old: RawLosses, new: RawLosses, decay: float) -> RawLosses:
    def mix(left: float, right: float) -> float:
        return decay * left + (1 - decay) * right

    return RawLosses(
        mix(old.ce, new.ce),
        tuple(map(mix, old.terms, new.terms)),
        tuple(map(mix, old.features, new.features)),
    )


ScheduleKind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class ValueSchedule:
    """A value that goes from ``start`` to ``end``.

    It is ``start`` until ``start_step`` optimizer steps are done and ``end`` from ``start_step +
    steps`` on. Between, ``linear`` is a straight line and ``cosine`` half a period of a cosine, as
    learning rates have it. ``constant`` is constant on both sides of ``start_step``, where it
    jumps.

    Raises:
        ValueError: the number of steps does not go with the kind.
    """

    start: float
    end: float
    kind: ScheduleKind = "constant"
    steps: int = 0
    start_step: int = 0

    def __post_init__(self) -> None:
        if (self.kind == "constant") != (self.steps == 0):
            raise ValueError(f"a {self.kind} schedule cannot take {self.steps} steps")

    @classmethod
    def unchanging(cls, value: float) -> ValueSchedule:
        """The value itself, always."""
        return cls(value, value)

    def at(self, steps_done: int) -> float:
        """The value of the step after so many optimizer steps; both ends are exact."""
        done = steps_done - self.start_step
        if done >= self.steps:
            return self.end if done >= 0 else self.start
        if done <= 0:
            return self.start
        share = done / self.steps
        if self.kind == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return self.start + share * (self.end - self.start)
