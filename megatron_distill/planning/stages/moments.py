"""Moments of a stage's step at which its memory may peak: passes, their messages, and the update.

A message is the stream between two stages for one micro-batch: an output, an input or the gradient
of one. Megatron-Core's schedules drop one when its variable gets the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_distill.planning.losses.gathered_layers import gathered_layers
from megatron_distill.planning.updates import update_bytes

if TYPE_CHECKING:
    from megatron_distill.models.architecture import Architecture
    from megatron_distill.planning.activations import Activations
    from megatron_distill.planning.device import DeviceProfile
    from megatron_distill.planning.parameters import RankNumbers
    from megatron_distill.planning.run import Choice, PlannedRun
    from megatron_distill.runtime.layout import Layout

__all__ = ["student_peak", "teacher_input"]


def student_peak(
    run: PlannedRun,
    choice: Choice,
    device: DeviceProfile,
    numbers: RankNumbers,
    stage: int,
    *,
    held: Activations,
    chunk: float,
) -> float:
    """Return the bytes of the student's fullest moment on a stage, without the teacher's.

    chunk: bytes of a loss chunk and of the inputs of heads; zero but on the last stage.
    """
    messages = _messages(run, choice, stage)
    # The loss, the backward pass of the last layer, and that of the embedding follow each other.
    # Before a layer's backward pass comes that of its loss.
    return max(
        held.in_flight + chunk + messages.in_loss,
        held.in_flight + messages.sent,
        held.in_flight + held.live + messages.in_layer,
        held.in_flight + gathered_layers(run, choice, stage).peak,
        held.in_flight - held.one + _embedding_gradient(run, choice, stage) + messages.in_embedding,
        update_bytes(run, choice, device, numbers),
    )


@dataclass(frozen=True)
class _Messages:
    """Bytes of messages at a moment of a stage, beside activations.

    sent: after a forward pass, while the next gradient arrives. in_layer: in a layer's backward
    pass, where its own gradient is counted. in_embedding: in that of the embedding. in_loss: in the
    loss of the last stage.
    """

    sent: float
    in_layer: float
    in_embedding: float
    in_loss: float


def _messages(run: PlannedRun, choice: Choice, stage: int) -> _Messages:
    """Return the messages of a rank of the student's pipeline."""
    layout, pipeline = choice.layout, choice.layout.pipeline
    one = _message(run.student, choice, layout, run.sequence_length, run.width)
    if pipeline == 1:
        return _Messages(0.0, 0.0, one, 0.0)  # the gradient of the embedded tokens
    if layout.virtual_pipeline is not None:
        # A forward and a backward pass send together, so the output waits for the gradient. That of
        # the pass before is in its variable.
        return _Messages(0.0, 2 * one, 4 * one, one)
    # Whether a pass with as much in flight comes after a backward pass.
    follows = choice.micro_batches(run) > pipeline - stage
    # The gradient that was sent last. In the loss also its input: the graph of the pass before has
    # it until the loss is the output.
    before = one if stage and follows else 0.0
    # The output, the gradient that arrives, and the one that arrived before.
    sent = 0.0 if stage == pipeline - 1 else one * (2 + follows) + before
    return _Messages(sent, before, 2 * one, 2 * before)


def teacher_input(run: PlannedRun, choice: Choice, stage: int) -> float:
    """Return the bytes of what a teacher's stage received last, which its module keeps.

    stage: of the student, whose ranks run the teacher.
    """
    layout = choice.teacher_layout
    if run.teacher is None or layout is None or layout.pipeline == 1:
        return 0.0
    if choice.is_same_layout and stage == 0:
        return 0.0
    length = run.teacher_length or run.sequence_length
    return _message(run.teacher, choice, layout, length, run.width)


def _message(shape: Architecture, choice: Choice, layout: Layout, length: int, width: int) -> float:
    tokens = choice.micro_batch_size * length / layout.context
    return tokens * shape.hidden_size * width / (layout.tensor if layout.sequence else 1)


def _embedding_gradient(run: PlannedRun, choice: Choice, stage: int) -> float:
    """Return the bytes of the gradient of the embedding, which exists whole before it is added."""
    if stage:
        return 0.0
    split = choice.layout.tensor
    rows = run.student.padded_vocab_size(split) // split
    return float(rows * run.student.hidden_size * run.width)
