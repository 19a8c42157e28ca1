"""The time of a training step by its parts, from the times of the stages and their messages.

A pipeline of equal stages with times T and m micro-batches takes (m - 1) T + sum T. With v chunks
per rank the fill and the drain are v times shorter. Stages that differ: `alternating_seconds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Final

from megatron_distill.planning.answers import exchange_seconds, waiting_without_a_step_ahead
from megatron_distill.planning.batches import batch_seconds, step_reading_seconds, store_seconds
from megatron_distill.planning.device import DeviceProfile, Phase
from megatron_distill.planning.end_operations import (
    embedding_passes,
    head_messages,
    head_passes,
    loss_chunks,
    measuring_messages,
    measuring_passes,
)
from megatron_distill.planning.layers import LayerTimes
from megatron_distill.planning.losses.aligned import aligned_passes, measuring_aligned_passes
from megatron_distill.planning.losses.layer_passes import FeatureTimes
from megatron_distill.planning.operations import Passes, Rank
from megatron_distill.planning.parameters import RankNumbers, stage_numbers
from megatron_distill.planning.run import Choice, Parts, PlannedRun, teachers_apart
from megatron_distill.planning.stages.known import known_of
from megatron_distill.planning.stages.times import (
    StageTimes,
    alternating_seconds,
    pipeline_seconds,
    sum_of,
)
from megatron_distill.planning.updates import step_updates

if TYPE_CHECKING:
    from megatron_distill.models.architecture import Architecture
    from megatron_distill.runtime.layout import Layout

__all__ = [
    "StageTimes",
    "StepTime",
    "alternating_seconds",
    "known_heads",
    "layer_times",
    "measuring_stages",
    "partly_recomputed",
    "pass_factors",
    "phase_seconds",
    "pipeline_seconds",
    "sends_beside_work",
    "stage_message",
    "step_time",
    "student_rank",
    "student_stages",
    "teacher_seconds",
    "teacher_stages",
]

# Share of the tensor ranks' messages that products hide with runtime.tp_comm_overlap, assumed: the
# first and last pieces of each are sent beside nothing.
_OVERLAPPED: Final = 0.75


@dataclass(frozen=True)
class StepTime(Parts):
    """Seconds of a step by part; the sum is the step.

    features: the losses between layers, in both passes of their layers, which do not count them.
    balance: the student's forward pass that measures the losses for their balance, with messages
    and bubble. tensor, context, expert, pipeline, data_parallel: messages that no work hides.
    waiting: for a teacher on its own ranks, or for a store. data: for batches that are read more
    slowly than the rest of a step takes; reading goes on beside all of it, and its calls delay
    those of the step on a CPU.
    """

    teacher: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    heads: float = 0.0
    features: float = 0.0
    balance: float = 0.0
    tensor: float = 0.0
    pipeline: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    data_parallel: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    waiting: float = 0.0
    data: float = 0.0


def _in_order(stages: Sequence[StageTimes]) -> list[float]:
    """Return the times of the forward passes in the order of the model, without the heads."""
    chunks = range(len(stages[0].chunks))
    return [stage.chunks[chunk].forward_seconds for chunk in chunks for stage in stages]


def student_rank(run: PlannedRun, choice: Choice, device: DeviceProfile) -> Rank:
    """Return one rank of the student with its micro-batch."""
    tokens = choice.micro_batch_size * run.sequence_length // choice.layout.context
    return Rank(
        device,
        "fp8" if run.student_fp8 else run.precision,
        choice.layout,
        tokens,
        run.attended(run.student, run.sequence_length),
        scores=run.writes_scores,
        overlapped=(_OVERLAPPED, _OVERLAPPED) if run.overlaps_tensor else (0.0, 0.0),
    )


def student_stages(run: PlannedRun, choice: Choice, device: DeviceProfile) -> list[StageTimes]:
    """Return the student's stages; a teacher that runs within them is not in their times."""
    rank = student_rank(run, choice, device)
    last = choice.layout.pipeline - 1
    heads = known_heads(run, choice, rank)
    *factors, loss = pass_factors(run, device)
    heads = heads.scaled(loss, loss)
    message = stage_message(run.student, rank, ranks=choice.ranks) if last else 0.0
    times, between = layer_times(run, rank), FeatureTimes(run, choice, rank)
    has_features, alike = bool(choice.compared_layers(run)), dict[object, StageTimes]()
    stages = []
    for stage in range(last + 1):
        chunks = choice.chunk_layers(stage)
        key = stage == 0, stage == last, stage * has_features, *map(times.kinds, chunks)
        if key not in alike:
            chunks_of_stage = [partly_recomputed(choice, times, chunk) for chunk in chunks]
            if stage == 0:
                chunks_of_stage[0] += embedding_passes(run.student, rank)
            features = [between.passes(chunk, stage=stage) for chunk in chunks]
            both = zip(chunks_of_stage, features, strict=True)
            passes = tuple((one + more).scaled(*factors) for one, more in both)
            own = heads if stage == last else Passes()
            alike[key] = StageTimes(passes, own, message, sum_of(features).scaled(*factors))
        stages.append(alike[key])
    if device.core_share == 1.0:
        return stages
    # Stages of a CPU that wait for the slowest lend it their cores.
    busy = mean(stage.total for stage in stages) / max(stage.total for stage in stages)
    return [stage.times(max(busy, device.core_share)) for stage in stages]


