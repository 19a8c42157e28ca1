"""The student's side of a teacher on ranks of its own: it asks, and receives into fixed slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

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
from megatron_distill.train.teachers.answer_ways import (
    AnswerWay,
    Columns,
    Slots,
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
    Command,
    Part,
    Request,
    token_hash,
)
from megatron_distill.train.teachers.attention_heads import FeatureKind, joined_parts
from megatron_distill.train.teachers.units import Message

__all__ = [
    "AnswerReader",
    "AnswerRing",
    "Asking",
    "HeldOutAnswers",
    "OwnRanksTeacher",
    "RemoteHead",
]


@dataclass(frozen=True)
class _Place:
    """A unit's place in a round, and the headers of its answer once they are there."""

    command: Command
    micro_batch: int
    unit: int
    arrived: Future[dict[int, AnswerHeader]]


class AnswerRing:
    """Slots for the answers of a few rounds on one rank; a thread receives into them in order.

    The memory is allocated once: `AnswerPlan.slot_bytes`. A block of slots is free again when its
    round is closed, and only then a further round is opened.
    """

    def __init__(
        self,
        plan: AnswerPlan,
        way: AnswerWay,
        bridge: Bridge,
        *,
        replica: int,
        device: torch.device,
        alone: LoneFailure,
        slots: Slots,
    ) -> None:
        self._plan = plan
        self._way = way
        self._bridge = bridge
        self._replica = replica
        self._device = device
        self._alone = alone
        self.slots = slots
        self._places: dict[tuple[int, int], _Place] = {}
        self._compared: set[tuple[int, int]] = set()
        self._work: SimpleQueue[tuple[_Place, torch.cuda.Event | None] | None] = SimpleQueue()
        self._thread = Thread(target=self._receive_all, name="answers", daemon=True)
        self._thread.start()

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        return self._plan.slot_bytes(self._bridge.rank)

    def connect(self) -> None:
        """See `connect_routes`; before the first round."""
        connect_routes(self._plan, self._way, self._bridge)

    def open(self, command: Command) -> None:
        """Expect the answers of a round, whose block is free."""
        free: torch.cuda.Event | None = None
        if self._device.type == "cuda":  # work that reads the block's last round comes first
            free = torch.cuda.Event()
            free.record()
        for number in range(self._plan.units.micro_batches):
            unit = self._plan.units.of_student(number, self._replica)
            place = _Place(command, number, unit, Future())
            self._places[command.turn, number] = place
            self._work.put((place, free))

    def close(self, command: Command) -> None:
        """Wait until a round has arrived, and let its block be used again."""
        for number in range(self._plan.units.micro_batches):
            self._compared.discard((command.turn, number))
            self._arrived(self._places.pop((command.turn, number)))

    def take(self, command: Command, micro_batch: int, batch: Batch) -> Columns:
        """Return the tensors of a unit's answer by number, in its slot, once they are there.

        Raises AnswerError: it is late, missing, of other tokens, or not finite.
        """
        if (command.turn, micro_batch) not in self._compared:  # taps take an answer several times
            self._compare(self._places[command.turn, micro_batch], batch)
            self._compared.add((command.turn, micro_batch))
        return self.slots[command.block][micro_batch]

    def _compare(self, place: _Place, batch: Batch) -> None:
        """Wait for the headers of an answer, and compare them with the unit."""
        self._alone.progress.unit = place.unit
        command, headers = place.command, self._arrived(place)
        expected = token_hash(batch)
        for source, header in headers.items():
            where = f"unit {place.unit} of {command.place} from {self._route(source)}"
            if (header.turn, header.unit) != (command.turn, place.unit):
                raise AnswerError(
                    f"{where} is an answer for unit {header.unit} of turn {header.turn}: the two "
                    "sides count differently"
                )
            if header.has_failed:
                raise AnswerError(f"{where} is missing: {self._bridge.failure(source)}")
            if header.is_left_out:
                raise AnswerError(
                    f"{where} is missing: no sample of it is that teacher's there, and here one of "
                    f"{batch.on_host.sample_ids_b.tolist()} is; teacher and student read different "
                    "data, so give all machines the same files"
                )
            if header.tokens != expected:
                raise AnswerError(
                    f"{where} is for other tokens than this rank's: their hash is "
                    f"{header.tokens:014x}, here {expected:014x}; teacher and student read "
                    "different data, so give all machines the same files"
                )
            if header.non_finite:
                raise AnswerError(
                    f"{where} has {header.non_finite} values that are not finite: look at the "
                    "teacher's weights and precision, and at samples "
                    f"{batch.on_host.sample_ids_b.tolist()}"
                )

    def stop(self) -> None:
        """End the thread once every expected answer is there."""
        self._work.put(None)
        self._thread.join()

    def _arrived(self, place: _Place) -> dict[int, AnswerHeader]:
        limit = self._bridge.timeout_seconds
        try:
            return place.arrived.result(timeout=limit)
        except FutureTimeout:
            routes = ", ".join(self._route(source) for source in self._sources(place))
            raise AnswerError(
                f"no answer for unit {place.unit} of {place.command.place} within "
                f"runtime.timeout_seconds = {limit:g} s; route {routes}"
            ) from None

    def _sources(self, place: _Place) -> dict[int, list[Part]]:
        return self._plan.received(place.unit, self._bridge.rank)

    def _route(self, source: int) -> str:
        name = self._bridge.roles.name
        return f"{name(source)} to {name(self._bridge.rank)}"

    def _receive_all(self) -> None:
        try:
            with self._alone, own_stream(self._device):
                while (asked := self._work.get()) is not None:
                    place, free = asked
                    place.arrived.set_result(self._receive(place, free))
        finally:  # in a process that goes on, `take` fails too
            for place in list(self._places.values()):
                if not place.arrived.done():
                    place.arrived.set_exception(ConnectionError("the answers have ended"))

    def _receive(self, place: _Place, free: torch.cuda.Event | None) -> dict[int, AnswerHeader]:
        sources = self._sources(place)
        sent = {source: AnswerHeader.empty() for source in sources}
        receiving = [
            self._bridge.receive(header, source, tag=HEADER_TAG) for source, header in sent.items()
        ]
        for one in receiving:
            one.wait()
        if free is not None:
            free.synchronize()
        slot = self.slots[place.command.block][place.micro_batch]
        headers = {source: AnswerHeader.of(header) for source, header in sent.items()}
        for source, parts in sources.items():
            if headers[source].has_rows:
                self._way.receive(slot, parts, source)
        if any(header.asks_to_stop for header in headers.values()):
            request_termination()
        return headers


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

    def ask(self, request: Request, number: int) -> Command:
        """Open a round on all ranks.

        Collective: the bridge, 32 bytes from the student's first rank to each rank of the teacher.
        """
        self._turn += 1
        command = Command(request, number, self._turn, self._free.popleft())
        if self.ring is not None:
            self.ring.open(command)
        self._send(command)
        return command

    def close(self, command: Command) -> None:
        """Free the slots of a round that is not read any more."""
        if self.ring is not None:
            self.ring.close(command)
        self._free.append(command.block)

    def stop(self) -> None:
        """Let the teacher end, and wait until it has the message."""
        self._send(Command(Request.STOP))
        for _, sending in self._under_way:
            for one in sending:
                one.wait()
        if self.ring is not None:
            self.ring.stop()

    def _send(self, command: Command) -> None:
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
        shared_file: of the slots, removed at the start; None without one.
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
        shared_file: Path | None = None,
    ) -> None:
        self._asking = asking
        self.head = head
        self._reader = reader
        self._head_parts = head_parts
        self._last_step = last_step
        self._alone = alone
        self._step = 0
        self._used: Command | None = None
        self._ahead: deque[Command] = deque()
        self._shared_file = shared_file
        self._has_started = False

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
        if self._shared_file is not None:
            # All sides have mapped it: without a name its memory ends with the processes.
            self._shared_file.unlink(missing_ok=True)
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
            self._ahead.append(self._asking.ask(Request.STEP, number))
        self._used = self._ahead.popleft()
        return self.answers(self._used, batches)

    def release(self) -> None:
        """Let go of the signals returned last."""
        if self._used is not None:
            self._asking.close(self._used)
            self._used = None

    def held_out(self, batches: int) -> HeldOutAnswers:
        """Return the teacher of so many held-out batches."""
        return HeldOutAnswers(self, batches)

    def ask_held_out(self, number: int, batches: Sequence[Batch]) -> Signals:
        """Return the signals of a held-out batch, counted from 1."""
        self.release()
        self._used = self._asking.ask(Request.HELD_OUT, number)
        return self.answers(self._used, batches)

    def answers(self, command: Command, batches: Sequence[Batch]) -> Signals:
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
