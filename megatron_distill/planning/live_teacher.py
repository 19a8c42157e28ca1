"""Bytes of a live teacher: weights, a forward pass, and answers that wait for the student."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron_distill.planning.activations import forward_bytes
from megatron_distill.planning.answers import answer_bytes
from megatron_distill.planning.losses.layer_messages import layer_bytes
from megatron_distill.planning.losses.token_losses import RowBlocks, chunk_rows, id_bytes
from megatron_distill.planning.parameters import dividing, stage_numbers
from megatron_distill.planning.run import Choice, PlannedRun, teachers_apart
from megatron_distill.planning.stages.known import known_of
from megatron_distill.planning.stages.moments import teacher_input

if TYPE_CHECKING:
    from megatron_distill.planning.device import DeviceProfile

__all__ = [
    "TeacherBytes",
    "answering_bytes",
    "copies_of_stage",
    "teacher_bytes",
    "weights_of_stage",
]


@dataclass(frozen=True)
class TeacherBytes:
    """Bytes of the live teachers, or of answers from elsewhere, on a rank of the student.

    weights: that stay here, copies and heads included. waiting: answers that wait for the student.
    forward: of the fullest forward pass, and of weights that are here for it. received: what the
    teachers' stages have kept of it while the student runs.
    """

    weights: float
    waiting: float
    forward: float
    received: float


def teacher_bytes(
    run: PlannedRun, choice: Choice, device: DeviceProfile, stage: int
) -> TeacherBytes:
    """Return the teachers' bytes on a rank of a stage of the student."""
    is_last = stage == choice.layout.pipeline - 1
    weights = waiting = forward = received = 0.0
    resting = []
    for one, its, share in teachers_apart(run, choice) if choice.place == "shared" else []:
        stays = _known_weights(one, its, stage)
        if _rests(one, its, device):
            resting.append(stays - _head_weights(one, its, stage))
            stays -= resting[-1]
        weights += stays + copies_of_stage(one, its, stage) + _moved_head(one, its, stage)
        in_step = _runs_in_step(one, its, device)
        # Answers of several teachers wait for the student together. Every micro-batch of a wave may
        # need one, and of a step this share does.
        waiting += _answers(one, its, stage, in_step=in_step) * (1.0 if in_step else share)
        kept = teacher_input(one, its, stage)
        received += kept
        # On the last stage the answer, which waits, comes after the input is gone.
        beside = 0.0 if is_last and its.is_same_layout else kept
        forward = max(forward, sum(answering_bytes(one, its, device)) + beside)
    if choice.place != "shared":
        weights = _moved_head(run, choice, stage)
        waiting = _answers(run, choice, stage, in_step=False)
    # The weights of the next teacher arrive while one runs.
    return TeacherBytes(weights, waiting, forward + sum(sorted(resting)[-2:]), received)


def _answers(run: PlannedRun, choice: Choice, stage: int, *, in_step: bool) -> float:
    """Return the teacher's answers on a rank of the student's pipeline.

    in_step: it runs when an answer is taken; otherwise before the student, for a whole step.
    """
    if choice.place in ("none", "store") or run.teacher is None:
        return 0.0
    layout = choice.layout
    layers, answer = layer_bytes(run, choice, stage), answer_bytes(run, choice)
    if in_step and choice.is_same_layout:
        return answer + layers
    count = choice.micro_batches(run)
    if in_step:
        count = min(count, choice.wave)
    is_last = stage == layout.pipeline - 1
    if choice.place == "own ranks":
        return (layers + answer * is_last) * count * (run.steps_ahead + 1)
    if run.offloads_hidden:  # the one in use and the next; of features in backward as well
        kept = count if choice.sends_ids(run) else min(2, count)
        return layers * min(4, count) + answer * is_last * kept
    return (layers + answer * is_last) * count


def _known_weights(run: PlannedRun, choice: Choice, stage: int) -> float:
    if run.shards_teacher:
        return weights_of_stage(run, choice, stage)
    own = stage if choice.is_same_layout else -1
    assert choice.teacher_layout is not None
    key = ("teacher weights", dividing(choice.teacher_layout), choice.teacher_layers, own)
    return known_of((run,), key, partial(weights_of_stage, run, choice, stage))


def weights_of_stage(run: PlannedRun, choice: Choice, stage: int) -> float:
    """Return the bytes of the teacher's weights on a rank; a student's stage is a teacher's."""
    assert run.teacher is not None
    layout = choice.teacher_layout
    assert layout is not None
    numbers = stage_numbers(run.teacher, layout, choice.teacher_layers)
    one = (
        numbers[min(stage, layout.pipeline - 1)]
        if choice.is_same_layout
        else max(numbers, key=lambda each: each.total)
    )
    count: float = one.total
    if run.shards_teacher:
        ranks = (choice.teacher_ranks or choice.ranks) // (layout.tensor * layout.pipeline)
        ends = one.total - _layer_numbers(run, choice, stage)
        layers = one.total - ends
        count = ends + layers / ranks + 2 * one.largest_layer * (ranks > 1)
    return count * run.width


