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
from torch.autograd.function import once_differentiable

from megatron_distill.models.gpt import HiddenStateGPT, run_model
from megatron_distill.runtime.batch import Batch, StepBatches
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import Signal, WithFeatures
from megatron_distill.train.features import FEATURES_LOSS
from megatron_distill.train.objective import (
    Head,
    MicroBatchObjective,
    TokenObjective,
    reduce_report,
)
from megatron_distill.train.optimizer import apply_gradients
from megatron_distill.train.pipeline_schedule import run_schedule
from megatron_distill.train.source_metrics import SourceFigures, step_figures

PROJECTOR_NORM = "projector_grad_norm"
Pair = tuple[Batch, Signal | WithFeatures | None]
_Item = tuple[int, Pair, MicroBatchObjective]


@dataclass(frozen=True)
class Student:
    """The trained model: its chunks as Megatron-Core modules and as data-parallel wrappers."""

    chunks: Sequence[HiddenStateGPT]
    wrapped: Sequence[DistributedDataParallel]
    groups: Groups
    sequence_length: int

    @property
    def head(self) -> MainGradientHead:
        """The output head, on the last stage."""
        return MainGradientHead(
            self.chunks[-1], overlaps=self.wrapped[-1].ddp_config.overlap_grad_reduce
        )


@dataclass(frozen=True)
class StepReport:
    """The global means of one step, on every rank; also per source if there are several."""

    values: dict[str, float]
    grad_norm: float
    learning_rate: float  # of the update, whether applied or not
    applied: bool
    sources: SourceFigures


def _forward(
    iterator: Iterator[_Item],
    chunk: torch.nn.Module,
    *,
    student: Student,
    step: StepBatches,
) -> tuple[Tensor, Any]:
    number, (batch, of_teacher), objective = next(iterator)
    hidden_sbh = run_model(
        chunk,
        batch,
        context_size=student.groups.context.size(),
        micro_batch=None if objective.features is None else number,
    )
    signal = of_teacher.signal if isinstance(of_teacher, WithFeatures) else of_teacher
    return hidden_sbh, partial(
        _loss, objective=objective, head=student.head, batch=batch, signal=signal, step=step
    )


