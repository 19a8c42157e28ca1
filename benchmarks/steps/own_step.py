"""Our own training step on a case: teacher first, then the student's stock schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.harness.op_profile import LOSS_RANGE
from benchmarks.steps.cases import Case
from benchmarks.steps.subject import (
    OPTIMIZER,
    STUDENT_SEED,
    TEACHER_SEED,
    StepFigures,
    TrainingState,
    architecture,
    execution,
    random_gpt,
    training_state,
)
from megatron_distill.losses import Term
from megatron_distill.models.gpt import vocab_shard
from megatron_distill.ops import LogitRule
from megatron_distill.runtime.batch import Batch, StepBatches
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import Signal, Signals
from megatron_distill.train.objective import Head, TokenObjective
from megatron_distill.train.optimizer import connect_schedule, wrap_data_parallel
from megatron_distill.train.phase_timers import TEACHER, PhaseTimers
from megatron_distill.train.step import Student, train_step
from megatron_distill.train.teachers.live import OnlineTeacher

_METRICS = ("teacher_ce", "student_entropy", "teacher_entropy", "top1_agreement")


class MarkedObjective(TokenObjective):
    """The objective, visible as a range in a profile."""

    def __call__(
        self,
        hidden_sbh: Tensor,
        head: Head,
        batch: Batch,
        signal: Signal | None,
        step: StepBatches,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the objective's result."""
        with torch.profiler.record_function(LOSS_RANGE):
            return super().__call__(hidden_sbh, head, batch, signal, step)


@dataclass(frozen=True)
class OwnStep:
    """The parts of the training loop that one step needs."""

    student: Student
    teacher: OnlineTeacher
    objective: TokenObjective
    training: TrainingState

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        """The student's chunks and the teacher."""
        return [*self.student.chunks, self.teacher.model]

    def step(self, batches: StepBatches) -> StepFigures:
        """Do the training loop's work between two batches of the loader."""
        timers = self.student.timers
        timers.start_step()
        with timers.phase(TEACHER):
            signals = self.teacher.signals(batches.micro_batches)
        report = train_step(
            self.student,
            self.training.optimizer,
            self.training.schedule,
            timers.of_teacher(signals),
            [self.objective] * len(signals),
            batches,
            clip_grad_norm=OPTIMIZER.clip_grad_norm,
        )
        return StepFigures(report.values["ce"], report.values["kd"], timers.end_step())


def build_own_step(case: Case, *, groups: Groups, device: torch.device) -> OwnStep:
    """Assemble teacher, student, objective and optimizer of a case."""
    trained = build_student(case, Term("forward_kl"), _METRICS, groups=groups, device=device)
    teacher = build_teacher(case, groups=groups, device=device)
    return OwnStep(trained.student, teacher, trained.objective, trained.training)


@dataclass(frozen=True)
class TrainedStudent:
    """A step's parts besides the teacher."""

    student: Student
    objective: TokenObjective
    training: TrainingState

    def step(self, batches: StepBatches, signals: Signals) -> dict[str, float]:
        """Take one optimizer step towards these signals; return the global means."""
        report = train_step(
            self.student,
            self.training.optimizer,
            self.training.schedule,
            signals,
            [self.objective] * len(signals),
            batches,
            clip_grad_norm=OPTIMIZER.clip_grad_norm,
        )
        return report.values


def build_student(
    case: Case,
    term: Term,
    metrics: tuple[str, ...],
    *,
    groups: Groups,
    device: torch.device,
) -> TrainedStudent:
    """Assemble student, objective of cross-entropy and one term, and optimizer of a case."""
    shape = architecture(case.workload.student, case)
    run = execution(case, device)
    chunks = random_gpt(shape, run, groups=groups, seed=STUDENT_SEED)
    wrapped = wrap_data_parallel(chunks, OPTIMIZER, groups=groups)
    timers = PhaseTimers(device)
    connect_schedule(wrapped, OPTIMIZER, positions=case.tokens_per_step, timers=timers)
    return TrainedStudent(
        student=Student(chunks, wrapped, groups, case.workload.sequence_length, timers),
        objective=MarkedObjective(
            ce_weight=1.0,
            terms=(term,),
            chunk_tokens=case.chunk_tokens,
            shard=vocab_shard(shape, groups),
            logit_rule=LogitRule(None, 1.0),
            metrics=metrics,
            groups=groups,
        ),
        training=training_state(wrapped, dtype=run.dtype),
    )


def build_teacher(case: Case, *, groups: Groups, device: torch.device) -> OnlineTeacher:
    """Build the frozen teacher of a case."""
    shape = architecture(case.workload.teacher, case)
    run = execution(case, device)
    (model,) = random_gpt(shape, run, groups=groups, seed=TEACHER_SEED, interleaved=False)
    model.requires_grad_(False)
    model.eval()
    return OnlineTeacher(
        model=model,
        architecture=shape,
        head_weight=model.head_weight().detach() if groups.is_last_stage else None,
        groups=groups,
        sequence_length=case.workload.sequence_length,
    )
