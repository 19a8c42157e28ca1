"""Rounds of answers through slots that two processes have mapped, on a CPU and on GPUs.

Each reader is slower than its senders, which are only held up by what the slots' ways wait for.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.config import TransferConfig
from megatron_distill.runtime.bridge import Bridge, Sending, memory_key
from megatron_distill.runtime.launch import Device
from megatron_distill.runtime.lone_failure import LoneFailure, host_key
from megatron_distill.runtime.roles import Roles
from megatron_distill.runtime.shared_memory import memory_name, shared_path
from megatron_distill.train.assemble.answers.way import student_way, teacher_way
from megatron_distill.train.teachers.answer_ring import AnswerRing
from megatron_distill.train.teachers.answer_ways import AnswerWay, Columns, SlotPlace, Slots
from megatron_distill.train.teachers.answers import (
    AnswerPlan,
    AnswerRows,
    Column,
    Output,
    RequestKind,
    RoundRequest,
)
from megatron_distill.train.teachers.device_slots import (
    CudaIpcWay,
    InterprocessEvent,
    shared_events,
)
from megatron_distill.train.teachers.mapped_slots import (
    Credits,
    SharedMemoryWay,
    create_shared,
    map_shared,
    slots_of,
)
from megatron_distill.train.teachers.serving import AnswerSender
from megatron_distill.train.teachers.units import Grid, Units
from tests.support.batches import batch_of

ROUNDS = 5
WORLD = 4
SECONDS = 60.0
EVENTS = 512  # places for the events of each rank
LENGTH, WIDTH = 4, 3


def crossing_plan(*, steps_ahead: int = 0) -> AnswerPlan:
    """A student and a teacher of two stages; both stages of each exchange with both."""
    hidden = Column("hidden", torch.float32, (WIDTH,))
    layers = ((None, 1, 1), (1, 0, 0), (1, 0, 1), (2, 1, 0))
    return AnswerPlan(
        Units(micro_batches=2, student_replicas=1, teacher_replicas=1),
        teacher=Grid(1, 1, 2, 1, sequence=False, ranks=(2, 3)),
        student=Grid(1, 1, 2, 1, sequence=False, ranks=(0, 1)),
        length=LENGTH,
        sequences=1,
        outputs=tuple(Output(*one, (hidden,)) for one in layers),
        steps_ahead=steps_ahead,
    )


def bridge_of(rank: int, world: int) -> Bridge:
    """The bridge over the default group, of as many ranks of the student as of the teacher."""
    store, group = dist.distributed_c10d._get_default_store(), dist.group.WORLD
    assert group is not None
    store.set(host_key(rank), socket.gethostname())
    store.set(memory_key(rank), memory_name())
    roles = Roles(world, (("teacher", world // 2),))
    return Bridge(rank, roles, store, group, lambda _: nullcontext(), SECONDS)


def command_of(plan: AnswerPlan, turn: int) -> RoundRequest:
    return RoundRequest(RequestKind.STEP, turn, turn, (turn - 1) % plan.blocks)


def value_of(turn: int, unit: int, number: int) -> float:
    return 100.0 * turn + 10.0 * unit + number


def send_rounds(plan: AnswerPlan, way: AnswerWay, bridge: Bridge, device: torch.device) -> None:
    """Send the answers of all rounds as fast as the ways allow."""
    sender = AnswerSender(plan, way, bridge, device=device, alone=LoneFailure())
    sender.connect()
    stage = plan.teacher.stage(bridge.rank)
    numbers = [n for n, (output, _) in enumerate(plan.columns) if output.source == stage]
    for turn in range(1, ROUNDS + 1):
        for unit in range(plan.units.micro_batches):
            if device.type == "cuda":
                torch.cuda._sleep(2_000_000)
            columns = {
                number: torch.full((LENGTH, 1, WIDTH), value_of(turn, unit, number), device=device)
                for number in numbers
            }
            sender.put(command_of(plan, turn), unit, columns, batch_of(1, LENGTH))
            del columns  # its memory may be used anew once the sender allows it
    sender.stop()


class Reader(Protocol):
    """Runs what reads a slot, as late as its device would."""

    def run(self, work: Callable[[], None]) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class SlowHost:
    """Reads at once, but the second rank of the student takes its time."""

    rank: int

    def run(self, work: Callable[[], None]) -> None:
        time.sleep(0.1 * self.rank)
        work()

    def finish(self) -> None:
        pass


@dataclass(frozen=True)
class BusyGpu:
    """The host goes on while the GPU has not come to the read."""

    def run(self, work: Callable[[], None]) -> None:
        torch.cuda._sleep(20_000_000)
        work()

    def finish(self) -> None:
        torch.cuda.synchronize()


def read_rounds(
    plan: AnswerPlan, way: AnswerWay, slots: Slots, bridge: Bridge, device: torch.device,
    reader: Reader,
) -> list[bool]:  # fmt: skip
    """Take the answers of all rounds; returns for each tensor whether it had its values."""
    ring = AnswerRing(
        plan, way, bridge, replica=0, device=device, alone=LoneFailure(), slots=slots
    )  # fmt: skip
    ring.connect()
    same: list[Tensor] = []

    def compare(tensor: Tensor, value: float) -> None:
        same.append((tensor == value).all())

    opened = 0
    for turn in range(1, ROUNDS + 1):
        while opened < min(turn + plan.steps_ahead, ROUNDS):
            opened += 1
            ring.open(command_of(plan, opened))
        for unit in range(plan.units.micro_batches):
            columns = ring.take(command_of(plan, turn), unit, batch_of(1, LENGTH))
            for number, tensor in columns.items():
                value = value_of(turn, unit, number)
                reader.run(lambda tensor=tensor, value=value: compare(tensor, value))
        ring.close(command_of(plan, turn))
    reader.finish()
    ring.stop()
    return [bool(one) for one in same]


def exchange(rank: int, world: int, steps_ahead: int, device: torch.device) -> list[bool]:
    """Move the rounds by `transfer.backend: ipc` as a run does; returns those of `read_rounds`."""
    bridge, plan = bridge_of(rank, world), crossing_plan(steps_ahead=steps_ahead)
    transfer = TransferConfig(backend="ipc")
    kind = "cuda" if device.type == "cuda" else "cpu"
    own = Device(kind, "gloo", device, bridge=bridge)
    if bridge.is_teacher:
        with ExitStack() as resources:
            sending = teacher_way(transfer, plan, own, resources)
            send_rounds(plan, sending, bridge, device)
        mapped = sending.shared if isinstance(sending, CudaIpcWay) else sending
        assert isinstance(mapped, SharedMemoryWay)
        assert not mapped.slots, "the mapping outlives its sender"
        return []
    with ExitStack() as resources:
        way, slots, _ = student_way("ipc", transfer, plan, own, resources)
        reader: Reader = BusyGpu() if kind == "cuda" else SlowHost(rank)
        return read_rounds(plan, way, slots, bridge, device, reader)


@dataclass(frozen=True)
class QueuedStream:
    """Runs work in its order, later; it stands for the stream of a GPU."""

    seconds: float  # of a read or a copy
    waiting: SimpleQueue[Callable[[], None] | None] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        Thread(target=self._run_all, daemon=True).start()

    def _run_all(self) -> None:
        while (work := self.waiting.get()) is not None:
            work()

    def run(self, work: Callable[[], None]) -> None:
        """A read; see `Reader`."""
        self.waiting.put(lambda: time.sleep(self.seconds))
        self.waiting.put(work)

    def finish(self) -> None:
        """Wait until all work so far has been done."""
        done: SimpleQueue[None] = SimpleQueue()
        self.waiting.put(lambda: done.put(None))
        done.get(timeout=SECONDS)


@dataclass(frozen=True)
class QueuedEvent:
    """An event by CUDA's rules: a wait is for what was recorded before it, if anything was."""

    number: int
    counts: Tensor  # of each event: times recorded, and times that the stream came to it
    stream: QueuedStream
    is_blind: bool

    def record(self) -> None:
        """See `InterprocessEvent`."""
        self.counts[self.number, 0] += 1
        times = int(self.counts[self.number, 0])
        self.stream.waiting.put(lambda: self._reached(times))

    def _reached(self, times: int) -> None:
        self.counts[self.number, 1] = times

    def wait(self) -> None:
        """See `InterprocessEvent`."""
        times = int(self.counts[self.number, 0])
        if times and not self.is_blind:
            self.stream.waiting.put(lambda: self._until(times))

    def _until(self, times: int) -> None:
        deadline = time.monotonic() + SECONDS
        while int(self.counts[self.number, 1]) < times and time.monotonic() < deadline:
            time.sleep(0.001)

    def ipc_handle(self) -> bytes:
        """See `InterprocessEvent`."""
        return self.number.to_bytes(64, "little")