def pass_factors(run: PlannedRun, device: DeviceProfile) -> tuple[float, float, float]:
    """Return the measured over the predicted time of forward, backward and losses."""
    return known_of((run, device), "factors of passes", partial(_factors, run, device))


def _factors(run: PlannedRun, device: DeviceProfile) -> tuple[float, float, float]:
    phases: tuple[Phase, ...] = ("forward", "backward", "loss")
    ahead, back, loss = (device.factor(phase, run.precision) for phase in phases)
    return ahead, back, loss


def layer_times(run: PlannedRun, rank: Rank) -> LayerTimes:
    """Return the times of the student's layers; its stages do not change them."""
    key = ("student's layers", *_sizes_of_layers(rank.layout), rank.tokens)
    return known_of((run, rank.device), key, partial(LayerTimes, run.student, rank))


def _sizes_of_layers(layout: Layout) -> tuple[int | bool, ...]:
    """Return the sizes of a layout that decide the time of a layer."""
    return layout.tensor, layout.context, layout.expert, layout.sequence


def known_heads(run: PlannedRun, choice: Choice, rank: Rank) -> Passes:
    """Return the heads and losses of a micro-batch on the student's last stage."""
    if run.several:  # replicas decide how many of the teachers run
        return _heads(run, choice, rank)
    key = ("heads", *choice.sizes_of_ends, choice.micro_batch_size)
    return known_of((run, rank.device), key, partial(_heads, run, choice, rank))


def _heads(run: PlannedRun, choice: Choice, rank: Rank) -> Passes:
    chunks = loss_chunks(run, choice, rank.device)
    if run.is_aligned:
        tokens = choice.teacher_tokens(run) if choice.keeps_head(run) else 0
        work = aligned_passes(run, rank, teacher_tokens=tokens)
        return work + head_messages(run.student, rank, chunks=chunks)
    one, terms = choice.head_in_stages(run), choice.terms(run)
    heads = head_passes(run.student, one, rank, chunks=chunks, terms=terms)
    several = run.several and choice.keeps_head(run)
    for each, _, share in teachers_apart(run, choice) if several else ():
        heads += head_passes(None, each.teacher, rank, chunks=chunks, terms=terms).times(share)
    return heads


def measuring_stages(run: PlannedRun, choice: Choice, device: DeviceProfile) -> list[StageTimes]:
    """Return the student's stages in the pass that measures for the balance; empty: there is none.

    It has no backward pass, and nothing is kept for one.
    """
    if run.measures is None:
        return []
    rank, last = student_rank(run, choice, device), choice.layout.pipeline - 1
    heads = _measuring_heads(run, choice, rank).scaled(device.factor("loss", run.precision), 1.0)
    factor = device.factor("forward", run.precision)
    message = stage_message(run.student, rank, ranks=choice.ranks) if last else 0.0
    times, between = layer_times(run, rank), FeatureTimes(run, choice, rank)
    stages = []
    for stage in range(last + 1):
        chunks_of_stage = [
            times.passes(chunk, recompute="none", trains=False)
            + between.passes(chunk, stage=stage, trains=False)
            for chunk in choice.chunk_layers(stage)
        ]
        passes = tuple(one.scaled(factor, 1.0) for one in chunks_of_stage)
        stages.append(StageTimes(passes, heads if stage == last else Passes(), message))
    return stages


