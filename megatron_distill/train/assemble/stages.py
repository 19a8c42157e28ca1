"""The layers of each pipeline stage of student and teacher, from their configuration or by work."""

from __future__ import annotations

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.pipeline_stages import balanced_layers, even_layers
from megatron_distill.runtime.groups import Layout
from megatron_distill.train.throughput import forward_flops_per_token, head_flops_per_token

__all__ = ["heads_in_layers", "student_layers", "teacher_layers"]


def student_layers(
    given: tuple[int, ...] | None, student: Architecture, *, heads: float, layout: Layout
) -> tuple[int, ...]:
    """Return the layers of each stage of the student, in the order of the forward pass.

    The given ones, or those that balance the work of the stages; `heads` is that of the last
    stage's output heads in layers. Chunks of a rank are added up in a layout without virtual
    stages, as an evaluation has.
    """
    if given is None:
        return balanced_layers(student.num_layers, layout.stages, heads=heads)
    if len(given) == layout.stages:
        return given
    return tuple(sum(given[rank :: layout.pipeline]) for rank in range(layout.pipeline))


def teacher_layers(
    given: tuple[int, ...] | None, teacher: Architecture, *, layout: Layout
) -> tuple[int, ...]:
    """Return the layers of each stage of a live teacher: the given ones, or even ones."""
    return even_layers(teacher.num_layers, layout.pipeline) if given is None else given


def heads_in_layers(
    student: Architecture,
    teacher: Architecture | None,
    *,
    sequence_length: int,
    is_recomputed: bool = False,
) -> float:
    """Return the work of both output heads of a step over that of one layer of the student.

    A live teacher's head runs in the student's loss, without a backward pass. Forward and backward
    take three times the products of a forward pass, and a recomputed layer a fourth time.
    """
    head = head_flops_per_token(student)
    layers = forward_flops_per_token(student, sequence_length=sequence_length) - head
    frozen = 0.0 if teacher is None else head_flops_per_token(teacher)
    passes = 4 if is_recomputed else 3
    return (3 * head + frozen) / (passes * layers / student.num_layers)
