"""The student's side of a teacher on ranks of its own: it requests rounds and receives answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import torch
from torch import Tensor

from megatron_distill.models.architecture import Architecture
from megatron_distill.ops.aligned.columns import TeacherLayout
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.bridge import Bridge, Sending
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.lone_failure import LoneFailure
from megatron_distill.runtime.termination import request_termination
from megatron_distill.signals import OnDemand, Signal, Signals, WithFeatures
from megatron_distill.train.teachers.answer_ring import AnswerRing
from megatron_distill.train.teachers.answer_ways import Columns
from megatron_distill.train.teachers.answers import (
    COMMAND_TAG,
    HEAD_TAG,
    AnswerPlan,
    RequestKind,
    RoundRequest,
)
from megatron_distill.train.teachers.attention_heads import FeatureKind, joined_parts
from megatron_distill.train.teachers.units import Message

__all__ = [
    "AnswerReader",
    "Asking",
    "HeldOutAnswers",
    "OwnRanksTeacher",
    "RemoteHead",
]


@dataclass
class Asking:
    """Sends the commands of the student's first rank, and counts the rounds on every rank.

    `ring` is that of this rank, None where its stage needs no output.
    """

    plan: AnswerPlan
    bridge: Bridge
    ring: AnswerRing | None
    _turn: int = 0
    _free: deque[int] = field(default_factory=deque)
    _under_way: list[tuple[Tensor, list[Sending]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free.extend(range(self.plan.blocks))

    def ask(self, request: RequestKind, number: int) -> RoundRequest:
        """Open a round on all ranks.

        Collective: the bridge, 32 bytes from the student's first rank to each rank of the teacher.
        """
        self._turn += 1
        command = RoundRequest(request, number, self._turn, self._free.popleft())
        if self.ring is not None:
            self.ring.open(command)
        self._send(command)
        return command

    def close(self, command: RoundRequest) -> None:
        """Free the slots of a round that is not read any more."""
        if self.ring is not None:
            self.ring.close(command)
        self._free.append(command.block)

    def evaluate(self) -> None:
        """Let the teacher evaluate the tasks that it is sent; see `train.evaluation.elsewhere`.

        Collective: as `ask`.
        """
        self._send(RoundRequest(RequestKind.EVALUATE))

    def stop(self) -> None:
        """Let the teacher end, and wait until it has the message."""
        self._send(RoundRequest(RequestKind.STOP))
        for _, sending in self._under_way:
            for one in sending:
                one.wait()
        if self.ring is not None:
            self.ring.stop()

    def _send(self, command: RoundRequest) -> None:
        if self.bridge.rank != 0:
            return
        if self.bridge.is_asked_to_stop:
            request_termination()
        # A message of the last but one round has arrived: its answers have.
        del self._under_way[: -2 * self.plan.blocks]
        tensor = command.tensor()
        ranks = self.plan.teacher.ranks
        sending = [self.bridge.send(tensor, rank, tag=COMMAND_TAG) for rank in ranks]
        self._under_way.append((tensor, sending))


@dataclass
class RemoteHead:
    """The output head of a teacher elsewhere: this rank's rows of the student's vocabulary shard.

    It is empty until `OwnRanksTeacher.start`; None off the last stage.

    Attributes:
        layout: of the rows in a loss between two vocabularies; None: as they arrive.
    """

    head_weight: Tensor | None
    architecture: Architecture
    groups: Groups
    layout: TeacherLayout | None = None

    def has_arrived(self) -> None:
        """Put the rows in the layout of the loss.

        Collective: tensor group, one all-to-all of the rows where there is a layout.
        """
        if self.layout is not None and self.head_weight is not None:
            self.head_weight = self.layout.rows(self.head_weight)


@dataclass(frozen=True)
class AnswerReader:
    """Makes the tensors of an answer on this rank the signal of a micro-batch.

    `signal_of`: of the answer for the losses between logits.
    """

    plan: AnswerPlan
    signal_of: Callable[[Sequence[Tensor], Batch], Signal]

    def __call__(self, columns: Columns, batch: Batch) -> Signal | WithFeatures | None:
        """Return the signal; with features on each stage that receives some."""
        own: list[Tensor] = []
        layers: list[tuple[tuple[FeatureKind, int], Tensor]] = []
        for number, tensor in columns.items():
            output = self.plan.columns[number][0]
            if output.layer is None:
                own.append(tensor)
            else:
                layers.append(((output.kind, output.layer), tensor))
        signal = self.signal_of(own, batch) if own else None
        if not self.plan.has_features:
            return signal
        return WithFeatures(signal, joined_parts(layers))


class OwnRanksTeacher:
    """A teacher on ranks of its own; a `Teacher` of the training steps, in order.

    The rounds of the next `steps_ahead` steps are under way while a step is in use. On a stage that
    receives answers one is waited for when it is taken; `reader` makes it a signal.

    Attributes:
        head: the teacher's.
        shared_memory: of the slots, closed at the start; None without it.
    """

    def __init__(
        self,
        asking: Asking,
        head: RemoteHead,
        reader: AnswerReader,
        *,
        head_parts: Sequence[Message],
        last_step: int,
        alone: LoneFailure,
        shared_memory: BinaryIO | None = None,
    ) -> None:
        self._asking = asking
        self.head = head
        self._reader = reader
        self._head_parts = head_parts
        self._last_step = last_step
        self._alone = alone
        self._step = 0
        self._used: RoundRequest | None = None
        self._ahead: deque[RoundRequest] = deque()
        self._shared_memory = shared_memory
        self._has_started = False
        self._routes = asking.plan.routes

    @property
    def routes(self) -> tuple[str, ...]:
        """The pairs of a sending and a receiving rank in words, in order."""
        name = self._asking.bridge.roles.name
        return tuple(f"{name(source)} to {name(to)}" for source, to in self._routes)

    def received_bytes(self) -> list[int]:
        """Return the bytes of this step's answers to this rank, one number for each of `routes`."""
        ring, rank = self._asking.ring, self._asking.bridge.rank
        if ring is None or self._used is None:
            return [0] * len(self._routes)
        found = ring.received_bytes(self._used)
        return [found[source] if to == rank else 0 for source, to in self._routes]

    @property
    def ranks(self) -> int:
        """Number of ranks that run the teacher."""
        return len(self._asking.plan.teacher.ranks)

    @property
    def step_bytes(self) -> int:
        """Bytes that the teacher sends in a step with samples of it in each unit, headers aside."""
        return sum(self._asking.plan.step_bytes().values())

    @property
    def held_bytes(self) -> int:
        """Bytes of the slots and of the teacher's head on this rank."""
        ring = self._asking.ring
        head = 0 if self.head.head_weight is None else self.head.head_weight.nbytes
        return head + (0 if ring is None else ring.slot_bytes)

    def start(self, *, steps_done: int, last_step: int) -> None:
        """Receive the head, and begin after the steps done; the teacher's ranks are ready.

        Collective: that of `connect_routes`; the bridge, the rows of the head to each rank of the
        student's last stage; then that of `RemoteHead.has_arrived`.
        """
        self._step, self._last_step, self._has_started = steps_done, last_step, True
        self._alone.progress.begin(steps_done + 1)
        if self._shared_memory is not None:
            self._shared_memory.close()  # all sides have mapped it
        if self._asking.ring is not None:
            self._asking.ring.connect()
        weight = self.head.head_weight
        if weight is None:
            return
        weight.zero_()
        bridge = self._asking.bridge
        held = [
            (torch.empty_like(weight[part.received], device="cpu"), part)
            for part in self._head_parts
            if part.destination == bridge.rank
        ]
        receiving = [bridge.receive(rows, part.source, tag=HEAD_TAG) for rows, part in held]
        for one, (rows, part) in zip(receiving, held, strict=True):
            one.wait()
            weight[part.received] = rows.to(weight.device)
        self.head.has_arrived()

    def signals(self, batches: Sequence[Batch]) -> Signals:
        """Return the signals of the next training step; None on a stage that receives none.

        Collective: that of `Asking.ask`, for the steps that are due.
        """
        self.release()
        self._step += 1
        self._alone.progress.begin(self._step)
        last = min(self._step + self._asking.plan.steps_ahead, self._last_step)
        for number in range(self._step + len(self._ahead), last + 1):
            self._ahead.append(self._asking.ask(RequestKind.STEP, number))
        self._used = self._ahead.popleft()
        return self.answers(self._used, batches)

    def release(self) -> None:
        """Let go of the signals returned last."""
        if self._used is not None:
            self._asking.close(self._used)
            self._used = None

    def evaluate(self) -> None:
        """Let the teacher evaluate tasks before the first step, as `Asking.evaluate`."""
        self._asking.evaluate()

    def held_out(self, batches: int) -> HeldOutAnswers:
        """Return the teacher of so many held-out batches."""
        return HeldOutAnswers(self, batches)

    def ask_held_out(self, number: int, batches: Sequence[Batch]) -> Signals:
        """Return the signals of a held-out batch, counted from 1."""
        self.release()
        self._used = self._asking.ask(RequestKind.HELD_OUT, number)
        return self.answers(self._used, batches)

    def answers(self, command: RoundRequest, batches: Sequence[Batch]) -> Signals:
        """Return the signals of a round."""
        ring = self._asking.ring
        if ring is None:
            return [None] * len(batches)

        def taken(number: int) -> Signal | WithFeatures | None:
            columns = ring.take(command, number, batches[number])
            return self._reader(columns, batches[number])

        return OnDemand(len(batches), taken)

    def close(self) -> None:
        """End the teacher's ranks, if they have started; waits for the answers under way."""
        if not self._has_started:
            if self._asking.ring is not None:
                self._asking.ring.stop()
            return
        self.release()
        for command in self._ahead:
            self._asking.close(command)
        self._asking.stop()


class HeldOutAnswers:
    """A `Teacher` of the held-out batches, which are asked in their order, again and again."""

    def __init__(self, teacher: OwnRanksTeacher, batches: int) -> None:
        self._teacher = teacher
        self._batches = batches
        self._next = 0

    def signals(self, batches: Sequence[Batch]) -> Signals:
        """Return the signals of the next held-out batch.

        Collective: that of `Asking.ask`.
        """
        number = self._next + 1
        self._next = number % self._batches
        return self._teacher.ask_held_out(number, batches)
