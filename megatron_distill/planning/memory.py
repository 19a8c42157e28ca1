"""Bytes of the fullest rank of a run, by part, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import Final

from megatron_distill.planning.activations import activation_bytes, norm_input
from megatron_distill.planning.device import DeviceProfile
from megatron_distill.planning.live_teacher import (
    answering_bytes,
    copies_of_stage,
    teacher_bytes,
    weights_of_stage,
)
from megatron_distill.planning.losses.aligned import aligned_bytes
from megatron_distill.planning.losses.layer_messages import projector_numbers
from megatron_distill.planning.losses.token_losses import RowBlocks, chunk_rows, id_bytes
from megatron_distill.planning.operations import LayerTraits, layer_kinds, slice_of
from megatron_distill.planning.parameters import (
    RankNumbers,
    bucket_ranks,
    dividing,
    fullest_state,
)
from megatron_distill.planning.run import Choice, Parts, PlannedRun
from megatron_distill.planning.stages.known import known_of
from megatron_distill.planning.stages.moments import student_peak

__all__ = [
    "USABLE",
    "MemoryNeed",
    "chunk_bytes",
    "memory_need",
    "student_states",
    "teacher_rank_need",
]

# Share of a device's memory that a plan may use.
USABLE: Final = 0.92

_FP32: Final = 4
# Bytes that Transformer Engine keeps of each weight of a student's layer in FP8: a copy for the
# forward pass, and its transpose, which GPUs before Blackwell need for the backward pass.
_FP8_COPIES: Final = 2
# Of the allocator, for pieces between blocks: share of what comes and goes in a step.
_SLACK: Final = 0.05
# Of Transformer Engine for each model, of a micro-batch's positions and hidden size.
_BUFFERS_OF_SET: Final = 12
# Share by which sums in another order differ, and much more.
_ROUNDED: Final = 1e-6
# A bf16 product that a CPU adds to an fp32 sum.
_WIDE_PRODUCT: Final = 2**21


@dataclass(frozen=True)
class MemoryNeed(Parts):
    """Bytes of one rank at its peak, by part.

    teacher: its weights. hidden_states: its answers that wait for the student. loss_chunk: inputs
    of the heads, logits of both models, and the blocks in which they are reduced. buffers: of a
    backward pass, of messages between stages, of the update, or of the teacher's forward pass
    beyond the student's activations. reserved: by the driver and libraries.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    teacher: float = 0.0
    hidden_states: float = 0.0
    loss_chunk: float = 0.0
    buffers: float = 0.0
    reserved: float = 0.0

    @property
    def lasting(self) -> float:
        """Bytes that live from step to step."""
        return self.weights + self.gradients + self.optimizer + self.teacher

    @property
    def transient(self) -> float:
        """Bytes that come and go within a step."""
        return self.activations + self.hidden_states + self.loss_chunk + self.buffers


def student_states(run: PlannedRun, choice: Choice, numbers: RankNumbers) -> tuple[int, int, int]:
    """Return bytes of weights, fp32 gradients, and the optimizer's state on one rank.

    Adam has two fp32 moments, with bf16 an fp32 weight, and a count of each tensor's steps. The
    distributed optimizer shards them.
    Its buffers have gaps without moments. Not counted are the ends of further buckets, of a chunk
    with more numbers than one bucket.
    """
    layout, width = choice.layout, run.width
    state = fullest_state(
        numbers,
        layout,
        ranks=choice.ranks,
        state=_FP32 * (2 if width == _FP32 else 3),
        is_distributed=run.is_distributed,
    )
    if not run.is_distributed:
        return numbers.total * width, numbers.total * _FP32, state
    held = sum(
        bucket.held(count) for bucket, count in bucket_ranks(numbers, layout, ranks=choice.ranks)
    )
    return held * width, held * _FP32, state


def memory_need(
    run: PlannedRun,
    choice: Choice,
    device: DeviceProfile,
    numbers: Sequence[RankNumbers],
    *,
    enough: float = inf,
) -> MemoryNeed:
    """Return the need of the student's fullest rank, or of a teacher's own rank if that is more.

    numbers: the student's parameters of each pipeline rank. enough: bytes; that of the first rank
    which needs more is returned, whatever others need.
    """
    same = choice.teacher_layers if choice.is_same_layout else ()
    lasting = known_of(
        (run, device),
        ("lasting", dividing(choice.layout), choice.layers, same),
        partial(_lasting, run, choice, device, numbers),
    )
    if lasting.total > enough:
        return lasting
    alike = known_of(
        (run,),
        ("alike", choice.layers, choice.layout.pipeline, same),
        partial(_alike_stages, run, choice),
    )
    needs: dict[int, MemoryNeed] = {}
    for stage in alike:
        needs[stage] = stage_need(run, choice, device, numbers[stage], stage)
        if needs[stage].total > enough:
            return needs[stage]
    if choice.place == "own ranks":
        needs[choice.layout.pipeline] = teacher_rank_need(run, choice, device)
    most = (1 - _ROUNDED) * max(need.total for need in needs.values())
    for first, others in alike.items():
        # Those have at most as much in flight.
        if others and needs[first].total >= most:
            for stage in others:
                needs[stage] = stage_need(run, choice, device, numbers[stage], stage)
    return max((needs[stage] for stage in sorted(needs)), key=lambda need: need.total)


