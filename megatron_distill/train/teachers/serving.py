"""The teacher's side of ranks of its own: it recomputes the units, runs them, and sends answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Queue
from threading import Thread

import torch
from torch import Tensor

from megatron_distill.data.prefetch import PrefetchedUnits
from megatron_distill.errors import DataError, StoreError
from megatron_distill.models.gpt import run_model
from megatron_distill.models.layers import tap_layers
from megatron_distill.models.sharded_weights import needs_every_replica
from megatron_distill.models.taps import VisibleKeys
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.bridge import Bridge, Sending
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.lone_failure import LoneFailure
from megatron_distill.runtime.termination import is_requested
from megatron_distill.train.phase_timers import ANSWER, COMMUNICATION, DATA, FORWARD
from megatron_distill.train.step import run_schedule
from megatron_distill.train.teachers.answer_ways import (
    AnswerWay,
    Columns,
    SlotPlace,
    connect_routes,
    own_stream,
)
from megatron_distill.train.teachers.answers import (
    COMMAND_TAG,
    HEAD_TAG,
    HEADER_TAG,
    AnswerError,
    AnswerHeader,
    AnswerPlan,
    RequestKind,
    RoundRequest,
    token_hash,
)
from megatron_distill.train.teachers.attention_heads import FeatureKind
from megatron_distill.train.teachers.live import OnlineTeacher
from megatron_distill.train.teachers.served_steps import SENDING, SLOT, ServedSteps
from megatron_distill.train.teachers.units import Message

__all__ = ["AnswerSender", "TeacherServer", "UnitShare", "send_head", "units_of_round"]

# Of the last hidden state: the tensors for the losses between logits.
LastColumns = Callable[[Tensor, Batch], Sequence[Tensor]]


@dataclass(frozen=True)
class _Answer:
    command: RoundRequest
    unit: int
    columns: Columns  # empty where the unit could not be read, or is left out
    non_finite: Tensor
    hashes: Mapping[int, int]  # by context rank of the student
    computed: torch.cuda.Event | None
    is_left_out: bool = False


class AnswerSender:
    """A thread that sends answers in order, while the model computes the next.

    It ends the process with `alone` where a message fails. Answers wait on the device for their
    turn: at most those of the rounds that the student has requested, since it has room for them.

    Attributes:
        seconds: since the start, with claims of slots and with rows; of steps alone.
    """

    def __init__(
        self,
        plan: AnswerPlan,
        way: AnswerWay,
        bridge: Bridge,
        *,
        device: torch.device,
        alone: LoneFailure,
    ) -> None:
        self._device = device
        self._plan = plan
        self._way = way
        self._bridge = bridge
        self._alone = alone
        self._rows = plan.sent_rows(bridge.rank)
        self.seconds = dict.fromkeys((SLOT, SENDING), 0.0)
        self._work: Queue[_Answer | None] = Queue()
        self._thread = Thread(target=self._send_all, name="answers", daemon=True)
        self._thread.start()

    def connect(self) -> None:
        """See `connect_routes`; before the first round."""
        connect_routes(self._plan, self._way, self._bridge)

    def put(self, command: RoundRequest, unit: int, columns: Columns, batch: Batch) -> None:
        """Send a unit's answer; `batch` is whole, as on the host.

        Raises AnswerError: a tensor is not that of the plan.
        """
        self._require_shapes(command, unit, columns)
        # A tail of no mass is -inf.
        bad = self._non_finite(columns)
        computed: torch.cuda.Event | None = None
        if bad.is_cuda:
            bad = bad.to("cpu", non_blocking=True)
            computed = torch.cuda.Event()
            computed.record()
        size = self._plan.student.context
        hashes = {
            rank: token_hash(batch, context_rank=rank, context_size=size) for rank in range(size)
        }
        self._work.put(_Answer(command, unit, columns, bad, hashes, computed))

    def refuse(self, command: RoundRequest, unit: int) -> None:
        """Let the student know that a unit has no answer; the reason is `Bridge.failure`."""
        self._without_rows(command, unit, is_left_out=False)

    def leave_out(self, command: RoundRequest, unit: int) -> None:
        """Let the student know that a unit has no sample of this teacher."""
        self._without_rows(command, unit, is_left_out=True)

    def _without_rows(self, command: RoundRequest, unit: int, *, is_left_out: bool) -> None:
        hashes = dict.fromkeys(range(self._plan.student.context), 0)
        self._work.put(_Answer(command, unit, {}, torch.zeros(()), hashes, None, is_left_out))

    def stop(self) -> None:
        """End the thread once every answer has been sent."""
        self._work.put(None)
        self._thread.join()

    def _require_shapes(self, command: RoundRequest, unit: int, columns: Columns) -> None:
        """Compare shapes and dtypes, by which the receivers have their slots."""
        for number, tensor in columns.items():
            column = self._plan.columns[number][1]
            shape = (self._rows[number], self._plan.sequences, *column.shape)
            if (tuple(tensor.shape), tensor.dtype) != (shape, column.dtype):
                names, own = self._bridge.roles.names, self._bridge.rank
                raise AnswerError(
                    f"unit {unit} of {command.place} from {names([own])} to "
                    f"{names(list(self._plan.sent(unit, own)))}: its {column.name} is "
                    f"{list(tensor.shape)} of {tensor.dtype}, and both sides have planned "
                    f"{list(shape)} of {column.dtype}"
                )

    def _non_finite(self, columns: Columns) -> Tensor:
        """Count the values that an answer may not have, on the device."""
        counts, kinds = [], self._plan.columns
        for number, column in columns.items():
            _, kind = kinds[number]
            if kind.has_logarithms:  # that of no mass is -inf
                counts.append((column.isnan() | column.isposinf()).sum())
            elif column.is_floating_point():
                counts.append((~column.isfinite()).sum())
        return torch.stack(counts).sum()

    def _send_all(self) -> None:
        with self._alone, own_stream(self._device):
            while (answer := self._work.get()) is not None:
                self._send(answer)
            if self._device.type == "cuda":  # slots are unmapped after this thread's end
                torch.cuda.current_stream().synchronize()

    def _send(self, answer: _Answer) -> None:
        command, plan = answer.command, self._plan
        sent = plan.sent(answer.unit, self._bridge.rank)
        micro_batch = answer.unit // plan.units.student_replicas
        if answer.computed is not None:
            answer.computed.wait()  # this thread's stream alone
        under_way: list[Sending] = []
        for rank, parts in sent.items():
            with self._counted(SLOT, command):
                self._way.claim(command, rank)
            if answer.columns and self._way.writes_slots:
                place = SlotPlace(rank, command.block, micro_batch)
                with self._counted(SENDING, command):
                    under_way += self._way.send(answer.columns, parts, place)
        if answer.computed is not None:
            answer.computed.synchronize()  # the headers have its number of values
        with self._counted(SENDING, command):
            for rank, parts in sent.items():
                header = self._header(answer, rank)
                under_way.append(self._bridge.send(header, rank, tag=HEADER_TAG))
                if answer.columns and not self._way.writes_slots:
                    place = SlotPlace(rank, command.block, micro_batch)
                    under_way += self._way.send(answer.columns, parts, place)
            for sending in under_way:
                sending.wait()

    @contextmanager
    def _counted(self, name: str, command: RoundRequest) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if command.request == RequestKind.STEP:
            self.seconds[name] += time.perf_counter() - began

    def _header(self, answer: _Answer, rank: int) -> Tensor:
        return AnswerHeader(
            answer.command.turn,
            answer.unit,
            answer.hashes[self._plan.student.context_rank(rank)],
            int(answer.non_finite),
            asks_to_stop=is_requested(),
            has_failed=not answer.columns and not answer.is_left_out,
            is_left_out=answer.is_left_out,
        ).tensor()


def send_head(teacher: OnlineTeacher, parts: Sequence[Message], bridge: Bridge) -> None:
    """Send this rank's rows of the output head to the student's last stage.

    Collective: the bridge, the rows of the head per rank of the student's last stage.
    """
    weight = teacher.head_weight
    if weight is None:
        return
    host = weight.detach().cpu().contiguous()
    own = [part for part in parts if part.source == bridge.rank]
    for sending in [bridge.send(host[part.sent], part.destination, tag=HEAD_TAG) for part in own]:
        sending.wait()


def units_of_round(plan: AnswerPlan, teacher: OnlineTeacher) -> tuple[int, ...]:
    """Return the units that this replica runs; some twice where all replicas must run as many."""
    units, replica = plan.units, teacher.groups.data.rank()
    every = range(units.micro_batches)
    if needs_every_replica(teacher.model, teacher.groups):
        return units.evened(every, replica)
    return units.of_teacher(every, replica)


@dataclass(frozen=True)
class UnitShare:
    """The units that a teacher runs.

    number: in a batch, of one of several teachers that runs on its own samples. None: it runs on
    every sample, as the only one or named by a term.
    """

    number: int | None = None

    def has(self, batch: Batch) -> bool:
        """Whether a sample of a unit is the teacher's."""
        return self.number is None or self.number in batch.teacher_numbers

    def has_beside(self, batch: Batch) -> bool:
        """Whether one of the units that all replicas run beside this one is the teacher's."""
        return self.number is None or self.number in batch.teachers_of_all