def _measuring_heads(run: PlannedRun, choice: Choice, rank: Rank) -> Passes:
    """Return the heads and losses of a micro-batch in the pass that measures for the balance."""
    chunks, norms = loss_chunks(run, choice, rank.device), run.measures == "gradients"
    if run.is_aligned:
        tokens = choice.teacher_tokens(run) if choice.keeps_head(run) else 0
        work = measuring_aligned_passes(run, rank, teacher_tokens=tokens)
        return work + measuring_messages(run.student, rank, chunks=chunks, of_gradients=norms)
    measured = partial(
        measuring_passes,
        rank=rank,
        chunks=chunks,
        of_gradients=norms,
        terms=choice.terms(run),
    )
    heads = measured(run.student, choice.head_in_stages(run))
    several = run.several and choice.keeps_head(run)
    for one, _, share in teachers_apart(run, choice) if several else ():
        heads += measured(None, one.teacher).times(share)
    return heads


def measuring_seconds(run: PlannedRun, choice: Choice, device: DeviceProfile) -> float:
    """Return the time of the pass that measures for the balance, 0 without one."""
    stages = measuring_stages(run, choice, device)
    if not stages:
        return 0.0
    return pipeline_seconds(
        [stage.forward + stage.message for stage in stages],
        choice.micro_batches(run),
        chunks=choice.layout.virtual_pipeline or 1,
    )


def partly_recomputed(choice: Choice, times: LayerTimes, chunk: range) -> Passes:
    """Return the time of a chunk's layers with the choice's recomputation."""
    count = choice.recomputed_layers
    if choice.recompute != "full" or count is None or count >= len(chunk):
        return times.passes(chunk, recompute=choice.recompute, modules=choice.modules)
    first = times.passes(chunk[:count], recompute="full")
    return first + times.passes(chunk[count:], recompute="none")


def teacher_stages(run: PlannedRun, choice: Choice, device: DeviceProfile) -> Sequence[StageTimes]:
    """Return the stages of a live teacher, without its head unless it sends a top-k.

    Of several teachers, the mean time of a micro-batch through those that it needs.
    """
    if not run.several:
        return _stages_of_one(run, choice, device)
    each = [
        [stage.times(share) for stage in _stages_of_one(one, its, device)]
        for one, its, share in teachers_apart(run, choice)
    ]
    return [sum(stages[1:], start=stages[0]) for stages in zip(*each, strict=True)]


def _stages_of_one(
    run: PlannedRun, choice: Choice, device: DeviceProfile
) -> tuple[StageTimes, ...]:
    """Return the stages of one teacher; many layouts of a student have the same beside them."""
    ranks, sent = choice.teacher_ranks or choice.ranks, None
    if choice.sends_ids(run):
        sent = choice.layout.tensor, choice.layout.context, bool(choice.layers)
    key = ("teacher", choice.teacher_layout, choice.teacher_layers, ranks, sent)
    made = partial(_made_stages, run, choice, device)
    return known_of((run, device), (*key, choice.micro_batch_size), made)


