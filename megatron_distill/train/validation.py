"""Held-out losses of the student and its teacher, and how often they agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_distill.runtime.batch import StepBatches
from megatron_distill.signals import Teacher
from megatron_distill.train.objective import TokenObjective
from megatron_distill.train.step import Student, run_student


@dataclass(frozen=True)
class HeldOut:
    """What a student is measured on.

    Attributes:
        steps: batches of the training's size.
        teacher: None where it has nothing to say about them.
        objective: of the labels alone where there is no teacher.
    """

    steps: Sequence[StepBatches]
    teacher: Teacher | None
    objective: TokenObjective

    @classmethod
    def of(
        cls, steps: Sequence[StepBatches], teacher: Teacher | None, objective: TokenObjective
    ) -> HeldOut:
        """Held-out batches with as much of an objective as there is a teacher for."""
        return cls(steps, teacher, objective if teacher else objective.of_labels())


@torch.no_grad()
def validate(student: Student, held_out: HeldOut) -> dict[str, float]:
    """Return the means over all held-out tokens, the same on every rank.

    The objective of each batch is a mean over that batch, so batches are put together again by
    their token counts: `ce` and `teacher_ce` by trained labels, everything else by distilled
    positions.

    Collective: per held-out batch, those of the teacher's pass and of `run_student`.
    """
    teacher, objective = held_out.teacher, held_out.objective
    sums: dict[str, torch.Tensor] = {}
    ce_tokens = sum(batch.ce_tokens for batch in held_out.steps)
    kd_tokens = sum(batch.kd_tokens for batch in held_out.steps)
    with evaluating(student):
        for step in held_out.steps:
            batches = step.micro_batches
            signals = teacher.signals(batches) if teacher else [None] * len(batches)
            pairs = list(zip(batches, signals, strict=True))
            means = run_student(student, pairs, objective, step, forward_only=True)
            for name, mean in means.items():
                by_label = name in LABEL_MEANS
                mine, all_ = (
                    (step.ce_tokens, ce_tokens) if by_label else (step.kd_tokens, kd_tokens)
                )
                share = mine / all_ if all_ else 0.0
                sums[name] = sums.get(name, torch.zeros_like(mean)) + mean * share
    names = list(sums)
    return dict(zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True))


LABEL_MEANS = frozenset({"ce", "teacher_ce"})


@contextmanager
def evaluating(student: Student) -> Iterator[None]:
    """Put the student in evaluation mode, with the parameters of the last step gathered."""
    gathered = [chunk for chunk in student.wrapped if chunk.ddp_config.overlap_param_gather]
    for chunk in gathered:
        if chunk.remove_forward_pre_hook_handles:
            chunk.disable_forward_pre_hook()
    for chunk in student.wrapped:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in student.wrapped:
            chunk.train()
        for chunk in gathered:
            if not chunk.remove_forward_pre_hook_handles:
                chunk.enable_forward_pre_hook()
