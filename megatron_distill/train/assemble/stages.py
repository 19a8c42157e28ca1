"""From a configuration to the layers of each pipeline stage of student and teacher."""

from __future__ import annotations

from megatron_distill.config import JobConfig, RunConfig
from megatron_distill.log import get_logger
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.pipeline_stages import balanced_layers, even_layers
from megatron_distill.runtime.groups import Layout
from megatron_distill.train.throughput import forward_flops_per_token, head_flops_per_token

__all__ = ["student_layers", "teacher_layers"]

_LOGGER = get_logger(__name__)


def student_layers(
    config: RunConfig, student: Architecture, teacher: Architecture | None, *, layout: Layout
) -> tuple[int, ...]:
    """Return the layers of each stage of the student, in the order of the forward pass.

    The configured ones, or those that balance the work of the stages. A live teacher's output head
    runs on the student's last stage, in its loss. Chunks of a rank are added up in a layout without
    virtual stages, as an evaluation has.
    """
    given = config.parallel.layers_per_stage.student
    if given is None:
        heads = _heads_in_layers(config, student, teacher)
        return balanced_layers(student.num_layers, layout.stages, heads=heads)
    if len(given) == layout.stages:
        return given
    return tuple(sum(given[rank :: layout.pipeline]) for rank in range(layout.pipeline))


def teacher_layers(config: JobConfig, teacher: Architecture, *, layout: Layout) -> tuple[int, ...]:
    """Return the layers of each stage of a live teacher: the configured ones, or even ones."""
    given = config.parallel.layers_per_stage.teacher
    return even_layers(teacher.num_layers, layout.pipeline) if given is None else given


def _heads_in_layers(
    config: RunConfig, student: Architecture, teacher: Architecture | None
) -> float:
    """Return the work of both output heads of a step over that of one layer of the student.

    Forward and backward take three times the products of a forward pass, and a recomputed layer a
    fourth time. The teacher's head has no backward pass.
    """
    length = config.data.sequence_length
    head = head_flops_per_token(student)
    layers = forward_flops_per_token(student, sequence_length=length) - head
    is_recomputed = config.train.recompute == "full" and config.train.recompute_layers is None
    passes = 4 if is_recomputed else 3
    frozen = 0.0 if teacher is None else head_flops_per_token(teacher)
    return (3 * head + frozen) / (passes * layers / student.num_layers)