def _lasting(
    run: PlannedRun, choice: Choice, device: DeviceProfile, numbers: Sequence[RankNumbers]
) -> MemoryNeed:
    """Return what the first stage needs at least, whatever its micro-batch and recomputation."""
    teacher = 0.0
    if choice.is_same_layout and not (run.several or run.shards_teacher or run.rests):
        teacher = weights_of_stage(run, choice, 0)
    return MemoryNeed(
        weights=numbers[0].total * run.width,
        gradients=numbers[0].total * _FP32,
        teacher=teacher,
        reserved=device.reserved_gib * 2**30,
    )


def _alike_stages(run: PlannedRun, choice: Choice) -> dict[int, list[int]]:
    """Return stages with those behind them that have the same layers, and neither end nor loss."""
    pipeline = choice.layout.pipeline
    if choice.compared_layers(run) or run.several:
        return {stage: [] for stage in range(pipeline)}
    own = layer_kinds(run.student)
    theirs: tuple[LayerTraits, ...] = ()
    if choice.is_same_layout and run.teacher is not None:
        theirs = layer_kinds(run.teacher)
    firsts: dict[object, int] = {}
    found: dict[int, list[int]] = {}
    for stage in range(pipeline):
        key: list[object] = [own[slice_of(chunk)] for chunk in choice.chunk_layers(stage)]
        key += [theirs[slice_of(choice.teacher_stage(stage))]] if theirs else []
        key += [stage if stage in (0, pipeline - 1) else -1]
        first = firsts.setdefault(tuple(key), stage)
        if first == stage:
            found[stage] = []
        else:
            found[first].append(stage)
    return found


def stage_need(
    run: PlannedRun, choice: Choice, device: DeviceProfile, numbers: RankNumbers, stage: int
) -> MemoryNeed:
    """Return the need of one rank of the student's pipeline."""
    weights, gradients, optimizer = known_of(
        (run,),
        ("states", dividing(choice.layout), choice.ranks, choice.layers, stage),
        partial(student_states, run, choice, numbers),
    )
    projectors = _FP32 * projector_numbers(run, choice)  # and as many gradients, and two moments
    if run.student_fp8:
        layers = sum(map(len, choice.chunk_layers(stage)))
        weights += _FP8_COPIES * min(numbers.total, layers * numbers.largest_layer)
    held = activation_bytes(run, choice, stage, is_fused=device.kind == "gpu")
    is_last = stage == choice.layout.pipeline - 1
    chunk = 0.0
    if is_last:
        key = ("ends", *choice.sizes_of_ends, choice.micro_batch_size)
        chunk = known_of((run, device), key, partial(_end_bytes, run, choice, device))
    teacher = teacher_bytes(run, choice, device, stage)
    student = student_peak(run, choice, device, numbers, stage, held=held, chunk=chunk)
    # A teacher's forward pass comes before the student's.
    peak = max(student + teacher.received, teacher.forward)
    buffers = peak - held.in_flight - chunk + _user_buffers(run, choice)
    transient = peak + teacher.waiting
    return MemoryNeed(
        weights=weights + projectors,
        gradients=gradients + projectors,
        optimizer=optimizer + 2 * projectors,
        activations=held.in_flight,
        teacher=teacher.weights,
        hidden_states=teacher.waiting,
        loss_chunk=chunk,
        buffers=buffers + (_SLACK * transient if device.kind == "gpu" else 0.0),
        reserved=device.reserved_gib * 2**30,
    )


def _user_buffers(run: PlannedRun, choice: Choice) -> float:
    """Return the bytes of Transformer Engine's buffers on a rank with the student.

    Models of one shape share a set. Source: docstring of `models.user_buffers`.
    """
    if not run.overlaps_tensor:
        return 0.0
    layout, theirs = choice.layout, choice.teacher_layout
    sets: set[tuple[int, int, bool]] = set()
    if layout.tensor > 1:
        length = run.sequence_length // layout.context
        sets.add((length, run.student.hidden_size, run.student_fp8))
    if choice.place == "shared" and theirs is not None and theirs.tensor > 1:
        length = (run.teacher_length or run.sequence_length) // theirs.context
        alone = [] if run.teacher is None else [run.teacher]
        shapes = [one.shape for one in run.several] or alone
        sets |= {(length, shape.hidden_size, run.teacher_fp8) for shape in shapes}
    numbers = sum(length * hidden for length, hidden, _ in sets)
    return float(_BUFFERS_OF_SET * choice.micro_batch_size * numbers * run.width)


