"""Ways of an answer's rows from a rank of the teacher into a slot of a rank of the student.

A header goes over the bridge beside the rows. It goes ahead of rows that the receiver has to take;
it follows rows that the sender has written into the receiver's memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.errors import ConfigError
from megatron_distill.runtime.bridge import Bridge, Sending
from megatron_distill.train.teachers.answers import CONNECT_TAG, ROWS_TAG, AnswerPlan, Part

__all__ = [
    "AnswerWay",
    "Columns",
    "HostWay",
    "NcclWay",
    "SharedMemoryWay",
    "SlotPlace",
    "Slots",
    "connect_routes",
    "create_shared",
    "map_shared",
    "own_stream",
    "private_slots",
]

# Tensors of an answer by number, each [s, b, ...]; and slots by block and micro-batch.
Columns = Mapping[int, Tensor]
Slots = Sequence[Sequence[Columns]]


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """A block of a thread on a stream of its own; on a CPU nothing changes."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


@dataclass(frozen=True)
class SlotPlace:
    """One slot of a rank of the student: block and micro-batch."""

    rank: int
    block: int
    micro_batch: int


class AnswerWay(Protocol):
    """How rows leave the teacher and reach a slot; both ends are called in one order."""

    @property
    def writes_slots(self) -> bool:
        """Whether the sender writes into the slots, and the header follows the rows."""
        ...

    def connect(self, source: int, destination: int) -> None:
        """Make what the route needs; called once on both of its ranks, one of which this is."""
        ...

    def send(self, columns: Columns, parts: Sequence[Part], to: SlotPlace) -> Sequence[Sending]:
        """Begin to send rows of the columns ``[s, b, ...]``, which the device has computed."""
        ...

    def receive(self, columns: Columns, parts: Sequence[Part], source: int) -> None:
        """Receive rows into a slot and wait until they may be read on any stream."""
        ...


@dataclass(frozen=True)
class HostWay:
    """Through host memory and the bridge; from and to a GPU by copies of the calling thread."""

    bridge: Bridge
    writes_slots: ClassVar[bool] = False

    def connect(self, source: int, destination: int) -> None:
        """Nothing: `connect_routes` has used the bridge."""

    def send(self, columns: Columns, parts: Sequence[Part], to: SlotPlace) -> Sequence[Sending]:
        """See `AnswerWay`.

        Collective: the bridge, one message of its rows per part.
        """
        rows = [columns[part.column][part.message.sent] for part in parts]
        held = [one.contiguous().cpu() for one in rows]
        return [self.bridge.send(one, to.rank, tag=ROWS_TAG) for one in held]

    def receive(self, columns: Columns, parts: Sequence[Part], source: int) -> None:
        """See `AnswerWay`.

        Collective: the bridge, one message of its rows per part.
        """
        rows = [columns[part.column][part.message.received] for part in parts]
        held = [torch.empty_like(row, device="cpu") if row.is_cuda else row for row in rows]
        for receiving in [self.bridge.receive(one, source, tag=ROWS_TAG) for one in held]:
            receiving.wait()
        moved = [(row, one) for row, one in zip(rows, held, strict=True) if row.is_cuda]
        for row, one in moved:
            row.copy_(one)
        if moved:
            torch.cuda.current_stream().synchronize()


@dataclass(frozen=True)
class SharedMemoryWay:
    """Into slots in memory that both processes of one machine have mapped; `slots` by rank."""

    slots: Mapping[int, Slots]
    writes_slots: ClassVar[bool] = True

    def connect(self, source: int, destination: int) -> None:
        """Nothing: the slots are mapped."""

    def send(self, columns: Columns, parts: Sequence[Part], to: SlotPlace) -> Sequence[Sending]:
        """See `AnswerWay`; the rows are in the slot on return."""
        slot = self.slots[to.rank][to.block][to.micro_batch]
        for part in parts:
            message = part.message
            slot[part.column][message.received].copy_(columns[part.column][message.sent])
        return ()

    def receive(self, columns: Columns, parts: Sequence[Part], source: int) -> None:
        """See `AnswerWay`; the rows are there with the header."""


