"""A step's schedule as a walk from event to event: 1F1B, interleaved stages, teacher passes.

A lane is a pipeline stage: the tensor, context and data ranks of a stage do the same at the same
time. Each lane works through its operations in Megatron-Core's order, and an operation starts when
the lane is free and its inputs have arrived. Where batches are read more slowly than the rest of a
step takes, reading is one more lane.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from megatron_distill.errors import counted
from megatron_distill.planning.answers import (
    answer_seconds,
    answering_unit,
    exchange_seconds,
)
from megatron_distill.planning.device import DeviceProfile
from megatron_distill.planning.losses.layer_messages import needs_answer
from megatron_distill.planning.run import Choice, PlannedRun
from megatron_distill.planning.step_time import (
    StageTimes,
    StepTime,
    measuring_stages,
    student_stages,
    teacher_stages,
)

__all__ = [
    "FinishedTask",
    "Timeline",
    "chrome_trace",
    "interleaved_order",
    "one_forward_one_backward",
    "simulate",
    "walk",
]

OperationKind = Literal["data", "teacher", "measure", "forward", "backward", "update"]
# Steps that are walked where work for later ones goes on beside them, besides those that a teacher
# is ahead. The one before the last counts: in the last that work has ended.
_STEPS: Final = 5
# Relative difference up to which two steps are equal.
_SAME: Final = 1e-6


@dataclass(frozen=True)
class Operation:
    """One operation of a lane. `stage`: of the model, virtual ones counted."""

    kind: OperationKind
    step: int
    micro_batch: int
    stage: int


@dataclass(frozen=True)
class TimedTask:
    """An operation, its seconds, and the operations whose results it needs, with their delays."""

    operation: Operation
    seconds: float
    needs: tuple[tuple[Operation, float], ...] = ()


@dataclass(frozen=True)
class FinishedTask:
    """An operation that a lane has done, in seconds from the start."""

    lane: int
    operation: Operation
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The operations of all lanes that touch one step, or a few of unequal length.

    names: of the lanes. ranks: of the launch that a lane stands for; 0: reading beside their work.
    start, end: of the steps. steps: how many they are.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    done: tuple[FinishedTask, ...]
    start: float
    end: float
    steps: int = 1

    @property
    def seconds(self) -> float:
        """Time of a step, a mean."""
        return (self.end - self.start) / self.steps

    def lane_ranks(self, lane: int) -> str:
        """Return the ranks of a lane in words."""
        return counted(self.ranks[lane], "rank") if self.ranks[lane] else "beside a rank"

    def idle_share(self, lane: int) -> float:
        """Return the share of the step in which a lane waits."""
        busy = sum(
            min(one.end, self.end) - max(one.start, self.start)
            for one in self.done
            if one.lane == lane and one.end > self.start and one.start < self.end
        )
        return 1 - busy / (self.end - self.start)


def walk(lanes: Sequence[Sequence[TimedTask]]) -> list[FinishedTask]:
    """Let every lane do its tasks in their order; return them by their end.

    Raises ValueError: lanes wait for one another for ever.
    """
    ends: dict[Operation, float] = {}
    waiting: dict[Operation, list[int]] = {}
    position = [0] * len(lanes)
    free = [0.0] * len(lanes)
    done: list[FinishedTask] = []
    events: list[tuple[float, int, int]] = []

    def start(lane: int, now: float) -> None:
        """Begin the lane's next task, or note the result that it waits for."""
        if position[lane] == len(lanes[lane]):
            return
        task = lanes[lane][position[lane]]
        begin = max(now, free[lane])
        for operation, delay in task.needs:
            if operation not in ends:
                waiting.setdefault(operation, []).append(lane)
                return
            begin = max(begin, ends[operation] + delay)
        position[lane] += 1
        free[lane] = begin + task.seconds
        heapq.heappush(events, (free[lane], lane, len(done)))
        done.append(FinishedTask(lane, task.operation, begin, free[lane]))

    for lane in range(len(lanes)):
        start(lane, 0.0)
    while events:
        now, lane, index = heapq.heappop(events)
        operation = done[index].operation
        ends[operation] = now
        for other in waiting.pop(operation, ()):
            start(other, now)
        start(lane, now)
    if any(position[lane] < len(lanes[lane]) for lane in range(len(lanes))):
        raise ValueError("the lanes wait for one another")
    return sorted(done, key=lambda one: one.end)


