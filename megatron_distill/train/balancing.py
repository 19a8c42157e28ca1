"""The loss weights of a step: from schedules, and from the measured losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.log import get_logger
from megatron_distill.losses import (
    BalanceMode,
    BalanceScales,
    BalanceState,
    LossWeights,
    RatioBalance,
    RawLosses,
    ValueSchedule,
    scaled_weights,
    weighted_sum,
)
from megatron_distill.ops.factors import Factor
from megatron_distill.runtime.batch import StepBatches
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import Signals
from megatron_distill.train.features import FEATURES_LOSS, as_rows
from megatron_distill.train.loss_sizes import (
    agreed,
    gradient_norms,
    local_loss_values,
    loss_values,
    raw_losses,
    raw_names,
)
from megatron_distill.train.metrics import PUBLIC_NAMES, SourceFigures
from megatron_distill.train.objective import TokenObjective
from megatron_distill.train.step import StepReport, Student

__all__ = ["CLAMPED_STEPS", "BalancedStep", "Balancing", "ClampWatch", "Schedules"]


_LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class Schedules:
    """Schedules of weights and temperatures by step, in the order of the objective's terms."""

    ce: ValueSchedule
    terms: tuple[ValueSchedule, ...]
    temperatures: tuple[ValueSchedule, ...]
    features: tuple[ValueSchedule, ...] = ()
    alpha: ValueSchedule = ValueSchedule.unchanging(1.0)

    def weights_at(self, steps_done: int) -> LossWeights:
        """The configured weights of the losses, before alpha and scales."""
        return LossWeights(
            self.ce.at(steps_done),
            tuple(schedule.at(steps_done) for schedule in self.terms),
            tuple(schedule.at(steps_done) for schedule in self.features),
        )

    def applied(self, objective: TokenObjective, steps_done: int) -> TokenObjective:
        """The objective with the scheduled weights and temperatures of a step."""
        temperatures = [schedule.at(steps_done) for schedule in self.temperatures]
        return objective.at(self.weights_at(steps_done), temperatures)


@dataclass(frozen=True)
class BalancedStep:
    """The objectives and weights of a step, before it runs.

    Measured losses, and the weights from them, are numbers of the device. The host reads them with
    the step's losses: it is a `LateNumbers`.

    Attributes:
        objectives: one per micro-batch of this rank.
        own_weights: the scheduled weights of the losses, before alpha and scales.
        state: before this step.
        logged: weights, scales and temperatures, the same on every rank; empty if they never
            change.
        measured: the losses that the state takes if the step is applied; None: it takes none, or
            with `takes_own` those of the step itself.
    """

    objectives: tuple[TokenObjective, ...]
    own_weights: LossWeights
    state: BalanceState
    logged: Mapping[str, Factor]
    groups: Groups
    measured: RawLosses | None = None
    takes_own: bool = False

    def tensors(self, means: Mapping[str, Tensor]) -> list[Tensor]:
        """See `LateNumbers`.

        Collective: with `takes_own` that of `agreed`.
        """
        sizes = self._sizes
        if self.takes_own:
            own = torch.stack([means[name] for name in raw_names(self.objectives[0])])
            sizes = agreed(own, groups=self.groups).unbind()
        return [one for one in (*sizes, *self._factors) if isinstance(one, Tensor)]

    def objective(self, numbers: Sequence[float]) -> TokenObjective:
        """See `LateNumbers`."""
        return self.read(numbers)[1]

    def read(
        self, numbers: Sequence[float]
    ) -> tuple[RawLosses | None, TokenObjective, dict[str, float]]:
        """Return the state's losses, the first objective, and what is logged; as host numbers."""
        remaining, first, raw = iter(numbers), self.objectives[0], self.measured
        if self.takes_own:
            raw = raw_losses(first, [next(remaining) for _ in raw_names(first)])
        elif raw is not None:
            raw = raw.replaced(_on_host(self._sizes, remaining))
        found = _on_host(self._factors, remaining)
        logged, weights = found[: len(self.logged)], found[len(self.logged) :]
        terms = len(first.terms)
        at = LossWeights(first.ce_weight, tuple(weights[:terms]), tuple(weights[terms:]))
        objective = first.at(at, [term.temperature for term in first.terms])
        return raw, objective, dict(zip(self.logged, logged, strict=True))

    @property
    def _sizes(self) -> Sequence[Factor]:
        return () if self.measured is None else self.measured.sizes

    @property
    def _factors(self) -> tuple[Factor, ...]:
        first = self.objectives[0]
        weights = (*(term.weight for term in first.terms), *first.feature_weights)
        return (*self.logged.values(), *weights)


def _on_host(factors: Sequence[Factor], numbers: Iterator[float]) -> list[float]:
    """The factors with the next numbers in the place of those of the device."""
    return [next(numbers) if isinstance(one, Tensor) else one for one in factors]


