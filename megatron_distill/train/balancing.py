"""The loss weights of a step: from schedules, and from the measured losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
import torch.distributed as dist

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
from megatron_distill.runtime.batch import StepBatches
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.segments import copied
from megatron_distill.signals import Signals
from megatron_distill.train.features import FEATURES_LOSS
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

    Attributes:
        objectives: one per micro-batch of this rank.
        own_weights: the scheduled weights of the losses, before alpha and scales.
        states: before this step, and after it if it is applied. With `from_last_step` both are
            equal, since `finish` adds this step's losses.
        logged: weights, scales and temperatures, the same on every rank; empty if they never
            change.
    """

    objectives: tuple[TokenObjective, ...]
    own_weights: LossWeights
    states: tuple[BalanceState, BalanceState]
    logged: Mapping[str, float]


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
        after = state
        if self.per_micro_batch:
            raws = local_loss_values(student, signals, own, step)
            each = [self.ratios.scales(raw, weights) for raw in raws]
        else:
            scales = BalanceScales()
            if self.is_measured:
                scales, after = self._measured(student, signals, own, step, weights, state)
            each = [scales] * len(signals)
        effective = [scaled_weights(weights, alpha=alpha, scales=scales) for scales in each]
        temperatures = [term.temperature for term in own.terms]
        objectives = tuple(own.at(one, temperatures) for one in effective)
        if self.mode == "fixed" and alpha == 1.0:
            return BalancedStep(objectives, weights, (state, after), {})
        logged = [
            self._logged(own, alpha, scales, one)
            for scales, one in zip(each, effective, strict=True)
        ]
        means = _mean(logged, student.groups, step) if self.per_micro_batch else logged[0]
        return BalancedStep(objectives, weights, (state, after), means)

    def finish(
        self, balanced: BalancedStep, report: StepReport, *, groups: Groups, device: torch.device
    ) -> tuple[BalanceState, StepReport]:
        """Return the state and the report of a step; a step not applied leaves the state unchanged.

        `kd`, also per source, and the sum of the features are recomputed with the scheduled
        weights, so that they are comparable from step to step.

        Collective: with `from_last_step`, that of `agreed`.
        """
        if balanced.logged and "kd" in report.values:
            report = replace(
                report,
                values=_with_own_weights(balanced, report.values),
                sources=_sources_with_own_weights(balanced, report.sources),
            )
        before, after = balanced.states
        if not report.applied:
            return before, report
        if not self.from_last_step:
            return after, report
        values = [report.values[name] for name in raw_names(balanced.objectives[0])]
        values = agreed(copied(torch.tensor(values), device), groups=groups)
        raw = raw_losses(balanced.objectives[0], values)
        return before.updated(raw, measure=self.mode, decay=self.decay), report

    def _measured(
        self,
        student: Student,
        signals: Signals,
        own: TokenObjective,
        step: StepBatches,
        weights: LossWeights,
        state: BalanceState,
    ) -> tuple[BalanceScales, BalanceState]:
        known = self._known(state)
        if known is not None:
            return self.ratios.scales(known, weights), state
        measure = gradient_norms if self.mode == "gradient_norm" else loss_values
        raw = measure(student, signals, own, step)
        if not self.from_last_step:
            state = state.updated(raw, measure=self.mode, decay=self.decay)
            raw = (state.mean(decay=self.decay) if raw.is_finite else None) or raw
        if self.mode == "gradient_norm":
            # The losses measured here already include these weights.
            weights = replace(weights, terms=(1.0,), features=(1.0,) * len(raw.features))
        return self.ratios.scales(raw, weights), state

    def _logged(
        self, own: TokenObjective, alpha: float, scales: BalanceScales, weights: LossWeights
    ) -> dict[str, float]:
        logged = {"alpha": alpha, "ce_weight": weights.ce}
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


def _with_own_weights(balanced: BalancedStep, values: Mapping[str, float]) -> dict[str, float]:
    objective, own = balanced.objectives[0], balanced.own_weights
    raw = raw_losses(objective, [values[name] for name in raw_names(objective)])
    found = {**values, "kd": weighted_sum(raw.terms, own.terms)}
    if objective.features is not None:
        found[FEATURES_LOSS] = weighted_sum(raw.features, own.features)
    return found


def _sources_with_own_weights(balanced: BalancedStep, sources: SourceFigures) -> SourceFigures:
    names = [term.name for term in balanced.objectives[0].terms]
    kd = PUBLIC_NAMES["kd"]
    # Of a source's chunks none may be of one token on each side: it has no figure of such terms.
    return {
        source: {
            **figures,
            kd: weighted_sum(
                [figures.get(name, 0.0) for name in names], balanced.own_weights.terms
            ),
        }
        if kd in figures
        else figures
        for source, figures in sources.items()
    }


def _mean(
    logged: Sequence[Mapping[str, float]], groups: Groups, step: StepBatches
) -> dict[str, float]:
    """The mean over the micro-batches of all data and context ranks."""
    names = list(logged[0])
    device = step.micro_batches[0].tokens_bs.device
    rows = torch.tensor([[one[name] for name in names] for one in logged])
    total = copied(rows, device).sum(0)
    if groups.data_context.size() > 1:
        dist.all_reduce(total, group=groups.data_context)
    means = total / (len(logged) * groups.data_context.size())
    return dict(zip(names, means.tolist(), strict=True))


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
