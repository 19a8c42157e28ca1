"""Loss balancing: measured raw losses to loss weights.

The step's measured losses in, the factors of its losses out. Both are floats, or fp64 scalars of a
device, where the host then reads nothing. The bits on a CPU are the same. The scheme is the ratio
balancing of NVIDIA ModelOpt's `LogitsAndIntermediatesLossBalancer`; the formulas and our
differences are in docs/balancing.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_distill.ops.factors import Factor, is_zero

__all__ = [
    "BalanceMode",
    "BalanceScales",
    "BalanceState",
    "LossWeights",
    "RatioBalance",
    "RawLosses",
    "ScheduleKind",
    "ValueSchedule",
    "scaled_weights",
    "weighted_sum",
]


BalanceMode = Literal["fixed", "schedule", "magnitude", "gradient_norm"]


@dataclass(frozen=True)
class LossWeights:
    """The factor of each raw loss, in value and gradient.

    Attributes:
        ce: of the cross-entropy on the labels.
        terms: of each divergence, in the order of the objective.
        features: of each pair of hidden states, in the order of the objective.
    """

    ce: float
    terms: tuple[Factor, ...]
    features: tuple[Factor, ...] = ()


@dataclass(frozen=True)
class RawLosses:
    """The size of each unweighted loss: its mean over the trained tokens, or its gradient's norm.

    Attributes:
        ce: of the cross-entropy on the labels.
        terms: of each divergence (a factor T^2 included). For gradients, one norm of all weighted
            terms together.
        features: of each pair of hidden states.
    """

    ce: Factor
    terms: tuple[Factor, ...]
    features: tuple[Factor, ...] = ()

    @property
    def sizes(self) -> tuple[Factor, ...]:
        """All of them, in order."""
        return (self.ce, *self.terms, *self.features)

    def replaced(self, sizes: Sequence[Factor]) -> RawLosses:
        """Other sizes of the same losses, in the order of `sizes`."""
        features = 1 + len(self.terms)
        return RawLosses(sizes[0], tuple(sizes[1:features]), tuple(sizes[features:]))

    @property
    def is_finite(self) -> bool:
        """Whether every size is finite; of numbers of the host."""
        return all(map(math.isfinite, self.sizes))


@dataclass(frozen=True)
class BalanceScales:
    """The two ratios of the balanced total, constants to the gradient.

    Attributes:
        feature: s_f, from the feature losses to the divergences.
        kd: s_k, from both together to the cross-entropy.
    """

    feature: Factor = 1.0
    kd: Factor = 1.0

    def where(self, condition: Tensor) -> BalanceScales:
        """The scales where a bool scalar of the device is true, else one."""
        return BalanceScales(
            *(
                torch.where(condition, one, 1.0) if isinstance(one, Tensor) else one
                for one in (self.feature, self.kd)
            )
        )


@dataclass(frozen=True)
class RatioBalance:
    """``s_f = KD / max(F, eps)``, ``kd = KD + s_f F``, ``s_k = CE / max(kd, eps)``.

    CE, KD and F are the weighted losses. Where the numerator or the denominator is zero (no such
    tokens, student equal to teacher, no features) the scale is one.

    Attributes:
        epsilon: least denominator.
        clamp: c limits both scales to [1/c, c]; None does not limit them.
    """

    epsilon: float = 1e-8
    clamp: float | None = None

    def scales(self, raw: RawLosses, weights: LossWeights) -> BalanceScales:
        """The scales for a step of these sizes; both one if a size is not finite.

        Sizes of the device give scales of the device. The weights are the host's.
        """
        of_device = [size for size in raw.sizes if isinstance(size, Tensor)]
        if not of_device and not raw.is_finite:
            return BalanceScales()
        kd = weighted_sum(raw.terms, weights.terms)
        features = weighted_sum(raw.features, weights.features)
        feature_scale = self._ratio(kd, features)
        task = weights.ce * raw.ce
        found = BalanceScales(feature_scale, self._ratio(task, kd + feature_scale * features))
        return found.where(torch.stack(of_device).isfinite().all()) if of_device else found

    def _ratio(self, wanted: Factor, found: Factor) -> Factor:
        if isinstance(wanted, Tensor) and isinstance(found, Tensor):
            quotient = wanted / found.clamp(min=self.epsilon)
            if self.clamp is not None:
                quotient = quotient.clamp(1 / self.clamp, self.clamp)
            return torch.where((wanted > 0.0) & (found > 0.0), quotient, 1.0)
        if isinstance(wanted, Tensor) or isinstance(found, Tensor):
            return 1.0  # the other one is the sum of no losses
        if wanted <= 0.0 or found <= 0.0:
            return 1.0
        ratio = wanted / max(found, self.epsilon)
        if self.clamp is not None:
            ratio = min(max(ratio, 1 / self.clamp), self.clamp)
        return ratio


def scaled_weights(weights: LossWeights, *, alpha: float, scales: BalanceScales) -> LossWeights:
    """The weights of ``CE + alpha s_k (KD + s_f F)``, one for each raw loss.

    A weight of zero is a number of the host, which lets a loss be left out.
    """
    kd = _product(scales.kd, alpha)
    features = _product(kd, scales.feature)
    return LossWeights(
        weights.ce,
        tuple(_product(kd, weight) for weight in weights.terms),
        tuple(_product(features, weight) for weight in weights.features),
    )


def _product(scale: Factor, weight: Factor) -> Factor:
    return 0.0 if is_zero(weight) or is_zero(scale) else scale * weight


def weighted_sum(raw: Sequence[Factor], weights: Sequence[Factor]) -> Factor:
    """``sum of weight * raw``.

    Raises:
        ValueError: the numbers of weights and losses differ.
    """
    found: Factor = 0.0
    for weight, loss in zip(weights, raw, strict=True):
        found = found + weight * loss
    return found


@dataclass(frozen=True)
class BalanceState:
    """The running mean of raw losses, and its number of steps.

    An exponential moving average of the losses, not of their logarithms, in which a loss of zero
    would be minus infinity. It starts at zero and is divided by ``1 - decay^count``, to correct the
    first steps' bias (Adam: Kingma and Ba, 2015, section 3). A decay of zero uses the last step
    alone.
    """

    measure: BalanceMode | None = None
    count: int = 0
    decayed: RawLosses | None = None

    def updated(self, raw: RawLosses, *, measure: BalanceMode, decay: float) -> BalanceState:
        """The state after a step of these losses; unchanged if one is not finite."""
        return self.advanced(raw, measure=measure, decay=decay) if raw.is_finite else self

    def advanced(self, raw: RawLosses, *, measure: BalanceMode, decay: float) -> BalanceState:
        """The state after a step of these losses, finite or not; those of a device stay there."""
        old = self.decayed
        if old is None:
            old = RawLosses(0.0, (0.0,) * len(raw.terms), (0.0,) * len(raw.features))
        return BalanceState(measure, self.count + 1, _mixed(old, raw, decay))

    def fits(self, measure: BalanceMode, *, terms: int, features: int) -> bool:
        """Whether the state has this measure and these numbers of losses, or is empty."""
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
        """Plain values, for a checkpoint; empty before the first step."""
        return asdict(self) if self.decayed is not None else {}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> BalanceState:
        """The state that `as_dict` wrote, also through JSON.

        Raises:
            KeyError, TypeError: a value is missing or of another type.
        """
        if not saved:
            return cls()
        values = saved["decayed"]
        losses = RawLosses(values["ce"], tuple(values["terms"]), tuple(values["features"]))
        return cls(saved["measure"], saved["count"], losses)


def _mixed(old: RawLosses, new: RawLosses, decay: float) -> RawLosses:
    def mix(left: Factor, right: Factor) -> Factor:
        return decay * left + (1 - decay) * right

    return RawLosses(
        mix(old.ce, new.ce),
        tuple(map(mix, old.terms, new.terms)),
        tuple(map(mix, old.features, new.features)),
    )


ScheduleKind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class ValueSchedule:
    """A schedule of a value from ``start`` to ``end``.

    It is ``start`` until ``start_step`` optimizer steps are done and ``end`` from
    ``start_step + steps`` on. In between, ``linear`` is a straight line and ``cosine`` half a
    period of a cosine, as in learning-rate schedules. ``constant`` jumps from ``start`` to ``end``
    at ``start_step``.

    Raises:
        ValueError: the number of steps does not fit the kind.
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
        """The same value at every step."""
        return cls(value, value)

    def at(self, steps_done: int) -> float:
        """The value after ``steps_done`` optimizer steps; exact at both ends."""
        done = steps_done - self.start_step
        if done >= self.steps:
            return self.end if done >= 0 else self.start
        if done <= 0:
            return self.start
        share = done / self.steps
        if self.kind == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return self.start + share * (self.end - self.start)