@dataclass(frozen=True)
class Balancing:
    """Computes the weights of each step.

    Attributes:
        mode: how the losses are balanced.
        schedules: of weights, temperatures and alpha.
        ratios: of the modes `magnitude` and `gradient_norm`.
        decay: of the running mean of the measured losses; 0: no smoothing.
        from_last_step: whether the losses of the previous step are used.
        per_micro_batch: whether each micro-batch of each rank has separate ratios.
    """

    mode: BalanceMode
    schedules: Schedules
    ratios: RatioBalance = field(default_factory=RatioBalance)
    decay: float = 0.0
    from_last_step: bool = False
    per_micro_batch: bool = False

    @property
    def is_measured(self) -> bool:
        """Whether the weights depend on the measured losses."""
        return self.mode in ("magnitude", "gradient_norm")

    def runs_student_twice(self, state: BalanceState) -> bool:
        """Whether `prepare` runs the student's schedule too, so that a signal is taken twice."""
        return self.per_micro_batch or (self.is_measured and self._known(state) is None)

    def _known(self, state: BalanceState) -> RawLosses | None:
        """The losses of the steps before, where this step's are not measured."""
        return state.mean(decay=self.decay) if self.from_last_step else None

    def resumed(self, state: BalanceState) -> BalanceState:
        """The state of a checkpoint, or a new one if that belongs to different losses."""
        terms, features = len(self.schedules.terms), len(self.schedules.features)
        if self.mode == "gradient_norm":
            terms, features = 1, min(features, 1)
        if not self.is_measured or state.fits(self.mode, terms=terms, features=features):
            return state
        _LOGGER.warning(
            "the running means of the checkpoint are for other losses (%s, %d terms); "
            "objective.balance starts with new ones",
            state.measure,
            0 if state.decayed is None else len(state.decayed.terms),
        )
        return BalanceState()

    def prepare(
        self,
        student: Student,
        signals: Signals,
        objective: TokenObjective,
        step: StepBatches,
        *,
        steps_done: int,
        state: BalanceState,
    ) -> BalancedStep:
        """Return the objectives and weights of the next step.

        Collective: none where nothing is measured; else those of the pass in `loss_sizes`, once per
        step (with `from_last_step` in the first one only). Per micro-batch, one all-reduce of 4
        bytes per weight in the data x context group on top.
        """
        weights = self.schedules.weights_at(steps_done)
        alpha = self.schedules.alpha.at(steps_done)
        own = self.schedules.applied(objective, steps_done)
        measured = None
        if self.per_micro_batch:
            raws = local_loss_values(student, signals, own, step)
            each = [self.ratios.scales(raw, weights) for raw in raws]
        else:
            scales = BalanceScales()
            if self.is_measured:
                scales, measured = self._measured(student, signals, own, step, weights, state)
            each = [scales] * len(signals)
        effective = [scaled_weights(weights, alpha=alpha, scales=scales) for scales in each]
        temperatures = [term.temperature for term in own.terms]
        objectives = tuple(own.at(one, temperatures) for one in effective)
        logged: Mapping[str, Factor] = {}
        if self.mode != "fixed" or alpha != 1.0:
            logged = self._logged(own, alpha, each[0], effective[0])
            if self.per_micro_batch:
                pairs = zip(each, effective, strict=True)
                every = [self._logged(own, alpha, scales, one) for scales, one in pairs]
                logged = _mean(every, student.groups, step)
        return BalancedStep(
            objectives, weights, state, logged, student.groups, measured, self.from_last_step
        )

    def finish(
        self, balanced: BalancedStep, report: StepReport
    ) -> tuple[BalanceState, StepReport, dict[str, float]]:
        """Return the state, the report and the logged weights of a step, all of the host.

        A step not applied leaves the state unchanged. `kd`, also per source, and the sum of the
        features are recomputed with the scheduled weights, so that they are comparable from step to
        step.
        """
        raw, objective, logged = balanced.read(report.late)
        if balanced.logged and "kd" in report.values:
            report = replace(
                report,
                values=_with_own_weights(objective, balanced.own_weights, report.values),
                sources=_sources_with_own_weights(objective, balanced.own_weights, report.sources),
            )
        state = balanced.state
        if report.applied and raw is not None:
            state = state.updated(raw, measure=self.mode, decay=self.decay)
        return state, report, logged

    def _measured(
        self,
        student: Student,
        signals: Signals,
        own: TokenObjective,
        step: StepBatches,
        weights: LossWeights,
        state: BalanceState,
    ) -> tuple[BalanceScales, RawLosses | None]:
        """Return the scales, and the losses that the state takes, if they were measured for it."""
        known = self._known(state)
        if known is not None:
            return self.ratios.scales(known, weights), None
        measure = gradient_norms if self.mode == "gradient_norm" else loss_values
        raw, taken = measure(student, signals, own, step), None
        if not self.from_last_step:
            # Of losses that are not finite no mean is: the scales are one.
            taken = raw
            after = state.advanced(raw, measure=self.mode, decay=self.decay)
            raw = after.mean(decay=self.decay) or raw
        if self.mode == "gradient_norm":
            # The losses measured here already include these weights.
            weights = replace(weights, terms=(1.0,), features=(1.0,) * len(raw.features))
        return self.ratios.scales(raw, weights), taken

    def _logged(
        self, own: TokenObjective, alpha: float, scales: BalanceScales, weights: LossWeights
    ) -> dict[str, Factor]:
        logged: dict[str, Factor] = {"alpha": alpha, "ce_weight": weights.ce}
        if self.is_measured:
            logged["kd_scale"] = scales.kd
            if weights.features:
                logged["feature_scale"] = scales.feature
        for term, weight, temperature in zip(
            own.terms, weights.terms, self.schedules.temperatures, strict=True
        ):
            logged[f"{term.name}_weight"] = weight
            if temperature.start != temperature.end:
                logged[f"{term.name}_temperature"] = term.temperature
        pairs = () if own.features is None else own.features.pairs
        for pair, weight in zip(pairs, weights.features, strict=True):
            logged[f"{pair.name}_weight"] = weight
        return logged


