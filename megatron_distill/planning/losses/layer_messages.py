"""Bytes that losses between layers move: the teacher's layers, and what their own ranks exchange.

One micro-batch, one rank of a stage of the student.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from megatron_distill.models.pipeline_stages import ranks_of_layers
from megatron_distill.planning.losses.gathered_layers import gathered_layers
from megatron_distill.planning.losses.layer_work import Blocks, Heads, map_blocks

if TYPE_CHECKING:
    from megatron_distill.models.architecture import Architecture
    from megatron_distill.planning.run import Choice, PlannedRun

__all__ = [
    "blocks_of_maps",
    "heads_of_maps",
    "layer_bytes",
    "moved_layers",
    "needs_answer",
    "projector_bytes",
    "projector_groups",
    "projector_numbers",
    "received_bytes",
]

_PASSES: Final = 2  # of a micro-batch, forward and backward
_FP32: Final = 4
_TWO_MAPS: Final = 8  # bytes of an element of both models' maps


def layer_bytes(run: PlannedRun, choice: Choice, stage: int) -> float:
    """Return the bytes of the teacher's layers that a rank of a stage has for its losses.

    Source: `train.assemble.answers.plan`.
    """
    wanted = {what for what, _, destination in _routes(run, choice) if destination == stage}
    return sum(_bytes_of(run, choice, is_map=is_map) for _, is_map in wanted)


def moved_layers(run: PlannedRun, choice: Choice) -> tuple[float, ...]:
    """Return the bytes that each stage receives from other stages of a teacher in its layout.

    Of two stages, one sends what the other receives.
    """
    found = [0.0] * choice.layout.pipeline
    for (_, is_map), source, destination in _routes(run, choice):
        if source != destination:
            found[destination] += _bytes_of(run, choice, is_map=is_map)
    return tuple(found)


def received_bytes(run: PlannedRun, choice: Choice, stage: int) -> tuple[float, float]:
    """Return the bytes that the losses of a rank receive from tensor and from context ranks.

    Layers are gathered between two tokenizers, and shares of maps are summed.
    """
    tensor, context = gathered_layers(run, choice, stage).received(
        measures=run.measures is not None
    )
    ranks = ranks_of_layers(choice.layers, choice.layout.pipeline)
    maps = sum(
        pair.is_of_attention and ranks[pair.student - 1] == stage
        for pair in choice.compared_layers(run)
    )
    split = choice.layout.tensor
    if maps and split > 1:
        summed = _TWO_MAPS * choice.micro_batch_size * blocks_of_maps(run, choice).scores
        passes = _PASSES + (run.measures is not None)
        tensor += maps * passes * 2 * summed * (split - 1) / split
    return tensor, context


def projector_numbers(run: PlannedRun, choice: Choice) -> int:
    """Return the parameters of all projectors, which every rank of the student has whole."""
    one = sum(fan_in * fan_out + fan_out for fan_in, fan_out in pairwise(run.projector))
    compared = choice.compared_layers(run)
    pairs = {(pair.student, pair.teacher) for pair in compared if not pair.is_of_attention}
    return one * (min(1, len(pairs)) if run.shares_projector else len(pairs))


def projector_groups(choice: Choice) -> tuple[tuple[int, int], ...]:
    """Return the groups that sum the projectors' gradients: ranks, and those that they span."""
    layout, replicas = choice.layout, choice.data * choice.layout.context
    within = layout.tensor * replicas
    return (layout.tensor, layout.tensor), (replicas, within), (layout.pipeline, choice.ranks)


def projector_bytes(run: PlannedRun, choice: Choice) -> float:
    """Return the bytes that a rank receives in a step for the projectors' gradients."""
    shares = (2 * (size - 1) / size for size, _ in projector_groups(choice))
    return sum(shares) * _FP32 * projector_numbers(run, choice)


def needs_answer(run: PlannedRun, choice: Choice, stage: int) -> bool:
    """Return whether a stage of the model takes an answer of the teacher: it has a loss.

    stage: virtual ones counted. The last one has the losses between logits.
    """
    first = sum(choice.layers[:stage])
    layers = range(first + 1, first + choice.layers[stage] + 1)
    is_last = stage == choice.layout.stages - 1
    return is_last or any(pair.student in layers for pair in choice.compared_layers(run))


def heads_of_maps(run: PlannedRun, choice: Choice) -> tuple[Heads, Heads]:
    """Return the heads of student and teacher on a rank of the student."""
    assert run.teacher is not None
    split = choice.layout.tensor
    own = choice.teacher_layout or choice.layout
    parts = max(1, own.tensor // split)  # of the teacher's tensor ranks
    return _heads(run.student, split), _heads(run.teacher, own.tensor, parts)


def _heads(shape: Architecture, split: int, parts: int = 1) -> Heads:
    return Heads(
        parts * (shape.num_attention_heads // split),
        parts * max(1, shape.num_kv_heads // split),
        shape.head_size,
        shape.attention_softcap is not None,
    )


def blocks_of_maps(run: PlannedRun, choice: Choice) -> Blocks:
    """Return the blocks of a loss between maps on a context rank."""
    most = max(heads.queries for heads in heads_of_maps(run, choice))
    return map_blocks(most, choice.micro_batch_size, run.sequence_length, choice.layout.context)


def _routes(run: PlannedRun, choice: Choice) -> Iterator[tuple[tuple[int, bool], int, int]]:
    """Yield the teacher's layers, whether of maps, each with its stage and one that needs it."""
    pairs = choice.compared_layers(run)
    if not pairs or choice.teacher_layout is None:
        return
    of_student = ranks_of_layers(choice.layers, choice.layout.pipeline)
    of_teacher = ranks_of_layers(choice.teacher_layers, choice.teacher_layout.pipeline)
    yield from dict.fromkeys(
        (
            (pair.teacher, pair.is_of_attention),
            of_teacher[pair.teacher - 1],
            of_student[pair.student - 1],
        )
        for pair in pairs
    )


def _bytes_of(run: PlannedRun, choice: Choice, *, is_map: bool) -> float:
    """Return the bytes of one layer of the teacher: its output, or its queries and keys."""
    assert run.teacher is not None
    layout, tokens = choice.layout, choice.teacher_tokens(run)
    if not is_map:
        split = layout.tensor if layout.sequence else 1
        return run.width * tokens * run.teacher.hidden_size / split
    _, heads = heads_of_maps(run, choice)
    keys = layout.context * heads.groups  # of whole sequences
    return float(run.width * tokens * heads.size * (heads.queries + keys))
