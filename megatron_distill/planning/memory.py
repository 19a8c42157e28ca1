"""Bytes of the fullest rank of a run, by part, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import Final

from megatron_distill.planning.activations import activation_bytes, forward_bytes, norm_input
from megatron_distill.planning.answers import answer_bytes
from megatron_distill.planning.device import DeviceProfile
from megatron_distill.planning.losses.aligned import aligned_bytes
from megatron_distill.planning.losses.gathered_layers import gathered_layers
from megatron_distill.planning.losses.layer_messages import layer_bytes, projector_numbers
from megatron_distill.planning.losses.token_losses import RowBlocks, id_bytes
from megatron_distill.planning.operations import LayerTraits, layer_kinds, slice_of
from megatron_distill.planning.parameters import (
    RankNumbers,
    dividing,
    fullest_state,
    stage_numbers,
)
from megatron_distill.planning.run import Choice, Parts, PlannedRun, teachers_apart
from megatron_distill.planning.stages.known import known_of

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
# Share by which sums in another order differ, and much more.
_ROUNDED: Final = 1e-6
# Logits of a chunk (ops/workspace.py).
_CHUNK: Final = {"cpu": 2**25, "gpu": 2**28}
# A bf16 product that a CPU adds to an fp32 sum.
_WIDE_PRODUCT: Final = 2**21


@dataclass(frozen=True)
class MemoryNeed(Parts):
    """Bytes of one rank at its peak, by part.

    teacher: its weights. hidden_states: its answers that wait for the student. loss_chunk: inputs
    of the heads, logits of both models, and the blocks in which they are reduced. buffers: of a
    backward pass, or of the teacher's forward pass beyond the student's activations. reserved: by
    the driver and libraries.
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
    replicas = choice.ranks // (layout.tensor * layout.pipeline)
    experts = choice.ranks // (layout.expert * layout.pipeline)
    held = sum(
        bucket.held(count)
        for both in numbers.buckets
        for bucket, count in zip(both, (replicas, experts), strict=True)
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
        teacher = _known_teacher_weights(run, choice, 0)
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
    teachers = teachers_apart(run, choice) if choice.place == "shared" else []
    # Answers of several teachers wait for the student together.
    waiting = 0.0
    for one, its, share in teachers or [(run, choice, 1.0)]:
        in_step = _runs_in_step(one, its, device)
        # Every micro-batch of a wave may need it, and of a step this share does.
        waiting += _hidden_states(one, its, stage, in_step=in_step) * (1.0 if in_step else share)
    weights_of = [_known_teacher_weights(one, its, stage) for one, its, _ in teachers]
    resting = [
        weight - _head_weights(one, its, stage) if _rests(one, its, device) else 0.0
        for weight, (one, its, _) in zip(weights_of, teachers, strict=True)
    ]
    # The weights of the next teacher arrive while one runs.
    arriving = sum(sorted(resting)[-2:])
    # A teacher's forward pass comes before the student's. Then the loss, the backward pass of the
    # last layer, and that of the embedding follow each other. Before a layer's backward pass comes
    # that of its loss.
    peak = max(
        *(
            _teacher_forward(one, its, device) + _choosing_chunk(one, its, device) + arriving
            for one, its, _ in teachers
        ),
        held.in_flight + chunk,
        held.in_flight + held.live,
        held.in_flight + gathered_layers(run, choice, stage).peak,
        held.in_flight - held.one + _embedding_gradient(run, choice, stage),
    )
    buffers = peak - held.in_flight - chunk
    transient = peak + waiting
    return MemoryNeed(
        weights=weights + projectors,
        gradients=gradients + projectors,
        optimizer=optimizer + 2 * projectors,
        activations=held.in_flight,
        teacher=sum(weights_of)
        - sum(resting)
        + sum(_teacher_copies(one, its, stage) for one, its, _ in teachers),
        hidden_states=waiting,
        loss_chunk=chunk,
        buffers=buffers + (_SLACK * transient if device.kind == "gpu" else 0.0),
        reserved=device.reserved_gib * 2**30,
    )


def _end_bytes(run: PlannedRun, choice: Choice, device: DeviceProfile) -> float:
    return chunk_bytes(run, choice, device) + _head_inputs(run, choice, device)


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


def _embedding_gradient(run: PlannedRun, choice: Choice, stage: int) -> float:
    """Return the bytes of the gradient of the embedding, which exists whole before it is added."""
    if stage:
        return 0.0
    split = choice.layout.tensor
    rows = run.student.padded_vocab_size(split) // split
    return float(rows * run.student.hidden_size * run.width)


def _heads_of_teachers(run: PlannedRun, choice: Choice) -> int:
    """Return the number of teachers whose heads run at once on the student's last stage."""
    return run.mixed if choice.keeps_head(run) else 0


def _head_inputs(run: PlannedRun, choice: Choice, device: DeviceProfile) -> float:
    """Return the bytes of the final norm and of the states that the heads read.

    Saved are the norm's input and its output. The products read copies, a row for each token. With
    tensor ranks and without `sequence` the gradient of these rows is summed in a copy, too.
    """
    layout, hidden, width = choice.layout, run.student.hidden_size, run.width
    tokens = choice.micro_batch_size * run.sequence_length / layout.context
    norm = norm_input(run.student, width, is_fused=device.kind == "gpu") + hidden * width
    copies = hidden * (2 if layout.tensor > 1 and not layout.sequence else 1)
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
    chosen = run.chunk_tokens or max(1, _CHUNK[device.kind] // columns)
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


def _hidden_states(run: PlannedRun, choice: Choice, stage: int, *, in_step: bool) -> float:
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


def _known_teacher_weights(run: PlannedRun, choice: Choice, stage: int) -> float:
    if run.shards_teacher:
        return _teacher_weights(run, choice, stage)
    own = stage if choice.is_same_layout else -1
    assert choice.teacher_layout is not None
    key = ("teacher weights", dividing(choice.teacher_layout), choice.teacher_layers, own)
    return known_of((run,), key, partial(_teacher_weights, run, choice, stage))


def _teacher_weights(run: PlannedRun, choice: Choice, stage: int) -> float:
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


def _teacher_copies(run: PlannedRun, choice: Choice, stage: int) -> int:
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


def _choosing_chunk(run: PlannedRun, choice: Choice, device: DeviceProfile) -> float:
    """Return the bytes of the logits from which a teacher's last stage chooses the ids it sends."""
    if not choice.sends_ids(run):
        return 0.0
    assert run.teacher is not None
    layout = choice.teacher_layout
    assert layout is not None
    length = run.teacher_length or run.sequence_length
    tokens = choice.micro_batch_size * length / layout.context
    columns = run.teacher.padded_vocab_size(layout.tensor) // layout.tensor
    rows = min(tokens, run.chunk_tokens or max(1, _CHUNK[device.kind] // columns))
    return rows * columns * (run.width + _FP32)


def teacher_rank_need(run: PlannedRun, choice: Choice, device: DeviceProfile) -> MemoryNeed:
    """Return the need of a rank that runs the teacher alone."""
    assert run.teacher is not None
    layout = choice.teacher_layout
    assert layout is not None
    shape = run.teacher
    length = run.teacher_length or run.sequence_length
    tokens = choice.micro_batch_size * length / layout.context
    weights = max(
        _teacher_weights(run, choice, stage) + _teacher_copies(run, choice, stage)
        for stage in range(layout.pipeline)
    )
    alive = _teacher_forward(run, choice, device)
    answers = tokens * shape.hidden_size * run.width * 2
    chunk = _choosing_chunk(run, choice, device)
    slack = _SLACK if device.kind == "gpu" else 0.0
    return MemoryNeed(
        teacher=weights,
        activations=alive,
        hidden_states=answers,
        loss_chunk=chunk,
        buffers=slack * (alive + answers + chunk),
        reserved=device.reserved_gib * 2**30,
    )
