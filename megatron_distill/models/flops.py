"""The work of a model, of a step and of a pipeline stage, in FLOPs per token.

One multiply-add counts as two operations. Only matrix products count, and only those that the
model needs: recomputation and padding do not (PaLM, arXiv 2204.02311, appendix B). Attention is
causal: a token attends to (S + 1) / 2 positions on average, and to fewer under a sliding window.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_distill.log import get_logger
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.pipeline_stages import balanced_layers
from megatron_distill.runtime.layout import Layout

__all__ = [
    "StepFlops",
    "balanced_stages",
    "forward_flops_per_token",
    "head_flops_per_token",
    "heads_in_layers",
    "stage_layers",
    "step_flops_per_token",
]

_LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class StepFlops:
    """Model FLOPs per position of the student; `teacher_forward` is 0 without a teacher."""

    student_forward: float
    student_backward: float
    teacher_forward: float

    @property
    def total(self) -> float:
        """FLOPs per token of a whole step."""
        return self.student_forward + self.student_backward + self.teacher_forward

    @property
    def teacher_share(self) -> float:
        """The teacher's part of `total`, between 0 and 1."""
        return self.teacher_forward / self.total


def forward_flops_per_token(
    model: Architecture, *, sequence_length: int, attended_positions: float | None = None
) -> float:
    """Return the FLOPs of one token's forward pass, output head included.

    `attended_positions` is the mean number of positions that a token attends to in each layer. None
    means the causal mean of a whole sequence: (sequence_length + 1) / 2 in layers without a window.
    """
    if attended_positions is None:
        attended_positions = _attended_positions(model, sequence_length)
    hidden, moe = model.hidden_size, model.moe
    query_width = model.num_attention_heads * model.head_size
    kv_width = model.num_kv_heads * model.head_size
    projections = 2 * hidden * (query_width + 2 * kv_width) + 2 * query_width * hidden
    attention = 2 * 2 * query_width * attended_positions
    of_width = 2 * (3 if model.is_gated else 2) * hidden
    feed_forward = model.num_layers * of_width * model.ffn_hidden_size
    if moe is not None:
        width = moe.top_k * moe.ffn_hidden_size + (moe.shared_ffn_hidden_size or 0)
        routing = 2 * hidden * (moe.num_experts + moe.shared_gate)
        feed_forward = len(moe.dense_layers) * of_width * model.ffn_hidden_size
        feed_forward += len(model.expert_layers) * (of_width * width + routing)
    layers = model.num_layers * (projections + attention) + feed_forward
    return layers + head_flops_per_token(model)


def head_flops_per_token(model: Architecture) -> float:
    """Return the FLOPs of the output head in one token's forward pass."""
    return 2.0 * model.hidden_size * model.vocab_size


def _attended_positions(model: Architecture, length: int) -> float:
    """Return the mean number of attended positions over layers and the tokens of a sequence."""
    whole = (length + 1) / 2
    window = length if model.sliding_window is None else min(model.sliding_window, length)
    # The first `window` tokens attend to all up to themselves, later tokens to `window`.
    windowed = window * (2 * length - window + 1) / (2 * length)
    sliding = model.num_sliding_layers / model.num_layers
    return (1 - sliding) * whole + sliding * windowed


def stage_layers(
    layout: Layout,
    student: Architecture,
    teacher: Architecture | None,
    *,
    given: tuple[int, ...] | None,
    sequence_length: int,
    teacher_length: int | None = None,
    is_recomputed: bool,
) -> tuple[int, ...]:
    """Return the layers of each stage of the student, in the order of the forward pass.

    The given ones, or those of `balanced_stages`. Chunks of a rank are added up in a layout
    without virtual stages, as an evaluation has.
    """
    layers = given or balanced_stages(
        student,
        teacher,
        sequence_length=sequence_length,
        teacher_length=teacher_length,
        stages=layout.stages,
        is_recomputed=is_recomputed,
    )
    if len(layers) != layout.stages:
        layers = tuple(sum(layers[rank :: layout.pipeline]) for rank in range(layout.pipeline))
    if len(set(layers)) > 1:
        _LOGGER.info("student: %s layers per pipeline stage", ", ".join(map(str, layers)))
    return layers


def balanced_stages(
    student: Architecture,
    teacher: Architecture | None,
    *,
    sequence_length: int,
    teacher_length: int | None = None,
    stages: int,
    is_recomputed: bool,
) -> tuple[int, ...]:
    """Return the layers of each stage of the student that balance the work of the stages.

    The last stage has the student's output head and that of a live teacher, which runs in the
    student's loss without a backward pass. `is_recomputed`: all layers are. `teacher_length`: see
    `step_flops_per_token`.
    """
    heads = heads_in_layers(
        student,
        teacher,
        sequence_length=sequence_length,
        teacher_length=teacher_length,
        is_recomputed=is_recomputed,
    )
    return balanced_layers(student.num_layers, stages, heads=heads)


def heads_in_layers(
    student: Architecture,
    teacher: Architecture | None,
    *,
    sequence_length: int,
    teacher_length: int | None = None,
    is_recomputed: bool = False,
) -> float:
    """Return the work of both output heads of a step over that of one layer of the student.

    Forward and backward take three times the products of a forward pass, and a recomputed layer a
    fourth time. `teacher_length`: see `step_flops_per_token`.
    """
    head = head_flops_per_token(student)
    layers = forward_flops_per_token(student, sequence_length=sequence_length) - head
    share = (teacher_length or sequence_length) / sequence_length
    frozen = 0.0 if teacher is None else head_flops_per_token(teacher) * share
    passes = 4 if is_recomputed else 3
    return (3 * head + frozen) / (passes * layers / student.num_layers)


def step_flops_per_token(
    student: Architecture,
    teacher: Architecture | None,
    *,
    sequence_length: int,
    teacher_length: int | None = None,
) -> StepFlops:
    """Return the FLOPs of a distillation step per position of the student.

    The backward pass costs twice the forward pass: one product for the input, one for the weight.
    A teacher with a tokenizer of its own has `teacher_length` positions for the student's
    `sequence_length`.
    """
    forward = forward_flops_per_token(student, sequence_length=sequence_length)
    teacher_forward = 0.0
    if teacher is not None:
        length = teacher_length or sequence_length
        of_token = forward_flops_per_token(teacher, sequence_length=length)
        teacher_forward = of_token * length / sequence_length
    return StepFlops(forward, 2 * forward, teacher_forward)