@dataclass(frozen=True)
class _Turn:
    """A unit that runs; `left_out`: those before it that do not, since the answer sent last."""

    unit: int
    batch: Batch
    is_sent: bool
    left_out: tuple[int, ...]


@dataclass(frozen=True)
class TeacherServer:
    """Runs the units of each round that the student asks for, until it ends.

    Attributes:
        units: of a round that this replica runs, as of `units_of_round`.
        columns: turn the last hidden state of a unit into the tensors of its answer.
        steps: times and profiles the steps.
        held_out: this replica's units of each held-out batch.
        sender: on ranks whose stage has an output, None elsewhere; it is stopped by its owner.
        layers: outputs, queries and keys of layers on this rank, of the unit that runs.
        share: the units of a round that have an answer; a round without any runs nothing.
        has_own_tokens: whether the teacher has a tokenizer of its own. The units of another one may
            have such tokens too, of a teacher elsewhere.
        evaluate: evaluates the tasks that the student sends, and sends their results.
    """

    plan: AnswerPlan
    bridge: Bridge
    groups: Groups
    teacher: OnlineTeacher
    columns: LastColumns
    units: tuple[int, ...]
    loader: PrefetchedUnits
    steps: ServedSteps
    held_out: Sequence[Sequence[Batch]]
    sender: AnswerSender | None
    device: torch.device
    alone: LoneFailure
    evaluate: Callable[[], None]
    layers: dict[tuple[FeatureKind, int], Tensor] = field(default_factory=dict)
    share: UnitShare = UnitShare()
    has_own_tokens: bool = False

    def tap(self) -> None:
        """Store what is sent of layers; before the first round."""
        wanted = [(one.kind, one.layer) for one in self.plan.outputs if one.layer is not None]
        tap_layers(
            [self.teacher.model],
            {layer: partial(self._put, layer) for kind, layer in wanted if kind == "output"},
            {layer: partial(self._attended, layer) for kind, layer in wanted if kind == "query"},
        )

    def _put(self, layer: int, hidden_sbH: Tensor, *, micro_batch: int) -> Tensor:  # noqa: ARG002
        self.layers["output", layer] = hidden_sbH
        return hidden_sbH

    def _attended(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        visible: VisibleKeys,  # noqa: ARG002 - the student's queries see the same keys
        *,
        micro_batch: int,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        self.layers["query", layer], self.layers["key", layer] = query, key
        return query, key

    @torch.no_grad()
    def serve(self) -> None:
        """Answer every round.

        A step that cannot be read is refused, and so are those after it. The student reads the same
        data, and raises the error where its own steps come to it.

        Collective: the bridge, one command and this rank's messages of a round; the teacher's
        world, those of the loader, of its model's forward pass and of `evaluate`.
        """
        has_failed = False
        while (command := self._command()).request != RequestKind.STOP:
            if is_requested():
                self.bridge.ask_to_stop()
            if command.request == RequestKind.EVALUATE:
                self.evaluate()
                continue
            if command.request == RequestKind.HELD_OUT:
                self._run(command, self.held_out[command.number - 1])
                continue
            with self.steps.step(command.number):
                batches = None if has_failed else self._step(command.number)
                has_failed = batches is None
                if batches is None:
                    self._refuse(command)
                else:
                    self._run(command, batches)

    def _step(self, number: int) -> Sequence[Batch] | None:
        """Return the units of a step; None, on all ranks, where the first one cannot read them."""
        self.alone.progress.begin(number)
        with self.steps.timers.phase(DATA):
            try:
                return self.loader.take(number)
            except (DataError, StoreError) as error:
                self.bridge.note_failure(str(error))
                return None

    def _refuse(self, command: RoundRequest) -> None:
        if self.sender is not None:
            for unit in dict.fromkeys(filter(self._is_own, self.units)):
                self.sender.refuse(command, unit)

    def _command(self) -> RoundRequest:
        sent = torch.empty(4, dtype=torch.int64)
        with self.steps.waiting():
            self.bridge.receive(sent, 0, tag=COMMAND_TAG).wait()
        return RoundRequest.of(sent)

    def _run(self, command: RoundRequest, batches: Sequence[Batch]) -> None:
        turns, left_out = self._turns(batches)
        if turns:
            with self.steps.timers.phase(COMMUNICATION):  # between stages; the rest has its own
                run_schedule(
                    partial(self._forward, command=command),
                    [self.teacher.model],
                    turns,
                    groups=self.groups,
                    micro_batch_size=self.plan.sequences,
                    sequence_length=self.plan.length,
                    forward_only=True,
                    collect_outputs=True,
                )
        self._leave_out(command, left_out)

    def _turns(self, batches: Sequence[Batch]) -> tuple[list[_Turn], list[int]]:
        """Return the units of a round that run, and those after the last answer that do not.

        A unit without a sample of the teacher runs where all replicas must run as many, and another
        one has such a sample.
        """
        is_joint = needs_every_replica(self.teacher.model, self.groups)
        turns: list[_Turn] = []
        left_out: list[int] = []
        answered: set[int] = set()
        for unit, batch in zip(self.units, batches, strict=True):
            is_due = unit not in answered and self._is_own(unit)
            answered.add(unit)
            is_sent = is_due and self.share.has(batch)
            if is_sent or (is_joint and self.share.has_beside(batch)):
                turns.append(_Turn(unit, batch, is_sent, tuple(left_out) if is_sent else ()))
            if is_sent:
                left_out.clear()
            elif is_due:
                left_out.append(unit)
        return turns, left_out

    def _leave_out(self, command: RoundRequest, units: Sequence[int]) -> None:
        if self.sender is not None:
            for unit in units:
                self.sender.leave_out(command, unit)

    def _is_own(self, unit: int) -> bool:
        return self.plan.units.teacher_replica(unit) == self.groups.data.rank()

    def _forward(
        self,
        iterator: Iterator[_Turn],
        model: torch.nn.Module,
        *,
        command: RoundRequest,
    ) -> tuple[Tensor, Callable[..., None]]:
        turn, timers = next(iterator), self.steps.timers
        unit, whole = turn.unit, turn.batch
        self.alone.progress.unit = unit
        context = self.groups.context
        with timers.phase(DATA):
            batch = self._on_device(whole)
        with timers.phase(FORWARD):
            output = run_model(model, batch, context_size=context.size(), micro_batch=unit)
        layers = self._taken_layers()

        def send(last: Sequence[Tensor]) -> None:
            if turn.is_sent and self.sender is not None:
                self._leave_out(command, turn.left_out)
                own = dict(enumerate(last))  # the first output is of the last stage
                self.sender.put(command, unit, {**own, **layers}, whole)

        def collected(hidden_sbh: Tensor, *, non_loss_data: bool) -> None:
            assert non_loss_data
            with timers.phase(ANSWER):
                send(self.columns(hidden_sbh, batch))

        if not self.groups.is_last_stage:
            with timers.phase(ANSWER):
                send(())
        return output, collected

    def _on_device(self, whole: Batch) -> Batch:
        """Return this context rank's part of a unit, as the model reads it."""
        context = self.groups.context
        own = whole if self.has_own_tokens else replace(whole, teacher=None)
        shard = own.context_shard(context.rank(), context.size()).with_trained_rows()
        if self.device.type == "cuda":
            shard = shard.pinned()  # else the host would wait for the stream
        batch = shard.to(self.device)
        return batch.teacher or batch

    def _taken_layers(self) -> dict[int, Tensor]:
        """Return what this stage sends of layers of the unit that has run, by number."""
        found: dict[int, Tensor] = {}
        first = 0
        for output in self.plan.outputs:
            if output.layer is not None and (output.kind, output.layer) in self.layers:
                # Of queries and keys this rank's heads are one of the parts.
                part = self.groups.tensor.rank() % len(output.columns)
                found[first + part] = self.layers[output.kind, output.layer].contiguous()
            first += len(output.columns)
        self.layers.clear()
        return found
