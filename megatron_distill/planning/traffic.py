"""Bytes that a rank receives from other ranks in a step, by kind of message.

In a gather or a scatter of n bytes over r ranks each rank receives n (r - 1) / r. In an all-reduce
it receives twice that. Of several stages it is the rank that receives most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from megatron_distill.planning.answers import answer_bytes
from megatron_distill.planning.losses.layer_messages import (
    layer_bytes,
    moved_layers,
    projector_bytes,
    received_bytes,
)
from megatron_distill.planning.operations import Recomputed, layer_kinds
from megatron_distill.planning.parameters import RankNumbers, stage_numbers
from megatron_distill.planning.run import Choice, Parts, PlannedRun, teachers_apart

if TYPE_CHECKING:
    from megatron_distill.models.architecture import Architecture
    from megatron_distill.runtime.layout import Layout

__all__ = ["StepBytes", "stage_bytes", "step_bytes"]

_FP32: Final = 4
# Statistics of a token's logits that each tensor rank sends to the others.
_STATISTICS: Final = 80


@dataclass(frozen=True)
class StepBytes(Parts):
    """Bytes that one rank receives in a step.

    teacher: of its passes on shared ranks, and of its layers from other stages for losses between
    layers. answers: of a teacher in another layout, or on its own ranks, these layers included.
    """

    teacher: float = 0.0
    answers: float = 0.0
    tensor: float = 0.0
    pipeline: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    data_parallel: float = 0.0


def step_bytes(run: PlannedRun, choice: Choice) -> StepBytes:
    """Return the bytes of the student's rank that receives most."""
    numbers = stage_numbers(run.student, choice.layout, choice.layers)
    found = [
        stage_bytes(run, choice, numbers[stage], stage) for stage in range(choice.layout.pipeline)
    ]
    return max(found, key=lambda one: one.total)


def stage_bytes(run: PlannedRun, choice: Choice, numbers: RankNumbers, stage: int) -> StepBytes:
    """Return the bytes of a rank of one stage, which has so many parameters."""
    layout, shape, count = choice.layout, run.student, choice.micro_batches(run)
    tokens = choice.micro_batch_size * run.sequence_length / layout.context
    once = _MessageBytes.of(shape, layout, tokens, run.width)
    tensor = context = expert = 0.0
    for chunk in choice.chunk_layers(stage):
        for place, layer in enumerate(chunk):
            passes = _passes(choice, place)
            tensor += once.tensor * (passes.tensor + 2 * layout.sequence)
            context += once.context * passes.context
            expert += once.expert * passes.expert * layer_kinds(shape)[layer][0]
    if stage == 0:
        tensor += 2 * once.tensor  # of the embedding: a sum, or a scatter and its gradient's gather
    if stage == layout.pipeline - 1 and layout.tensor > 1:
        # The gathered hidden state and its scattered gradient, and the statistics of the logits.
        edge = once.tensor * (2 if layout.sequence else 1)
        tensor += edge + _STATISTICS * tokens * (layout.tensor - 1)
    of_tensor, of_context = received_bytes(run, choice, stage)
    tensor, context = tensor + of_tensor, context + of_context
    return StepBytes(
        teacher=_of_teachers(run, choice, stage),
        answers=_answers(run, choice, stage),
        tensor=count * tensor,
        pipeline=count * _messages(choice, stage) * _state(shape, layout, tokens, run.width),
        context=count * context,
        expert=count * expert,
        data_parallel=_updates(run, choice, numbers) + projector_bytes(run, choice),
    )


@dataclass(frozen=True)
class _MessageBytes:
    """Bytes of one message of each kind in a layer, for one micro-batch."""

    tensor: float
    context: float
    expert: float

    @classmethod
    def of(cls, shape: Architecture, layout: Layout, tokens: float, width: int) -> _MessageBytes:
        split, experts = layout.tensor, layout.expert
        keys = shape.num_kv_heads * shape.head_size / split
        expert = 0.0
        if shape.moe is not None and experts > 1:
            rows = tokens / split * shape.moe.top_k
            expert = 2 * rows * shape.hidden_size * width * (experts - 1) / experts
        return cls(
            tokens * shape.hidden_size * width * (split - 1) / split,
            2 * keys * width * tokens * (layout.context - 1),
            expert,
        )


