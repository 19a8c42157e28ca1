"""Answers on a GPU: uses of slots and of answers are ordered, and every wait is needed for that.

The student's and the teacher's real halves exchange a few steps on a device whose streams and
threads are recorded, by each way. Then once more for each wait, as if the program did not have it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.models.architecture import Architecture
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.bridge import Bridge
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.lone_failure import LoneFailure
from megatron_distill.runtime.roles import Roles
from megatron_distill.train.teachers import answer_ring, serving
from megatron_distill.train.teachers.answer_ring import AnswerRing
from megatron_distill.train.teachers.answer_ways import AnswerWay, HostWay, NcclWay, private_slots
from megatron_distill.train.teachers.answers import (
    COMMAND_TAG,
    AnswerPlan,
    Column,
    Output,
    RequestKind,
    RoundRequest,
)
from megatron_distill.train.teachers.device_slots import CudaIpcWay
from megatron_distill.train.teachers.mapped_slots import Credits, SharedMemoryWay
from megatron_distill.train.teachers.own_ranks import (
    AnswerReader,
    Asking,
    OwnRanksTeacher,
    RemoteHead,
)
from megatron_distill.train.teachers.serving import AnswerSender
from megatron_distill.train.teachers.units import Grid, Units
from tests.fake_cuda.messages import (
    SECONDS,
    DeviceMessages,
    HostMessages,
    Post,
    recorded_threads,
    run_roles,
)
from tests.fake_cuda.races import Memory, Races
from tests.fake_cuda.streams import CPU, CUDA, RecordedEvents, RecordedTensor, recorded_cuda
from tests.support.batches import batch_of

LENGTH, WIDTH, UNITS = 4, 3, 2
STEPS, LAST = 3, 4  # the student stops with a step under way
ROLES = Roles(4, (("teacher", 2),))
HIDDEN = Column("hidden", torch.float32, (WIDTH,))
# Each rank of the student has all rows, half of them from each rank of the teacher.
PLAN = AnswerPlan(
    Units(micro_batches=UNITS, student_replicas=1, teacher_replicas=1),
    teacher=Grid(2, 1, 1, 1, sequence=True, ranks=(2, 3)),
    student=Grid(2, 1, 1, 1, sequence=False, ranks=(0, 1)),
    length=LENGTH,
    sequences=1,
    outputs=(Output(None, 0, 0, (HIDDEN,)), Output(1, 0, 0, (HIDDEN,))),
    steps_ahead=1,
)


def value_of(step: int, unit: int, number: int) -> float:
    return 100.0 * step + 10.0 * unit + number


class Receiver:
    """A rank of the student, and the memory of its slots."""

    def __init__(self, races: Races, rank: int, events: RecordedEvents, records: bool) -> None:
        self.name = ROLES.name(rank)
        # Records of a top-k are read by the host.
        self.places = {0: CPU if records else CUDA, 1: CUDA}
        self.memory = {
            number: Memory(races, f"{self.name} stream" if place == CUDA else None, "a slot")
            for number, place in self.places.items()
        }
        self.numbers = private_slots(PLAN, rank, dict.fromkeys(self.places, CPU))
        self.free = [events.make() for _ in range(PLAN.blocks)]

    def slots(self, *mapping: Memory) -> Any:
        """The slots in its own process, or as another one has mapped them."""

        def of(number: int, tensor: Tensor) -> Tensor:
            place, memory = self.places[number], self.memory[number]
            return RecordedTensor.of(tensor, place, memory, *mapping)

        return [
            [{number: of(number, tensor) for number, tensor in slot.items()} for slot in block]
            for block in self.numbers
        ]


class Exchange:
    """A student and a teacher of two ranks each, in threads, and the answers between them."""

    def __init__(self, backend: str, blind: Collection[str]) -> None:
        self.backend, self.races = backend, Races(blind)
        self.post, self.events = Post(self.races), RecordedEvents(self.races)
        self.receivers = {
            rank: Receiver(self.races, rank, self.events, backend == "ipc, records")
            for rank in PLAN.student.ranks
        }
        self.read: list[tuple[Tensor, float]] = []

    def run(self) -> None:
        """Train, while the teacher answers."""
        works = {ROLES.name(rank): partial(self.train, rank) for rank in PLAN.student.ranks}
        works |= {ROLES.name(rank): partial(self.serve, rank) for rank in PLAN.teacher.ranks}
        with recorded_cuda(self.races), recorded_threads(self.races, (answer_ring, serving)):
            run_roles(self.races, works)

    def bridge(self, rank: int) -> Bridge:
        group = cast(dist.ProcessGroup, HostMessages(self.post, rank))
        return Bridge(rank, ROLES, dist.HashStore(), group, lambda _: nullcontext(), SECONDS)

    def way(self, bridge: Bridge, slots: dict[int, Any]) -> AnswerWay:
        if self.backend == "gloo":
            return HostWay(bridge)
        if self.backend == "nccl":
            return NcclWay(cast(dist.ProcessGroup, DeviceMessages(self.post, bridge.rank)), CUDA)
        shared = SharedMemoryWay(slots, Credits(bridge, rounds=PLAN.blocks))
        free = {rank: self.receivers[rank].free for rank in slots}
        return CudaIpcWay(shared, PLAN, bridge, self.events, free)

    def train(self, rank: int) -> None:
        """The main thread of a rank of the student."""
        bridge, alone, own = self.bridge(rank), LoneFailure(), self.receivers[rank]
        slots = own.slots()
        ring = AnswerRing(
            PLAN, self.way(bridge, {rank: slots}), bridge, replica=0, device=CUDA, alone=alone,
            slots=slots,
        )  # fmt: skip
        teacher = OwnRanksTeacher(
            Asking(PLAN, bridge, ring),
            RemoteHead(None, cast(Architecture, None), cast(Groups, None)),
            AnswerReader(PLAN, first_column),
            head_parts=(),
            last_step=LAST,
            alone=alone,
        )
        teacher.start(steps_done=0, last_step=LAST)
        for step in range(1, STEPS + 1):
            for unit, signal in enumerate(teacher.signals([batch_of(1, LENGTH)] * UNITS)):
                for number, tensor in enumerate((signal.signal, *signal.features.values())):
                    found: Any = tensor + 0
                    self.read.append((found.inner, value_of(step, unit, number)))
        teacher.close()
        for memory in own.memory.values():
            memory.free()

    def serve(self, rank: int) -> None:
        """The main thread of a rank of the teacher."""
        bridge, races = self.bridge(rank), self.races
        mapping = Memory(races, f"{ROLES.name(rank)} stream", "a mapping of slots")
        slots = {to: receiver.slots(mapping) for to, receiver in self.receivers.items()}
        way, alone = self.way(bridge, slots), LoneFailure()
        sender = AnswerSender(PLAN, way, bridge, device=CUDA, alone=alone)
        sender.connect()
        word = torch.empty(4, dtype=torch.int64)
        while True:
            bridge.receive(word, 0, tag=COMMAND_TAG).wait()
            command = RoundRequest.of(word)
            if command.request == RequestKind.STOP:
                break
            for unit in range(UNITS):
                sender.put(command, unit, self.answer(command.number, unit), batch_of(1, LENGTH))
        sender.stop()
        mapping.free()

    def answer(self, step: int, unit: int) -> dict[int, Tensor]:
        values = (torch.full((LENGTH // 2, 1, WIDTH), value_of(step, unit, n)) for n in range(2))
        return {
            number: RecordedTensor.new(self.races, one, CUDA, "an answer")
            for number, one in enumerate(values)
        }


def first_column(columns: Sequence[Tensor], batch: Batch) -> Any:
    return columns[0]


@cache
def exchanged(backend: str, *blind: str) -> Exchange:
    found = Exchange(backend, blind)
    found.run()
    return found


# By way, the waits without which there is a race, and over which memory.
SLOT, ANSWER, RESULT, MAPPING = "a slot", "an answer", "a result", "a mapping of slots"
OF_IPC = {
    "answer_ring.py:_receive, message": SLOT,  # the header follows the record of an event
    "answer_ring.py:_receive_all, stream": SLOT,  # no sender writes once it is freed
    "answer_ring.py:take, event": SLOT,
    "device_slots.py:receive, event": SLOT,
    "device_slots.py:send, event": SLOT,  # before it is overwritten
    "device_slots.py:send, record_stream": ANSWER,
    "mapped_slots.py:claim, message": SLOT,  # the credit
    "serving.py:_send, event": ANSWER,
    "serving.py:_send_all, stream": MAPPING,
}
NEEDED = {
    "gloo": {
        "answer_ring.py:_receive, synchronize": SLOT,
        "answer_ways.py:receive, copy": RESULT,  # in host memory, which is free then
        "answer_ways.py:send, copy": ANSWER,
        "serving.py:_send, synchronize": RESULT,
    },
    "nccl": {
        "answer_ring.py:_receive, synchronize": SLOT,
        "answer_ways.py:_wait_for_stream, stream": ANSWER,
        "answer_ways.py:connect, event": "a zero",
        "answer_ways.py:receive, event": SLOT,
        "answer_ways.py:wait, event": ANSWER,
        "serving.py:_send, synchronize": RESULT,
    },
    "ipc": {**OF_IPC, "serving.py:_send, synchronize": RESULT},
    # The copy to the host waits for what the other host reads, and for the number of values.
    "ipc, records": {**OF_IPC, "mapped_slots.py:send, copy": SLOT},
}
# Of waits by a message, those after which another process's memory is used.
MESSAGES = {"answer_ring.py:_receive, message", "mapped_slots.py:claim, message"}


@pytest.mark.parametrize("backend", NEEDED)
def test_uses_of_slots_and_answers_are_ordered(backend: str) -> None:
    found = exchanged(backend)
    assert not found.races.found
    assert len(found.read) == 2 * STEPS * UNITS * 2
    assert all(bool((tensor == value).all()) for tensor, value in found.read)


@pytest.mark.parametrize(("backend", "wait"), [(b, wait) for b in NEEDED for wait in NEEDED[b]])
def test_without_a_wait_uses_are_not_ordered(backend: str, wait: str) -> None:
    assert wait in exchanged(backend).races.waits
    races = Exchange(backend, [wait])
    races.run()
    memory = NEEDED[backend][wait]
    assert any(race.startswith(f"{memory} is ") for race in races.races.found), races.races.found


def test_no_wait_is_in_vain() -> None:
    seen = {wait for backend in NEEDED for wait in exchanged(backend).races.waits}
    needed = {wait for waits in NEEDED.values() for wait in waits}
    assert {wait for wait in seen - needed if not wait.endswith(", message")} == set()
    assert needed >= MESSAGES


# How often the threads of answers wait for the device, for each unit; main ones never do.
UNIT_WAITS = {
    "gloo": {
        "answer_ring.py:_receive, synchronize": 1,
        "answer_ways.py:receive, copy": 4,  # two tensors from two ranks
        "answer_ways.py:send, copy": 4,
        "serving.py:_send, synchronize": 1,
    },
    "nccl": {
        "answer_ring.py:_receive, synchronize": 1,
        "answer_ways.py:_wait_for_stream, stream": 4,
        "serving.py:_send, synchronize": 1,
    },
    "ipc": {"serving.py:_send, synchronize": 1},
    "ipc, records": {"mapped_slots.py:send, copy": 2, "serving.py:_send, synchronize": 1},
}


@pytest.mark.parametrize("backend", UNIT_WAITS)
def test_no_unit_lets_a_main_thread_wait(backend: str) -> None:
    units = UNITS * LAST
    for (thread, wait), times in exchanged(backend).races.host_waits.items():
        if not thread.endswith("/answers"):
            assert wait == "answer_ways.py:_wait_for_stream, stream", thread  # of `connect`
            assert times == 2  # routes
        elif "_all, " in wait:
            assert times == 1  # at the end
        else:
            assert times == units * UNIT_WAITS[backend][wait], (thread, wait)