def _with_own_weights(
    objective: TokenObjective, own: LossWeights, values: Mapping[str, float]
) -> dict[str, float]:
    raw = raw_losses(objective, [values[name] for name in raw_names(objective)])
    found = {**values, "kd": float(weighted_sum(raw.terms, own.terms))}
    if objective.features is not None:
        found[FEATURES_LOSS] = float(weighted_sum(raw.features, own.features))
    return found


def _sources_with_own_weights(
    objective: TokenObjective, own: LossWeights, sources: SourceFigures
) -> SourceFigures:
    names = [term.name for term in objective.terms]
    kd = PUBLIC_NAMES["kd"]
    # Of a source's chunks none may be of one token on each side: it has no figure of such terms.
    return {
        source: {
            **figures,
            kd: float(weighted_sum([figures.get(name, 0.0) for name in names], own.terms)),
        }
        if kd in figures
        else figures
        for source, figures in sources.items()
    }


def _mean(
    logged: Sequence[Mapping[str, Factor]], groups: Groups, step: StepBatches
) -> dict[str, Factor]:
    """The mean over the micro-batches of all data and context ranks, fp32 scalars."""
    names = list(logged[0])
    device = step.micro_batches[0].tokens_bs.device
    total = as_rows([[one[name] for name in names] for one in logged], device).sum(0)
    if groups.data_context.size() > 1:
        dist.all_reduce(total, group=groups.data_context)
    means = total / (len(logged) * groups.data_context.size())
    return dict(zip(names, means.unbind(), strict=True))


# Steps in a row at the clamp before a warning.
CLAMPED_STEPS: Final = 20
# Means over micro-batches are summed in fp32.
_ROUNDING: Final = 1e-5
# Of each scale: the losses it multiplies, the reference losses, and the key of its weights.
_SCALES: Final = {
    "kd_scale": ("distillation", "the cross-entropy", "objective.terms"),
    "feature_scale": ("feature losses", "the divergences", "objective.features"),
}


class ClampWatch:
    """Counts applied steps whose scales are at the clamp, from the logged figures of a balance.

    The figures are host floats, the same on every rank. A scale at either end of the clamp counts;
    a step away from it resets the count. The count starts at zero in each start of a run.
    """

    def __init__(self, clamp: float | None) -> None:
        self._clamp = clamp
        self._counts = dict.fromkeys(_SCALES, 0)

    def observe(self, balance: Mapping[str, float]) -> list[str]:
        """Take an applied step's figures; return a warning for each scale, once."""
        if self._clamp is None:
            return []
        return list(self._warnings(balance, self._clamp))

    def _warnings(self, balance: Mapping[str, float], clamp: float) -> Iterator[str]:
        for name in [known for known in _SCALES if known in balance]:
            scale, count = balance[name], self._counts[name]
            held = any(math.isclose(scale, end, rel_tol=_ROUNDING) for end in (clamp, 1 / clamp))
            if count < CLAMPED_STEPS:
                self._counts[name] = count + 1 if held else 0
                if self._counts[name] == CLAMPED_STEPS:
                    yield _warning(name, scale, clamp)


def _warning(name: str, scale: float, clamp: float) -> str:
    losses, others, key = _SCALES[name]
    size, change = ("small", "raise") if scale >= 1 else ("large", "lower")
    return (
        f"objective.balance.clamp = {clamp:g}: {name} was {scale:.6g} in each of the last "
        f"{CLAMPED_STEPS} steps, its limit. The losses are not balanced: {losses} are too {size} "
        f"relative to {others}; raise objective.balance.clamp, or {change} the weights of {key}"
    )
