"""One optimizer step: the student's schedule over pairs of micro-batch and teacher signal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_distill.models.gpt import HiddenStateGPT, run_model
from megatron_distill.runtime.batch import Batch, StepBatches
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import Signal, WithFeatures
from megatron_distill.train.features import FEATURES_LOSS
from megatron_distill.train.objective import TokenObjective, reduce_report
from megatron_distill.train.optimizer import apply_gradients
from megatron_distill.train.schedule import run_schedule

PROJECTOR_NORM = "projector_grad_norm"
Pair = tuple[Batch, Signal | WithFeatures | None]


@dataclass(frozen=True)
class Student:
    """The trained model: its chunks as Megatron-Core modules and as data-parallel wrappers."""

    chunks: Sequence[HiddenStateGPT]
    wrapped: Sequence[DistributedDataParallel]
    groups: Groups
    sequence_length: int


@dataclass(frozen=True)
class StepReport:
    """The global means of one step, on every rank."""

    values: dict[str, float]
    grad_norm: float
    applied: bool


def _forward(
    iterator: Iterator[tuple[int, Pair]],
    chunk: torch.nn.Module,
    *,
    student: Student,
    objective: TokenObjective,
    step: StepBatches,
) -> tuple[Tensor, Any]:
    number, (batch, spoken) = next(iterator)
    hidden_sbh = run_model(
        chunk,
        batch,
        context_size=student.groups.context.size(),
        micro_batch=None if objective.features is None else number,
    )
    signal = spoken.signal if isinstance(spoken, WithFeatures) else spoken
    return hidden_sbh, partial(
        _loss, objective=objective, head=student.chunks[-1], batch=batch, signal=signal, step=step
    )


def _loss(
    hidden_sbh: Tensor,
    *,
    objective: TokenObjective,
    head: HiddenStateGPT,
    batch: Batch,
    signal: Signal | None,
    step: StepBatches,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, report = objective(hidden_sbh, head, batch, signal, step)
    positions = total.new_full((), batch.tokens_bs.numel(), dtype=torch.int)
    return total * step.positions, positions, {**report, "total": total.detach()}


def run_student(
    student: Student,
    pairs: Sequence[Pair],
    objective: TokenObjective,
    step: StepBatches,
    *,
    forward_only: bool = False,
) -> dict[str, Tensor]:
    """Run the student's schedule, leaving gradients in its buffers unless `forward_only`.

    Returns the global means that the objective reports (fp32 scalars, the same on every rank).

    Collective: those of `run_schedule`, of the objective per micro-batch, of `reduce_report` and of
    the feature losses.
    """
    features = objective.features
    if features is not None:
        spoken = [_features(pair) for pair in pairs]
        features.begin(spoken, step, objective.feature_weights)
    reports = run_schedule(
        partial(_forward, student=student, objective=objective, step=step),
        student.wrapped,
        list(enumerate(pairs)),
        groups=student.groups,
        micro_batch_size=pairs[0][0].tokens_bs.shape[0],
        sequence_length=student.sequence_length,
        forward_only=forward_only,
    )
    means = reduce_report(
        reports,
        names=objective.report_names,
        groups=student.groups,
        device=pairs[0][0].tokens_bs.device,
    )
    if features is not None:
        means |= features.finish()
        means["total"] = means["total"] + means[FEATURES_LOSS]
    return means


def _features(pair: Pair) -> Mapping[tuple[str, int], Tensor]:
    _, spoken = pair
    assert isinstance(spoken, WithFeatures)
    return spoken.features


def train_step(
    student: Student,
    optimizer: ChainedOptimizer,
    schedule: OptimizerParamScheduler,
    pairs: Sequence[Pair],
    objective: TokenObjective,
    step: StepBatches,
    *,
    clip_grad_norm: float,
) -> StepReport:
    """Take one optimizer step.

    A loss or gradient that is not finite leaves weights and optimizer state as they were, those of
    the features' projectors among them.
    """
    for chunk in student.wrapped:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    schedule.step(1)
    projectors = objective.features.projectors if objective.features else None
    if projectors is not None:
        projectors.zero_gradients()
    means = run_student(student, pairs, objective, step)
    if projectors is not None:
        means[PROJECTOR_NORM] = projectors.reduce_gradients()
    values = dict(zip(means, torch.stack(list(means.values())).tolist(), strict=True))
    projector_norm = values.get(PROJECTOR_NORM, 0.0)
    update = apply_gradients(
        optimizer,
        clip_grad_norm=clip_grad_norm,
        loss_is_finite=math.isfinite(values["total"]) and math.isfinite(projector_norm),
    )
    if projectors is not None and update.applied:
        projectors.apply_gradients(schedule, norm=projector_norm)
    return StepReport(values, update.grad_norm, update.applied)