def _made_stages(run: PlannedRun, choice: Choice, device: DeviceProfile) -> tuple[StageTimes, ...]:
    layout, teacher = choice.teacher_layout, run.teacher
    assert layout is not None
    assert teacher is not None
    length = run.teacher_length or run.sequence_length
    rank = Rank(
        device,
        "fp8" if run.teacher_fp8 else run.precision,
        layout,
        choice.micro_batch_size * length // layout.context,
        run.attended(teacher, length),
        # Transformer Engine overlaps no gathers of a pass without gradients.
        overlapped=(0.0, _OVERLAPPED) if run.overlaps_tensor else (0.0, 0.0),
    )
    last = layout.pipeline - 1
    heads = Passes()
    if choice.sends_ids(run):
        chunks = loss_chunks(run, choice, device)
        heads = head_passes(None, teacher, rank, chunks=chunks, chosen=run.sent_ids or 0)
        # In a live run the choice is part of the phase `teacher`, as its log has it. A capture has
        # no student and no such log: its head works as those that the phase `loss` measures.
        phase: Phase = "teacher" if choice.layers else "loss"
        heads = heads.scaled(device.factor(phase, run.precision), 1.0)
    ranks = choice.teacher_ranks or choice.ranks
    message = stage_message(teacher, rank, ranks=ranks) if last else 0.0
    key = ("teacher's layers", *_sizes_of_layers(layout), rank.tokens)
    made = partial(LayerTimes, teacher, rank, is_teacher=True)
    times = known_of((run, device), key, made)
    factor, alike = device.factor("teacher", run.precision), dict[object, StageTimes]()
    stages = []
    for stage in range(last + 1):
        layers = choice.teacher_stage(stage)
        kind = stage == 0, stage == last, times.kinds(layers)
        if kind not in alike:
            passes = times.passes(layers, recompute="none", trains=False)
            if stage == 0:
                passes += embedding_passes(teacher, rank, trains=False)
            own = heads if stage == last else Passes()
            alike[kind] = StageTimes((passes.scaled(factor, 1.0),), own, message)
        stages.append(alike[kind])
    return tuple(stages)


def stage_message(shape: Architecture, rank: Rank, *, ranks: int) -> float:
    """Return the time of a micro-batch's hidden states from one stage to the next.

    ranks: of the model. A stage is on consecutive ones, so that on several nodes some messages
    leave their node.
    """
    layout = rank.layout
    count = rank.tokens * shape.hidden_size * rank.width
    return rank.device.link(ranks).message(count / (layout.tensor if layout.sequence else 1))


def _schedule_seconds(
    stages: Sequence[StageTimes], choice: Choice, *, micro_batches: int, exchange: float
) -> float:
    """Return the time of the student's passes of a step; `exchange`: of messages per micro-batch.

    Half of them are sent in each direction.
    """
    chunks, half = choice.layout.virtual_pipeline or 1, exchange / 2
    if chunks == 1:
        forward = [stage.forward + half for stage in stages]
        return alternating_seconds(
            forward, [stage.backward + half for stage in stages], micro_batches
        )
    times = [stage.total + exchange for stage in stages]
    return pipeline_seconds(times, micro_batches, chunks=chunks)


def sends_beside_work(choice: Choice, device: DeviceProfile) -> bool:
    """Return whether messages between stages are sent beside passes: those of chunks on a GPU."""
    return choice.layout.virtual_pipeline is not None and device.kind == "gpu"


def step_time(
    run: PlannedRun, choice: Choice, device: DeviceProfile, numbers: Sequence[RankNumbers]
) -> StepTime:
    """Return the time of a step; `numbers`: the student's parameters of each pipeline rank."""
    micro_batches = choice.micro_batches(run)
    stages = student_stages(run, choice, device)
    busiest = max(range(len(stages)), key=lambda stage: stages[stage].total)
    slow, layout = stages[busiest], choice.layout
    split = layout.pipeline > 1
    exchange = exposed = 0.0
    if split and sends_beside_work(choice, device):
        # The first forward and the last backward pass wait for them, through all chunks.
        exposed = 2 * (layout.stages - 1) * slow.message
    elif split:
        # Half of a micro-batch's two messages each way is waited for.
        exchange = slow.message * (layout.virtual_pipeline or 1)
    schedule = _schedule_seconds(stages, choice, micro_batches=micro_batches, exchange=exchange)
    messages = slow.layers + slow.heads
    teacher, teacher_bubble = teacher_seconds(run, choice, device)
    updates = step_updates(run, choice, device, numbers[busiest], (slow.forward, slow.backward))
    balance = measuring_seconds(run, choice, device)
    own = balance + schedule + exposed + sum(vars(updates).values())
    waiting = 0.0
    if choice.place == "own ranks":
        # Answers are kept where the student runs twice: then only its first pass waits.
        first = measuring_stages(run, choice, device)
        together = waiting_without_a_step_ahead(
            run,
            choice,
            device,
            teacher=(teacher, teacher_bubble),
            stages=_in_order(first or stages),
            period=max(one.total for one in first or stages),
        )
        # A teacher that is ahead begins a step when the student has ended one so many before it.
        waiting = max(0.0, teacher - own, (own + together) / (run.steps_ahead + 1) - own)
        teacher = teacher_bubble = 0.0
    elif choice.place == "store":
        waiting = max(0.0, store_seconds(run, choice) - own)
    time = StepTime(
        teacher=teacher,
        forward=micro_batches * (slow.layers.forward - slow.features.forward),
        backward=micro_batches * (slow.layers.backward - slow.features.backward),
        heads=micro_batches * (slow.heads.forward + slow.heads.backward),
        features=micro_batches * (slow.features.forward + slow.features.backward),
        balance=balance,
        tensor=micro_batches * messages.tensor,
        pipeline=micro_batches * exchange + exposed + updates.edge,
        context=micro_batches * messages.context,
        expert=micro_batches * messages.expert,
        data_parallel=updates.reduction + updates.gather,
        bubble=schedule - micro_batches * (slow.total + exchange) + teacher_bubble,
        optimizer=updates.optimizer,
        waiting=waiting,
    )
    waits = time.tensor + time.context + time.expert + time.pipeline + time.bubble + waiting
    behind = batch_seconds(run, choice, device, waits=waits)
    return replace(
        time, data=behind + max(0.0, step_reading_seconds(run, choice) - time.total - behind)
    )