@dataclass(frozen=True)
class NcclWay:
    """From GPU to GPU; each pair of ranks has a communicator of its own, made by `connect`."""

    group: dist.ProcessGroup
    device: torch.device
    writes_slots: ClassVar[bool] = False

    def connect(self, source: int, destination: int) -> None:
        """Make the communicator of the two ranks, which NCCL does in their first message.

        Collective: pair of ranks, one message of 4 bytes.
        """
        word = torch.zeros(1, device=self.device)
        if self.group.rank() == source:
            self.group.send([word], destination, ROWS_TAG).wait()
        else:
            self.group.recv([word], source, ROWS_TAG).wait()
        _wait_for_stream(word)

    def send(self, columns: Columns, parts: Sequence[Part], to: SlotPlace) -> Sequence[Sending]:
        """See `AnswerWay`.

        Collective: pair of ranks, one message of its rows per part.
        """
        rows = [columns[part.column][part.message.sent].contiguous() for part in parts]
        return [_OnStream(self.group.send([one], to.rank, ROWS_TAG), one) for one in rows]

    def receive(self, columns: Columns, parts: Sequence[Part], source: int) -> None:
        """See `AnswerWay`.

        Collective: pair of ranks, one message of its rows per part.
        """
        rows = [columns[part.column][part.message.received] for part in parts]
        for one in [self.group.recv([row], source, ROWS_TAG) for row in rows]:
            one.wait()
        for row in rows:
            _wait_for_stream(row)


@dataclass(frozen=True)
class _OnStream:
    """A message of NCCL, whose `wait` lets the host wait too; it holds the rows until then."""

    work: dist.Work
    rows: Tensor

    def wait(self, timeout: timedelta | None = None) -> object:  # noqa: ARG002
        self.work.wait()
        _wait_for_stream(self.rows)
        return self.rows


def _wait_for_stream(rows: Tensor) -> None:
    """Let the host wait for the current stream of a GPU; elsewhere messages have waited."""
    if rows.is_cuda:
        torch.cuda.current_stream(rows.device).synchronize()


def connect_routes(plan: AnswerPlan, way: AnswerWay, bridge: Bridge) -> None:
    """Use each route of this rank once, before the first round, while its GPU is idle.

    Both sides call it, and all ranks have one order. A communicator made in the first round would
    allocate beside kernels that wait for a peer, which may itself be making another one.

    Collective: the bridge, one message of 8 bytes per route; then `AnswerWay.connect`.
    """
    for source, destination in plan.routes:
        if bridge.rank not in (source, destination):
            continue
        word = torch.zeros(1, dtype=torch.int64)
        if bridge.rank == source:
            bridge.send(word, destination, tag=CONNECT_TAG).wait()
        else:
            bridge.receive(word, source, tag=CONNECT_TAG).wait()
        way.connect(source, destination)


def private_slots(plan: AnswerPlan, rank: int, places: Mapping[int, torch.device]) -> Slots:
    """Allocate the slots of a rank of the student: `AnswerPlan.slot_bytes`.

    places: device of each tensor that the rank receives, by number.
    """
    rows, columns = plan.slot_rows(rank), plan.columns
    return [
        [
            {
                number: columns[number][1].empty(count, plan.sequences, places[number])
                for number, count in rows.items()
            }
            for _ in range(plan.units.micro_batches)
        ]
        for _ in range(plan.blocks)
    ]


def create_shared(path: Path, plan: AnswerPlan, rank: int) -> Slots:
    """Create the slots of a rank of the student in a file of shared memory.

    Raises ConfigError: there is not enough of it.
    """
    size = plan.slot_bytes(rank)
    try:
        with path.open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(
            f"{plan.role}.transfer.backend = 'ipc': {path} needs {size:,} bytes of shared memory "
            f"({error.strerror}); give {path.parent} more, lower {plan.role}.steps_ahead, or set "
            f"{plan.role}.transfer.backend to gloo"
        ) from error
    return map_shared(path, plan, rank)


def map_shared(path: Path, plan: AnswerPlan, rank: int) -> Slots:
    """Map the slots of a rank of the student, whose file need not stay."""
    whole = torch.from_file(str(path), shared=True, size=plan.slot_bytes(rank), dtype=torch.uint8)
    rows, micro_batches, place = plan.slot_rows(rank), plan.units.micro_batches, 0
    columns = {number: plan.columns[number][1] for number in rows}
    found: dict[int, Tensor] = {}
    # The widest numbers first, so that all are aligned.
    for number in sorted(rows, key=lambda number: -columns[number].dtype.itemsize):
        column = columns[number]
        shape = (plan.blocks, micro_batches, rows[number], plan.sequences, *column.shape)
        size = math.prod(shape) * column.dtype.itemsize
        found[number] = whole[place : place + size].view(column.dtype).view(shape)
        place += size
    return [
        [{number: found[number][block, index] for number in rows} for index in range(micro_batches)]
        for block in range(plan.blocks)
    ]
