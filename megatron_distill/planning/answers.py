"""Answers of a teacher on ranks of its own: when they arrive, and how long the student waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_distill.planning.losses.layer_messages import (
    layer_bytes,
    moved_layers,
    needs_answer,
)

if TYPE_CHECKING:
    from megatron_distill.planning.device import DeviceProfile
    from megatron_distill.planning.run import Choice, PlannedRun

__all__ = [
    "answer_bytes",
    "answer_seconds",
    "answering_unit",
    "exchange_seconds",
    "waiting_without_a_step_ahead",
]


def answer_bytes(run: PlannedRun, choice: Choice) -> float:
    """Return the bytes of the answer to a micro-batch on a rank of the student's last stage.

    Tensor ranks have parts of hidden states with `sequence`, and all of them without it; of ids
    each has all.
    """
    layout = choice.layout
    if not choice.sends_ids(run):
        assert run.teacher is not None
        states = choice.teacher_tokens(run) * run.teacher.hidden_size * run.width
        return states / (layout.tensor if layout.sequence else 1)
    return choice.teacher_tokens(run) * run.answer_bytes


def answer_seconds(
    run: PlannedRun, choice: Choice, device: DeviceProfile, stage: int | None = None
) -> float:
    """Return the time of the message with the answer to a micro-batch.

    stage: pipeline rank of the student that receives it, with the layers for its losses; None: the
    last one, which has the losses between logits.
    """
    last = choice.layout.pipeline - 1
    stage = last if stage is None else stage
    received = layer_bytes(run, choice, stage)
    if stage == last:
        received += answer_bytes(run, choice)
    return device.link(choice.devices).message(received)


def exchange_seconds(run: PlannedRun, choice: Choice, device: DeviceProfile) -> float:
    """Return the time in which a teacher on the student's ranks sends the answers of a step.

    In the student's layout these are layers for losses on other stages; in a layout of its own all
    answers, those of the stage that receives most.
    """
    if choice.place != "shared":
        return 0.0
    count = choice.micro_batches(run)
    if choice.is_same_layout:
        most = count * max(moved_layers(run, choice))
        return device.link(choice.ranks).message(most) if most else 0.0
    last = choice.layout.pipeline - 1
    received = [count * layer_bytes(run, choice, stage) for stage in range(last + 1)]
    received[last] += count * answer_bytes(run, choice)
    return device.link(choice.ranks).message(max(received))


def answering_unit(run: PlannedRun, choice: Choice, micro_batch: int) -> int:
    """Return the micro-batch of the teacher whose answer one of the student's waits for.

    A replica of the teacher serves several of the student, or a part of one. Its micro-batches are
    spread evenly over those of the student's replica.
    """
    units, micro_batches = choice.teacher_micro_batches(run), choice.micro_batches(run)
    return -(-(micro_batch + 1) * units // micro_batches) - 1


def waiting_without_a_step_ahead(
    run: PlannedRun,
    choice: Choice,
    device: DeviceProfile,
    *,
    teacher: tuple[float, float],
    stages: Sequence[float],
    period: float,
) -> float:
    """Return the seconds of a step in which the student waits, with `steps_ahead` of 0.

    Both sides begin a step together. The answer to micro-batch j arrives at A_j, and the student's
    first stage that needs it takes one micro-batch in each period T, the first one at t. So it
    waits max_j (A_j - j T) - t. That is exact for a student with one stage.

    teacher: seconds of the teacher's passes of a step, and of its pipeline before the first answer.
    stages: of a micro-batch's forward pass on each stage, virtual ones included. period: T.
    """
    passes, fill = teacher
    of_unit = passes / choice.teacher_micro_batches(run)
    first = next(stage for stage in range(len(stages)) if needs_answer(run, choice, stage))
    before = sum(stages[:first])
    message = answer_seconds(run, choice, device, first % choice.layout.pipeline)
    arrivals = [
        fill + of_unit * (answering_unit(run, choice, number) + 1) + message
        for number in range(choice.micro_batches(run))
    ]
    return max(0.0, max(at - number * period for number, at in enumerate(arrivals)) - before)