def phase_seconds(
    run: PlannedRun, choice: Choice, device: DeviceProfile, numbers: Sequence[RankNumbers]
) -> dict[Phase, float]:
    """Return the predicted time of the phases that `metrics.jsonl` has, of the first rank."""
    micro_batches = choice.micro_batches(run)
    stages = student_stages(run, choice, device)
    stage, time = stages[0], step_time(run, choice, device, numbers)
    busiest = max(range(len(stages)), key=lambda one: stages[one].total)
    # Weights that no forward pass hides are gathered as the last part of the update.
    slow = stages[busiest].forward, stages[busiest].backward
    updates = step_updates(run, choice, device, numbers[busiest], slow)
    gather = 0.0 if run.overlaps_parameters else updates.gather
    forward, heads = stage.layers.forward_seconds, stage.heads.forward_seconds
    heads += stage.heads.backward_seconds
    for first in measuring_stages(run, choice, device)[:1]:
        forward += first.layers.forward_seconds
        heads += first.heads.forward_seconds
    return {
        "teacher": time.teacher + time.waiting,
        "forward": micro_batches * forward,
        "loss": micro_batches * heads,
        "backward": micro_batches * stage.layers.backward_seconds,
        "communication": time.data_parallel - gather + time.pipeline + time.bubble,
        "optimizer": time.optimizer + gather,
    }


def teacher_seconds(run: PlannedRun, choice: Choice, device: DeviceProfile) -> tuple[float, float]:
    """Return the time of the teacher's passes of a step, and the bubble of its pipeline."""
    if choice.place not in ("shared", "own ranks"):
        return 0.0, 0.0
    stages = teacher_stages(run, choice, device)
    micro_batches = choice.teacher_micro_batches(run)
    times = [stage.forward + stage.message for stage in stages]
    work = micro_batches * max(times)
    received = sum(
        share * _weights_received(one, its, device)
        for one, its, share in teachers_apart(run, choice)
        if one.shards_teacher
    )
    gathered = max(0.0, micro_batches * received - work)
    sent = exchange_seconds(run, choice, device)
    return work + gathered + sent, sum(times) - max(times)


def _weights_received(run: PlannedRun, choice: Choice, device: DeviceProfile) -> float:
    """Return the time in which a rank receives its stage's sharded weights, per forward pass."""
    layout, teacher = choice.teacher_layout, run.teacher
    assert layout is not None
    assert teacher is not None
    share = (choice.teacher_ranks or choice.ranks) // (layout.tensor * layout.pipeline)
    numbers = stage_numbers(teacher, layout, choice.teacher_layers)
    count = max(each.total for each in numbers) * run.width
    return device.link(share * layout.tensor).gathered(count, ranks=share)