@dataclass
class QueuedEvents:
    """Events whose counts are in a file that all processes have mapped."""

    counts: Tensor
    stream: QueuedStream
    next_number: int
    is_blind: bool

    def make(self) -> InterprocessEvent:
        """See `EventMaker`."""
        self.next_number += 1
        return QueuedEvent(self.next_number - 1, self.counts, self.stream, self.is_blind)

    def open(self, handle: bytes) -> InterprocessEvent:
        """See `EventMaker`."""
        number = int.from_bytes(handle, "little")
        return QueuedEvent(number, self.counts, self.stream, self.is_blind)


@dataclass(frozen=True)
class QueuedCopies(SharedMemoryWay):
    """Copies on a stream, as from one GPU to another."""

    stream: QueuedStream

    def send(self, columns: Columns, parts: list[AnswerRows], to: SlotPlace) -> list[Sending]:  # type: ignore[override]
        self.stream.run(lambda: self._copy(columns, parts, to))
        return []

    def _copy(self, columns: Columns, parts: list[AnswerRows], to: SlotPlace) -> None:
        SharedMemoryWay.send(self, columns, parts, to)


def exchange_on_streams(
    rank: int, world: int, steps_ahead: int, folder: Path, slow: str, blind: bool
) -> list[bool]:
    """Move the rounds as between GPUs: copies, reads and events on streams of this module.

    slow: "reads" or "copies"; the others take no time. blind: events are not waited for.
    """
    bridge, plan = bridge_of(rank, world), crossing_plan(steps_ahead=steps_ahead)
    stream = QueuedStream(0.02 if (slow == "copies") == bridge.is_teacher else 0.0)
    counts = torch.from_file(
        str(folder / "events"), shared=True, size=2 * EVENTS * world, dtype=torch.int64
    ).view(-1, 2)
    events = QueuedEvents(counts, stream, EVENTS * rank, blind)
    credits = Credits(bridge, rounds=plan.blocks)
    numbers = range(len(plan.columns))
    if not bridge.is_teacher:
        own = [number for number in numbers if number in plan.slot_rows(rank)]
        tensors, memory = create_shared(plan, rank, own)
        slots = slots_of(plan, tensors)
        free, handles = shared_events(events, plan.blocks)
        bridge.publish(f"slots/{rank}", [str(shared_path(memory)), handles])
        shared = QueuedCopies({rank: slots}, credits, stream)
        way = CudaIpcWay(shared, plan, bridge, events, {rank: free})
        with memory:
            return read_rounds(plan, way, slots, bridge, torch.device("cpu"), stream)
    mapped: dict[int, Slots] = {}
    opened: dict[int, list[InterprocessEvent]] = {}
    for receiver in plan.student.ranks:
        path, handles = bridge.published(f"slots/{receiver}")
        opened[receiver] = [events.open(bytes.fromhex(handle)) for handle in handles]
        own = [number for number in numbers if number in plan.slot_rows(receiver)]
        tensors = map_shared(Path(path), plan, receiver, own)
        mapped[receiver] = slots_of(plan, tensors)
    shared = QueuedCopies(mapped, credits, stream)
    way = CudaIpcWay(shared, plan, bridge, events, opened)
    send_rounds(plan, way, bridge, torch.device("cpu"))
    stream.finish()
    return []