def _loss(
    hidden_sbh: Tensor,
    *,
    objective: MicroBatchObjective,
    head: Head,
    batch: Batch,
    signal: Signal | None,
    step: StepBatches,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, report = objective(hidden_sbh, head, batch, signal, step)
    positions = total.new_full((), batch.tokens_bs.numel(), dtype=torch.int)
    return total * step.positions, positions, {**report, "total": total.detach()}


def student_reports(
    student: Student,
    pairs: Sequence[Pair],
    objectives: Sequence[MicroBatchObjective],
    step: StepBatches,
    *,
    forward_only: bool = False,
    feature_gradients: bool = False,
) -> list[dict[str, Tensor]]:
    """Run the student's schedule, leaving gradients in its buffers unless `forward_only`.

    Each micro-batch has its own objective. Returns the reports of all micro-batches on the last
    stage, an empty list elsewhere. Feature losses stay open until `FeatureLosses.finish`; with
    `feature_gradients` they are the squared norms of their gradients.

    Collective: those of `run_schedule` and of the objective per micro-batch.
    """
    features = objectives[0].features
    if features is not None:
        teacher_features = [_features(pair) for pair in pairs]
        weights = [objective.feature_weights for objective in objectives]
        features.begin(teacher_features, step, weights, of_gradients=feature_gradients)
    numbered = enumerate(zip(pairs, objectives, strict=True))
    return run_schedule(
        partial(_forward, student=student, step=step),
        student.wrapped,
        [(number, pair, objective) for number, (pair, objective) in numbered],
        groups=student.groups,
        micro_batch_size=pairs[0][0].tokens_bs.shape[0],
        sequence_length=student.sequence_length,
        forward_only=forward_only,
    )


def run_student(
    student: Student,
    pairs: Sequence[Pair],
    objectives: Sequence[MicroBatchObjective],
    step: StepBatches,
    *,
    forward_only: bool = False,
    feature_gradients: bool = False,
) -> dict[str, Tensor]:
    """Run the student's schedule as `student_reports` does, and sum the reports.

    Returns the global means that the objectives report (fp32 scalars, the same on every rank).

    Collective: those of `student_reports`, of `reduce_report` and of the feature losses.
    """
    reports = student_reports(
        student,
        pairs,
        objectives,
        step,
        forward_only=forward_only,
        feature_gradients=feature_gradients,
    )
    means = reduce_report(
        reports,
        names=objectives[0].report_names,
        source_names=objectives[0].source_report_names,
        groups=student.groups,
        device=pairs[0][0].tokens_bs.device,
    )
    features = objectives[0].features
    if features is not None:
        means |= features.finish()
        means["total"] = means["total"] + means[FEATURES_LOSS]
    return means


def _features(pair: Pair) -> Mapping[tuple[str, int], Tensor]:
    _, signal = pair
    assert isinstance(signal, WithFeatures)
    return signal.features


def train_step(
    student: Student,
    optimizer: ChainedOptimizer,
    schedule: OptimizerParamScheduler,
    pairs: Sequence[Pair],
    objectives: Sequence[TokenObjective],
    step: StepBatches,
    *,
    clip_grad_norm: float,
) -> StepReport:
    """Take one optimizer step; each micro-batch has its own objective.

    A loss or gradient that is not finite leaves weights, optimizer states and the learning-rate
    schedule unchanged, and the feature projectors with their optimizer too.
    """
    for chunk in student.wrapped:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    projectors = objectives[0].features.projectors if objectives[0].features else None
    if projectors is not None:
        projectors.zero_gradients()
    means = run_student(student, pairs, objectives, step)
    if projectors is not None:
        means[PROJECTOR_NORM] = projectors.reduce_gradients()
    values = dict(zip(means, torch.stack(list(means.values())).tolist(), strict=True))
    projector_norm = values.get(PROJECTOR_NORM, 0.0)
    terms = [term.name for term in objectives[0].terms]
    sources = step_figures(values, step, objectives[0].source_names, terms=terms)
    learning_rate = float(optimizer.param_groups[0]["lr"])
    update = apply_gradients(
        optimizer,
        clip_grad_norm=clip_grad_norm,
        loss_is_finite=math.isfinite(values["total"]) and math.isfinite(projector_norm),
    )
    if update.applied:
        if projectors is not None:
            projectors.apply_gradients(schedule, norm=projector_norm)
        # As in Megatron's loop, an update's rate is computed from the number of updates before it.
        schedule.step(1)
    return StepReport(values, update.grad_norm, learning_rate, update.applied, sources)


@dataclass(frozen=True)
class MainGradientHead:
    """The head of a model chunk, with its fp32 gradient buffer if the chunk is wrapped.

    The buffer, `main_grad`, holds the sum over the micro-batches of a step; the data-parallel ranks
    reduce it. Megatron's hook on a parameter adds the gradient from autograd and marks the
    parameter as done. For the head autograd returns no gradient.

    Attributes:
        chunk: the model chunk with the head.
        overlaps: whether gradient reduction overlaps the backward pass. Megatron's hook then
            requires a gradient.
    """

    chunk: HiddenStateGPT
    overlaps: bool

    def head_weight(self) -> Tensor:
        """This rank's rows of the head [V, H]."""
        weight = self.chunk.head_weight()
        # Autograd returns a gradient for a weight that is tied to the embedding.
        if self.overlaps and not getattr(weight, "zero_out_wgrad", False):
            return _Announced.apply(weight)
        return weight

    def weight_gradient_sum(self) -> Tensor | None:
        """The buffer that the head's gradient is added to, fp32 [V, H]; None if not wrapped."""
        return getattr(self.chunk.head_weight(), "main_grad", None)


class _Announced(torch.autograd.Function):
    """The weight itself, with a gradient of arbitrary values that Megatron's hook discards."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor:
        assert gradient is None, "the gradient is in main_grad"
        ctx.weight.grad_added_to_main_grad = True
        return torch.empty_like(ctx.weight)