def _end_bytes(run: PlannedRun, choice: Choice, device: DeviceProfile) -> float:
    return chunk_bytes(run, choice, device) + _head_inputs(run, choice, device)


def _heads_of_teachers(run: PlannedRun, choice: Choice) -> int:
    """Return the number of teachers whose heads run at once on the student's last stage."""
    return run.mixed if choice.keeps_head(run) else 0


def _head_inputs(run: PlannedRun, choice: Choice, device: DeviceProfile) -> float:
    """Return the bytes of the final norm and of the states that the heads read.

    Saved are the norm's input and its output. The products read a row for each token: copies, but
    of one sequence, whose rows lie so. With tensor ranks and without `sequence` the gradient of
    these rows is summed in a copy, too, and with `sequence` the rows are gathered.
    """
    layout, hidden, width = choice.layout, run.student.hidden_size, run.width
    tokens = choice.micro_batch_size * run.sequence_length / layout.context
    norm = norm_input(run.student, width, is_fused=device.kind == "gpu") + hidden * width
    copies = hidden if layout.tensor > 1 and not layout.sequence else 0
    if choice.micro_batch_size > 1 or layout.sequence:
        copies += hidden
        if run.teacher is not None:
            copies += run.teacher.hidden_size * _heads_of_teachers(run, choice)
    return tokens * (norm / (layout.tensor if layout.sequence else 1) + copies * width)


def chunk_bytes(run: PlannedRun, choice: Choice, device: DeviceProfile) -> float:
    """Return the logits of a chunk of each model that has a head here, and their row blocks.

    Source: docstring of `ops.fused_linear.fused_linear`.
    """
    split = choice.layout.tensor
    tokens = choice.micro_batch_size * run.sequence_length // choice.layout.context
    gradient = tokens * run.student.hidden_size * run.width
    if run.is_aligned:
        theirs = choice.teacher_tokens(run) if choice.keeps_head(run) else 0
        logits = aligned_bytes(run, device, tokens=tokens, teacher_tokens=theirs, split=split)
        return logits + gradient
    columns = run.student.padded_vocab_size(split) // split
    chosen = chunk_rows(run, device, columns)
    rows = ceil(tokens / ceil(tokens / chosen))  # chunks of equal size
    heads = 1 + _heads_of_teachers(run, choice)
    others = _token_loss_bytes(run, choice, device, rows=rows, columns=columns)
    product = 0.0
    if device.kind == "cpu" and run.width < _FP32:
        product = min(_WIDE_PRODUCT, columns * run.student.hidden_size) * run.width
    return heads * rows * columns * run.width + others + gradient + product


def _token_loss_bytes(
    run: PlannedRun, choice: Choice, device: DeviceProfile, *, rows: int, columns: int
) -> float:
    """Return the bytes of the losses of a chunk besides its logits: row blocks, and ids."""
    terms, models = choice.terms(run), 1 + _heads_of_teachers(run, choice)
    blocks = RowBlocks(rows, columns, run.width, device)
    whole = [term.divergence for term in terms if term.top_k is None]
    found = 0.0
    if device.kind == "cpu":
        found = blocks.of(whole, models=models)
    elif run.row_blocks:
        # Those of adaptive KL on an H100, as benchmarks/results/gpu.json has them.
        found = blocks.of((), models=models)
    on_ids = [
        id_bytes(
            blocks,
            term.top_k,
            has_tail=term.has_tail,
            split=choice.layout.tensor,
            chooses=choice.keeps_head(run),
        ).peak
        for term in terms
        if term.top_k is not None
    ]
    return found + max(on_ids, default=0.0)


def teacher_rank_need(run: PlannedRun, choice: Choice, device: DeviceProfile) -> MemoryNeed:
    """Return the need of a rank that runs the teacher alone."""
    assert run.teacher is not None
    layout = choice.teacher_layout
    assert layout is not None
    shape = run.teacher
    length = run.teacher_length or run.sequence_length
    tokens = choice.micro_batch_size * length / layout.context
    weights = max(
        weights_of_stage(run, choice, stage) + copies_of_stage(run, choice, stage)
        for stage in range(layout.pipeline)
    )
    alive, chunk = answering_bytes(run, choice, device)
    answers = tokens * shape.hidden_size * run.width * 2
    slack = _SLACK if device.kind == "gpu" else 0.0
    overlaps = run.overlaps_tensor and layout.tensor > 1
    own = overlaps * _BUFFERS_OF_SET * tokens * shape.hidden_size * run.width
    return MemoryNeed(
        teacher=weights,
        activations=alive,
        hidden_states=answers,
        loss_chunk=chunk,
        buffers=slack * (alive + answers + chunk) + own,
        reserved=device.reserved_gib * 2**30,
    )