def one_forward_one_backward(
    stage: int, stages: int, micro_batches: int
) -> list[tuple[OperationKind, int, int]]:
    """Return a stage's passes as (kind, micro-batch, chunk), in the order of 1F1B."""
    warm = min(stages - stage - 1, micro_batches)
    order: list[tuple[OperationKind, int, int]] = [("forward", number, 0) for number in range(warm)]
    for number in range(micro_batches - warm):
        order += [("forward", warm + number, 0), ("backward", number, 0)]
    rest = range(micro_batches - warm, micro_batches)
    return [*order, *(("backward", number, 0) for number in rest)]


def interleaved_order(
    rank: int, ranks: int, chunks: int, micro_batches: int
) -> list[tuple[OperationKind, int, int]]:
    """Return a rank's passes as (kind, micro-batch, chunk), in Megatron-Core's interleaved order.

    Source: arXiv 2104.04473, section 2.2. Micro-batches go through the chunks in groups of `ranks`.
    """
    total = micro_batches * chunks

    def place(number: int, *, backward: bool) -> tuple[int, int]:
        group, within = divmod(number, ranks * chunks)
        chunk, micro_batch = divmod(within, ranks)
        return group * ranks + micro_batch, chunks - 1 - chunk if backward else chunk

    warm = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, total)
    order: list[tuple[OperationKind, int, int]] = []
    for number in range(total):
        order.append(("forward", *place(number, backward=False)))
        if number >= warm:
            order.append(("backward", *place(number - warm, backward=True)))
    return [
        *order,
        *(("backward", *place(number, backward=True)) for number in range(total - warm, total)),
    ]