def copies_of_stage(run: PlannedRun, choice: Choice, stage: int) -> int:
    """Return the bytes of the FP8 weights that Transformer Engine keeps beside a teacher's own.

    They stay on the GPU where the weights rest on the host.
    """
    return _layer_numbers(run, choice, stage) if run.teacher_fp8 else 0


def _runs_in_step(run: PlannedRun, choice: Choice, device: DeviceProfile) -> bool:
    """Return whether a teacher on shared ranks runs when one of its answers is taken.

    Else it runs for a whole step before the student.
    """
    is_taken = choice.place == "shared" and choice.layout.pipeline == 1
    return is_taken and not run.keeps_signals and not _rests(run, choice, device)


def _rests(run: PlannedRun, choice: Choice, device: DeviceProfile) -> bool:
    """Return whether a teacher's weights are copied from the host for its forward pass.

    On a CPU nothing moves, shards move layer by layer, and those in another layout stay.
    """
    return run.rests and device.kind == "gpu" and choice.is_same_layout and not run.shards_teacher


def _head_weights(run: PlannedRun, choice: Choice, stage: int) -> float:
    """Return the bytes of the teacher's head on a rank of its last stage."""
    assert run.teacher is not None
    layout = choice.teacher_layout
    assert layout is not None
    if stage < layout.pipeline - 1:
        return 0.0
    rows = run.teacher.padded_vocab_size(layout.tensor) // layout.tensor
    return float(rows * run.teacher.hidden_size * run.width)


def _layer_numbers(run: PlannedRun, choice: Choice, stage: int) -> int:
    """Return the numbers of the layers alone of a teacher's stage."""
    assert run.teacher is not None
    layout = choice.teacher_layout
    assert layout is not None
    numbers = stage_numbers(run.teacher, layout, choice.teacher_layers)
    index = min(stage, layout.pipeline - 1)
    layers = choice.teacher_layers[index]
    return min(numbers[index].total, layers * numbers[index].largest_layer)


def _moved_head(run: PlannedRun, choice: Choice, stage: int) -> float:
    """Return the bytes of a teacher's head that is on the student's last stage beside its weights.

    There a teacher elsewhere has a copy, and one whose rows the tensor ranks divide otherwise.
    """
    if stage < choice.layout.pipeline - 1 or not choice.keeps_head(run):
        return 0.0
    assert run.teacher is not None
    split, layout = choice.layout.tensor, choice.teacher_layout
    owner = run.teacher if run.is_aligned else run.student
    rows = owner.padded_vocab_size(split)
    if choice.place == "shared":
        assert layout is not None
        is_there = choice.is_same_layout or layout.pipeline == 1
        if is_there and (layout.tensor, run.teacher.padded_vocab_size(split)) == (split, rows):
            return 0.0
    return float(rows // split * run.teacher.hidden_size * run.width)


def answering_bytes(run: PlannedRun, choice: Choice, device: DeviceProfile) -> tuple[float, float]:
    """Return the bytes of a teacher's layers in a forward pass, and what ids need beyond.

    Its last stage chooses the ids that it sends from the logits of a chunk, behind its layers.
    """
    forward = _teacher_forward(run, choice, device)
    if not choice.sends_ids(run):
        return forward, 0.0
    assert run.teacher is not None
    assert run.sent_ids is not None
    layout = choice.teacher_layout
    assert layout is not None
    length = run.teacher_length or run.sequence_length
    tokens = choice.micro_batch_size * length // layout.context
    columns = run.teacher.padded_vocab_size(layout.tensor) // layout.tensor
    rows = min(tokens, chunk_rows(run, device, columns))
    chosen = id_bytes(RowBlocks(rows, columns, run.width, device), run.sent_ids, has_tail=False)
    chunk = rows * columns * run.width + chosen.choice
    return forward, max(0.0, chunk - forward)


def _teacher_forward(run: PlannedRun, choice: Choice, device: DeviceProfile) -> float:
    """Return the bytes that a micro-batch of the teacher holds in its layers."""
    key = ("teacher's forward pass", choice.teacher_layout, choice.micro_batch_size)
    return known_of((run, device), key, partial(_forward_of_teacher, run, choice, device))


def _forward_of_teacher(run: PlannedRun, choice: Choice, device: DeviceProfile) -> float:
    assert run.teacher is not None
    layout = choice.teacher_layout
    assert layout is not None
    length = run.teacher_length or run.sequence_length
    tokens = choice.micro_batch_size * length / layout.context
    is_fused = device.kind == "gpu"
    return tokens * forward_bytes(run.teacher, layout, run.width, is_fused=is_fused)