@dataclass(frozen=True)
class _MessageCounts:
    """Messages of each kind in the passes of one layer: forward, backward, and computed again."""

    tensor: int
    context: int
    expert: int


def _passes(choice: Choice, place: int) -> _MessageCounts:
    """Return the messages of a layer; `place`: in its chunk."""
    limit = choice.recomputed_layers
    kind: Recomputed = choice.recompute
    if kind == "full" and (limit is None or place < limit):
        return _MessageCounts(4 + 4 + 4, 1 + 2 + 1, 3)
    if kind == "selective" and "mlp" in choice.modules:
        return _MessageCounts(4 + 4 + 2, 1 + 2, 3)
    return _MessageCounts(4 + 4, 1 + 2, 2)


def _state(shape: Architecture, layout: Layout, tokens: float, width: int) -> float:
    """Return the bytes of a micro-batch's hidden states, as one rank has them between stages."""
    return tokens * shape.hidden_size * width / (layout.tensor if layout.sequence else 1)


def _messages(choice: Choice, stage: int) -> int:
    """Return the hidden states and gradients that a rank receives per micro-batch."""
    stages, last = choice.layout.pipeline, choice.layout.stages - 1
    if stages == 1:
        return 0
    own = range(stage, choice.layout.stages, stages)
    return sum((place > 0) + (place < last) for place in own)


def _of_teachers(run: PlannedRun, choice: Choice, stage: int) -> float:
    """Return the bytes of the teachers' forward passes on a student's rank."""
    if choice.place != "shared":
        return 0.0
    total = 0.0
    for one, its, share in teachers_apart(run, choice):
        teacher, layout = one.teacher, its.teacher_layout
        assert teacher is not None
        assert layout is not None
        rank = stage if its.is_same_layout else 0
        length = one.teacher_length or one.sequence_length
        tokens = its.micro_batch_size * length / layout.context
        layer = _MessageBytes.of(teacher, layout, tokens, one.width)
        layers = its.teacher_stage(rank)
        experts = sum(layer_kinds(teacher)[number][0] for number in layers)
        per_pass = len(layers) * (4 * layer.tensor + layer.context) + experts * layer.expert
        if not rank:
            per_pass += layer.tensor * (1 if layout.sequence else 2)  # of the embedding
        if layout.pipeline > 1 and (rank or not its.is_same_layout):
            per_pass += _state(teacher, layout, tokens, one.width)
        if one.shards_teacher:
            ranks = its.ranks // (layout.tensor * layout.pipeline)
            held = stage_numbers(teacher, layout, its.teacher_layers)[rank].total * one.width
            per_pass += held * (ranks - 1) / ranks
        if its.is_same_layout:
            per_pass += moved_layers(one, its)[stage]
        total += share * its.teacher_micro_batches(one) * per_pass
    return total


def _answers(run: PlannedRun, choice: Choice, stage: int) -> float:
    """Return the bytes of answers that a rank of one of the student's stages receives."""
    if not choice.sends_answers(run):
        return 0.0
    per_unit = layer_bytes(run, choice, stage)
    if stage == choice.layout.pipeline - 1:
        per_unit += answer_bytes(run, choice)
    return choice.micro_batches(run) * per_unit


def _updates(run: PlannedRun, choice: Choice, numbers: RankNumbers) -> float:
    """Return the bytes of gradients and weights."""
    layout = choice.layout
    total = 0.0
    for count, ranks in (
        (numbers.dense, choice.ranks // (layout.tensor * layout.pipeline)),
        (numbers.experts, choice.ranks // (layout.expert * layout.pipeline)),
    ):
        # One is reduced and the other gathered; without shards of the state one sum is both.
        width = _FP32 + (run.width if run.is_distributed else _FP32)
        total += width * count * (ranks - 1) / ranks
    return total