def simulate(run: PlannedRun, choice: Choice, device: DeviceProfile, time: StepTime) -> Timeline:
    """Walk a step of a choice; `time`: its prediction, for the updates at the end of the step."""
    stages = student_stages(run, choice, device)
    teacher = teacher_stages(run, choice, device) if choice.teacher_layout is not None else []
    steps = 1
    if choice.place == "own ranks":
        steps = _STEPS + 3 * run.steps_ahead
    elif time.data:
        steps = _STEPS
    update = time.data_parallel + time.optimizer
    lanes = [
        _student_lane(run, choice, device, stages, teacher, rank=rank, steps=steps, update=update)
        for rank in range(len(stages))
    ]
    per_lane = choice.ranks // len(stages)
    names = [f"stage {rank}" for rank in range(len(stages))]
    ranks = [per_lane] * len(stages)
    if choice.place == "own ranks":
        units = choice.teacher_micro_batches(run)
        lanes += [
            _teacher_lane(run, teacher, rank, units=units, steps=steps, last=len(stages) - 1)
            for rank in range(len(teacher))
        ]
        names += [f"teacher {rank}" for rank in range(len(teacher))]
        ranks += [choice.teacher_ranks // len(teacher)] * len(teacher)
    if time.data:
        lanes = [_after_reading(lane) for lane in lanes]
        # Reading takes the whole step, or `data` would be zero. The rank that reads also computes.
        lanes.append(
            [TimedTask(Operation("data", step, 0, 0), time.total) for step in range(steps)]
        )
        names.append("reading")
        ranks.append(0)
    done = walk(lanes)
    last = [one for one in done if one.operation.kind == "update"]
    ends = [max(one.end for one in last if one.operation.step == step) for step in range(steps)]
    count = _unequal_steps(ends, run.steps_ahead + 1) if choice.place == "own ranks" else 1
    begin, end = (ends[-2 - count], ends[-2]) if steps > 1 else (0.0, ends[-1])
    shown = tuple(one for one in done if one.end > begin and one.start < end)
    return Timeline(tuple(names), tuple(ranks), shown, begin, end, count)


def _unequal_steps(ends: Sequence[float], most: int) -> int:
    """Return how many steps are shown: one, or where steps differ as many as then repeat.

    A teacher that waits for the student answers that many steps at once.
    """
    last, before = ends[-2] - ends[-3], ends[-3] - ends[-4]
    return 1 if abs(last - before) <= _SAME * last else most


def _student_lane(
    run: PlannedRun,
    choice: Choice,
    device: DeviceProfile,
    stages: Sequence[StageTimes],
    teacher: Sequence[StageTimes],
    *,
    rank: int,
    steps: int,
    update: float,
) -> list[TimedTask]:
    ranks, chunks = len(stages), choice.layout.virtual_pipeline or 1
    micro_batches = choice.micro_batches(run)
    order = (
        one_forward_one_backward(rank, ranks, micro_batches)
        if chunks == 1
        else interleaved_order(rank, ranks, chunks, micro_batches)
    )
    measuring = measuring_stages(run, choice, device)
    # Kept signals wait for both passes of the student.
    measured: list[tuple[OperationKind, int, int]] = [
        ("measure", micro_batch, chunk)
        for kind, micro_batch, chunk in order
        if kind == "forward" and measuring
    ]
    tasks: list[TimedTask] = []
    for step in range(steps):
        within_passes = choice.runs_within and not measuring
        if choice.place == "shared" and not within_passes:
            units = choice.teacher_micro_batches(run)
            tasks += _teacher_pass(choice, teacher, rank, units, step)
            sent = exchange_seconds(run, choice, device)
            if sent:
                tasks.append(_exchange(choice, rank, units, step, sent))
        for kind, micro_batch, chunk in [*measured, *order]:
            of_kind = measuring if kind == "measure" else stages
            one = _pass(
                of_kind, rank, Operation(kind, step, micro_batch, chunk * ranks + rank), chunks
            )
            if kind == "forward" and within_passes:
                within = Operation("teacher", step, micro_batch, 0)
                tasks.append(TimedTask(within, teacher[0].forward))
            elif kind != "backward" and choice.place == "own ranks":
                one = _answer(choice, run, device, one, len(teacher))
            tasks.append(one)
        tasks.append(TimedTask(Operation("update", step, 0, rank), update))
    return tasks


def _after_reading(lane: Sequence[TimedTask]) -> list[TimedTask]:
    """Let the first task of each step wait until the step's samples are read."""
    begun: set[int] = set()
    tasks = []
    for task in lane:
        step = task.operation.step
        if step not in begun:
            begun.add(step)
            read = (Operation("data", step, 0, 0), 0.0)
            task = TimedTask(task.operation, task.seconds, (*task.needs, read))
        tasks.append(task)
    return tasks


def _pass(stages: Sequence[StageTimes], rank: int, operation: Operation, chunks: int) -> TimedTask:
    """Return a pass of the student with the passes of the neighbouring stages that it needs."""
    ranks, stage = len(stages), operation.stage
    times = stages[rank]
    own = times.chunks[stage // ranks]
    is_last = stage == ranks * chunks - 1
    forward = operation.kind != "backward"
    seconds = own.forward_seconds if forward else own.backward_seconds
    if is_last:
        heads = times.heads
        seconds += heads.forward_seconds if forward else heads.backward_seconds
    neighbour = stage - 1 if forward else stage + 1
    if not 0 <= neighbour < ranks * chunks:
        return TimedTask(operation, seconds)
    needed = Operation(operation.kind, operation.step, operation.micro_batch, neighbour)
    return TimedTask(operation, seconds, ((needed, times.message if ranks > 1 else 0.0),))


def _teacher_pass(
    choice: Choice, teacher: Sequence[StageTimes], rank: int, micro_batches: int, step: int
) -> list[TimedTask]:
    """Return the teacher's pass over a step's micro-batches on a rank of the student's pipeline.

    In a layout of its own it has other replicas and stages. Each lane then counts as busy for the
    whole pass of the slowest stage, and in the first micro-batch for those of all stages.
    """
    stage = rank if choice.is_same_layout else 0
    times = teacher[stage]
    if not choice.is_same_layout:
        passes = [one.forward + one.message for one in teacher]
        return [
            TimedTask(
                Operation("teacher", step, number, rank), max(passes) if number else sum(passes)
            )
            for number in range(micro_batches)
        ]
    tasks = []
    for number in range(micro_batches):
        needed = Operation("teacher", step, number, stage - 1)
        needs = ((needed, times.message),) if stage else ()
        tasks.append(TimedTask(Operation("teacher", step, number, stage), times.forward, needs))
    return tasks


def _exchange(choice: Choice, rank: int, units: int, step: int, seconds: float) -> TimedTask:
    """Return the messages of a step's answers to a rank of the student's pipeline.

    Layers of other stages have ended when the last stage has.
    """
    last = choice.layout.pipeline - 1 if choice.is_same_layout else rank
    needed = Operation("teacher", step, units - 1, last)
    return TimedTask(Operation("teacher", step, units, rank), seconds, ((needed, 0.0),))


def _teacher_lane(
    run: PlannedRun, teacher: Sequence[StageTimes], rank: int, *, units: int, steps: int, last: int
) -> list[TimedTask]:
    """Return the passes of a stage of a teacher on its own ranks; `last`: the student's stage.

    It begins a step when the student has ended that `steps_ahead` + 1 before it.
    """
    times = teacher[rank]
    tasks = []
    for step in range(steps):
        for number in range(units):
            needs: tuple[tuple[Operation, float], ...] = ()
            if rank:
                needs = ((Operation("teacher", step, number, -rank), times.message),)
            elif number == 0 and step > run.steps_ahead:
                ended = Operation("update", step - run.steps_ahead - 1, 0, last)
                needs = ((ended, 0.0),)
            tasks.append(
                TimedTask(Operation("teacher", step, number, -rank - 1), times.forward, needs)
            )
    return tasks


def _answer(
    choice: Choice, run: PlannedRun, device: DeviceProfile, task: TimedTask, teachers: int
) -> TimedTask:
    """Let a student's stage wait for its part of the teacher's answer to the micro-batch.

    The last stage has the losses between logits, each stage with a pair those between layers.
    """
    operation = task.operation
    if not needs_answer(run, choice, operation.stage):
        return task
    unit = answering_unit(run, choice, operation.micro_batch)
    answer = Operation("teacher", operation.step, unit, -teachers)
    delay = answer_seconds(run, choice, device, operation.stage % choice.layout.pipeline)
    return TimedTask(operation, task.seconds, (*task.needs, (answer, delay)))


def chrome_trace(timeline: Timeline) -> dict[str, object]:
    """Return the events of a timeline in Chrome's trace format, for Perfetto; microseconds."""
    events: list[Mapping[str, object]] = [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": 0,
            "tid": lane,
            "args": {"name": f"{name} ({timeline.lane_ranks(lane)})"},
        }
        for lane, name in enumerate(timeline.names)
    ]
    for one in timeline.done:
        operation = one.operation
        events.append(
            {
                "name": f"{operation.kind} {operation.micro_batch}",
                "cat": operation.kind,
                "ph": "X",
                "pid": 0,
                "tid": one.lane,
                "ts": one.start * 1e6,
                "dur": (one.end - one.start) * 1e6,
                "args": {"stage": operation.stage, "step": operation.step},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
