"""Answers of a teacher on ranks of its own: when they arrive, and how long the student waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_distill.planning.device import DeviceProfile
    from megatron_distill.planning.run import Choice, PlannedRun

__all__ = ["answer_seconds", "answering_unit", "waiting_without_a_step_ahead"]


def answer_seconds(run: PlannedRun, choice: Choice, device: DeviceProfile) -> float:
    """Return the time of the message with the answer to a micro-batch."""
    tokens = choice.micro_batch_size * run.sequence_length / choice.layout.context
    return device.link(choice.devices).message(tokens * run.answer_bytes)


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
    before: float,
    period: float,
) -> float:
    """Return the seconds of a step in which the student waits, with `steps_ahead` of 0.

    Both sides begin a step together. The answer to micro-batch j arrives at A_j, and the student's
    last stage takes one micro-batch in each period T, the first one at t. So it waits
    max_j (A_j - j T) - t. That is exact for a student with one stage.

    teacher: seconds of the teacher's passes of a step, and of its pipeline before the first answer.
    before: t. period: T.
    """
    passes, fill = teacher
    of_unit = passes / choice.teacher_micro_batches(run)
    message = answer_seconds(run, choice, device)
    arrivals = [
        fill + of_unit * (answering_unit(run, choice, number) + 1) + message
        for number in range(choice.micro_batches(run))
    ]
    return max(0.0, max(at - number * period for number, at in enumerate(arrivals)) - before)
