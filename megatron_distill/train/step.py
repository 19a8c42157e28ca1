"""One optimizer step: the student's schedule over pairs of micro-batch and teacher signal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_distill.models.gpt import HiddenStateGPT, run_model
from megatron_distill.runtime.batch import Batch, StepBatches
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import Signal, Signals, WithFeatures
from megatron_distill.train.features import FEATURES_LOSS
from megatron_distill.train.metrics import LabelTotals, SourceFigures, step_figures
from megatron_distill.train.objective import (
    Head,
    MicroBatchObjective,
    TokenObjective,
    reduce_report,
)
from megatron_distill.train.optimizer import apply_gradients, gradient_norm, wait_for_parameter
from megatron_distill.train.phase_timers import COMMUNICATION, LOSS, OPTIMIZER, PhaseTimers
from megatron_distill.train.several_loss import TeacherFigures

ForwardStep = Callable[[Iterator[Any], torch.nn.Module], tuple[Tensor, Callable[..., Any]]]


def run_schedule(
    forward_step: ForwardStep,
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[Any],
    *,
    groups: Groups,
    micro_batch_size: int,
    sequence_length: int,
    forward_only: bool = False,
    collect_outputs: bool = False,
) -> list[Any]:
    """Run the stock schedule that fits the chunks: no pipeline, 1F1B, or interleaved.

    `forward_step(iterator, chunk)` takes its item from the iterator over `micro_batches`; each
    model chunk has a separate iterator. Returns the loss function's report per micro-batch
    on the last stage, an empty list elsewhere. With `collect_outputs` the loss function is called
    as `loss_function(output, non_loss_data=True)`.

    Collective: pipeline group, one send and one receive of [s, b, h] per micro-batch, stage
    boundary and direction. Plus those of the models and of the loss function.
    """
    schedule = get_forward_backward_func(
        pp_size=groups.pipeline.size(), vp_size=len(chunks) if len(chunks) > 1 else None
    )
    return schedule(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        seq_length=sequence_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=sequence_length,
        forward_only=forward_only,
        collect_non_loss_data=collect_outputs,
    )


PROJECTOR_NORM = "projector_grad_norm"
_Item = tuple[int, Batch, MicroBatchObjective]


@dataclass(frozen=True)
class Student:
    """The trained model: its chunks as Megatron-Core modules and as data-parallel wrappers.

    The schedule's phases are measured if `connect_schedule` was given the same timers.
    """

    chunks: Sequence[HiddenStateGPT]
    wrapped: Sequence[DistributedDataParallel]
    groups: Groups
    sequence_length: int
    timers: PhaseTimers = field(default_factory=lambda: PhaseTimers(torch.device("cpu")))

    @property
    def head(self) -> MainGradientHead:
        """The output head, on the last stage."""
        return MainGradientHead(self.chunks[-1], self.wrapped[-1])


class LateNumbers(Protocol):
    """Numbers of the device that the host reads with the losses of a step, after its update."""

    def tensors(self, means: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """Scalars in an order of its own, from the means of the step too, if it needs them.

        Collective: that of the implementation.
        """
        ...

    def objective(self, numbers: Sequence[float]) -> TokenObjective:
        """The objective of the first micro-batch, whose weights are numbers of the host."""
        ...


@dataclass(frozen=True)
class StepReport:
    """The global means of one step, on every rank; also per source if there are several.

    Attributes:
        late: the values of `LateNumbers`.
    """

    values: dict[str, float]
    grad_norm: float
    learning_rate: float  # of the update, whether applied or not
    applied: bool
    sources: SourceFigures
    teachers: TeacherFigures = field(default_factory=dict)  # where there are several
    late: tuple[float, ...] = ()


def _forward(
    iterator: Iterator[_Item],
    chunk: torch.nn.Module,
    *,
    student: Student,
    signals: Signals,
    step: StepBatches,
) -> tuple[Tensor, Any]:
    number, batch, objective = next(iterator)
    # Before the student: its activations are not in memory while a live teacher runs. Of a stage's
    # chunks the last one has the loss; layers with feature losses take their own.
    given = signals[number] if chunk is student.wrapped[-1] else None
    hidden_sbh = run_model(
        chunk,
        batch,
        context_size=student.groups.context.size(),
        micro_batch=None if objective.features is None else number,
    )
    signal = given.signal if isinstance(given, WithFeatures) else given
    return hidden_sbh, partial(
        _loss,
        timers=student.timers,
        objective=objective,
        head=student.head,
        batch=batch,
        signal=signal,
        step=step,
    )


def _loss(
    hidden_sbh: Tensor,
    *,
    timers: PhaseTimers,
    objective: MicroBatchObjective,
    head: Head,
    batch: Batch,
    signal: Signal | None,
    step: StepBatches,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    with timers.phase(LOSS):
        total, report = objective(hidden_sbh, head, batch, signal, step)
    positions = total.new_full((), batch.tokens_bs.numel(), dtype=torch.int)
    return total * step.positions, positions, {**report, "total": total.detach()}


def student_reports(
    student: Student,
    signals: Signals,
    objectives: Sequence[MicroBatchObjective],
    step: StepBatches,
    *,
    forward_only: bool = False,
    feature_gradients: bool = False,
) -> list[dict[str, Tensor]]:
    """Run the student's schedule, leaving gradients in its buffers unless `forward_only`.

    Each micro-batch has its own signal and objective. Returns the reports of all micro-batches on
    the last stage, an empty list elsewhere. Feature losses stay open until `FeatureLosses.finish`;
    with `feature_gradients` they are the squared norms of their gradients.

    Collective: those of `run_schedule`, and of the signal and the objective per micro-batch.
    """
    batches = step.micro_batches
    assert len(signals) == len(batches), (len(signals), len(batches))
    features = objectives[0].features
    if features is not None:
        weights = [objective.feature_weights for objective in objectives]
        features.begin(signals, step, weights, of_gradients=feature_gradients)
    numbered = enumerate(zip(batches, objectives, strict=True))
    return run_schedule(
        partial(_forward, student=student, signals=signals, step=step),
        student.wrapped,
        [(number, batch, objective) for number, (batch, objective) in numbered],
        groups=student.groups,
        micro_batch_size=batches[0].tokens_bs.shape[0],
        sequence_length=student.sequence_length,
        forward_only=forward_only,
    )


def run_student(
    student: Student,
    signals: Signals,
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
        signals,
        objectives,
        step,
        forward_only=forward_only,
        feature_gradients=feature_gradients,
    )
    with student.timers.phase(COMMUNICATION):
        means = reduce_report(
            reports,
            names=objectives[0].report_names,
            source_names=objectives[0].source_report_names,
            groups=student.groups,
            device=step.micro_batches[0].tokens_bs.device,
        )
    features = objectives[0].features
    if features is not None:
        means |= features.finish()
        means["total"] = means["total"] + means[FEATURES_LOSS]
    return means


def train_step(
    student: Student,
    optimizer: ChainedOptimizer,
    schedule: OptimizerParamScheduler,
    signals: Signals,
    objectives: Sequence[TokenObjective],
    step: StepBatches,
    *,
    clip_grad_norm: float,
    late: LateNumbers | None = None,
) -> StepReport:
    """Take one optimizer step; each micro-batch has its own objective.

    A loss or gradient that is not finite leaves weights, optimizer states and the learning-rate
    schedule unchanged, and the feature projectors with their optimizer too. The device decides,
    and the losses and the norm are copied to the host once, after the update was launched.
    """
    timers = student.timers
    projectors = objectives[0].features.projectors if objectives[0].features else None
    with timers.phase(OPTIMIZER):
        for chunk in student.wrapped:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        if projectors is not None:
            projectors.zero_gradients()
    means = run_student(student, signals, objectives, step)
    checked = [means["total"]]
    if projectors is not None:
        with timers.phase(COMMUNICATION):
            means[PROJECTOR_NORM] = projectors.reduce_gradients()
        checked.append(means[PROJECTOR_NORM])
    learning_rate = float(optimizer.param_groups[0]["lr"])
    with timers.phase(OPTIMIZER):
        update = apply_gradients(optimizer, clip_grad_norm=clip_grad_norm, checked=checked)
        if projectors is not None:
            norm = means[PROJECTOR_NORM]
            projectors.apply_gradients(schedule, norm=norm, skipped=update.skipped)
    # The host's only look at the device, when all work of the step has been launched.
    others = () if late is None else late.tensors(means)
    parts = [torch.stack(list(means.values())), update.squares, *(one.reshape(1) for one in others)]
    figures = torch.cat(parts).tolist()
    values = dict(zip(means, figures, strict=False))
    first = len(figures) - len(others)
    grad_norm, numbers = gradient_norm(figures[len(means) : first]), tuple(figures[first:])
    # As `update.skipped`, from the same numbers.
    judged = (values["total"], values.get(PROJECTOR_NORM, 0.0), grad_norm)
    is_applied = all(map(math.isfinite, judged))
    if is_applied:
        # As in Megatron's loop, an update's rate is computed from the number of updates before.
        schedule.step(1)
    objective = objectives[0] if late is None else late.objective(numbers)
    teachers = objective.take_teacher_figures(values, LabelTotals.of([step], ()).whole)
    sources = step_figures(
        values,
        step,
        objective.source_names,
        terms=[term.name for term in objective.terms],
        on_chunks=objective.on_chunks,
    )
    return StepReport(values, grad_norm, learning_rate, is_applied, sources, teachers, numbers)


@dataclass(frozen=True)
class MainGradientHead:
    """The head of a wrapped model chunk, with its fp32 gradient buffer.

    The buffer, `main_grad`, holds the sum over the micro-batches of a step; the data-parallel ranks
    reduce it. Megatron's hook on a parameter adds the gradient from autograd and marks the
    parameter as done. For the head autograd returns no gradient.
    """

    chunk: HiddenStateGPT
    wrapped: DistributedDataParallel

    def head_weight(self) -> Tensor:
        """This rank's rows of the head [V, H], with the values of the last step.

        Collective: as `wait_for_parameter`.
        """
        weight = self.chunk.head_weight()
        # No module is called with the head, so none of Megatron's hooks waits for its gather.
        wait_for_parameter(self.wrapped, weight)
        # Megatron's hook requires a gradient if the reductions overlap the backward pass. For a
        # weight that is tied to the embedding autograd returns one.
        overlaps = self.wrapped.ddp_config.overlap_grad_reduce
        if overlaps and not getattr(weight, "zero_out_wgrad", False):
            return _Announced.apply(weight)
        return weight

    def weight_gradient_sum(self) -> Tensor | None:
        """The buffer that the head's gradient is added to, fp32 [V, H]; None if there is none."""
        return getattr(self.chunk.head_weight(), "main_grad", None)


class _Announced(torch.autograd.Function):
    """The weight itself, with a gradient that Megatron's hook discards: the weight again.

    A gradient of its own would take [V, H] per micro-batch.
    """

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
        return ctx.weight.detach()
