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
from megatron_distill.train.teachers.answers import ROWS_TAG, AnswerPlan
from megatron_distill.train.teachers.units import Message

__all__ = [
    "AnswerWay",
    "HostWay",
    "NcclWay",
    "SharedMemoryWay",
    "SlotPlace",
    "Slots",
    "create_shared",
    "map_shared",
    "own_stream",
    "private_slots",
]

# By block, micro-batch and column, each [s, b, ...].
Slots = Sequence[Sequence[Sequence[Tensor]]]


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

    def send(
        self, columns: Sequence[Tensor], parts: Sequence[Message], to: SlotPlace
    ) -> Sequence[Sending]:
        """Begin to send rows of the columns ``[s, b, ...]``, which the device has computed."""
        ...

    def receive(self, columns: Sequence[Tensor], parts: Sequence[Message], source: int) -> None:
        """Receive rows into a slot and wait until they may be read on any stream."""
        ...


@dataclass(frozen=True)
class HostWay:
    """Through host memory and the bridge; from and to a GPU by copies of the calling thread."""

    bridge: Bridge
    device: torch.device
    writes_slots: ClassVar[bool] = False

    def send(
        self, columns: Sequence[Tensor], parts: Sequence[Message], to: SlotPlace
    ) -> Sequence[Sending]:
        """See `AnswerWay`.

        Collective: the bridge, one message of its rows per part and column.
        """
        rows = [column[part.sent] for part in parts for column in columns]
        held = [one.contiguous().cpu() for one in rows]
        return [self.bridge.send(one, to.rank, tag=ROWS_TAG) for one in held]

    def receive(self, columns: Sequence[Tensor], parts: Sequence[Message], source: int) -> None:
        """See `AnswerWay`.

        Collective: the bridge, one message of its rows per part and column.
        """
        rows = [column[part.received] for part in parts for column in columns]
        on_host = self.device.type == "cpu"
        held = rows if on_host else [torch.empty(one.shape, dtype=one.dtype) for one in rows]
        for receiving in [self.bridge.receive(one, source, tag=ROWS_TAG) for one in held]:
            receiving.wait()
        if not on_host:
            for one, row in zip(held, rows, strict=True):
                row.copy_(one)
            torch.cuda.current_stream().synchronize()


@dataclass(frozen=True)
class SharedMemoryWay:
    """Into slots in memory that both processes of one machine have mapped; `slots` by rank."""

    slots: Mapping[int, Slots]
    writes_slots: ClassVar[bool] = True

    def send(
        self, columns: Sequence[Tensor], parts: Sequence[Message], to: SlotPlace
    ) -> Sequence[Sending]:
        """See `AnswerWay`; the rows are in the slot on return."""
        slot = self.slots[to.rank][to.block][to.micro_batch]
        for part in parts:
            for column, target in zip(columns, slot, strict=True):
                target[part.received].copy_(column[part.sent])
        return ()

    def receive(self, columns: Sequence[Tensor], parts: Sequence[Message], source: int) -> None:
        """See `AnswerWay`; the rows are there with the header."""


@dataclass(frozen=True)
class NcclWay:
    """From GPU to GPU; each pair of ranks has a communicator of its own, made when first used."""

    group: dist.ProcessGroup
    writes_slots: ClassVar[bool] = False

    def send(
        self, columns: Sequence[Tensor], parts: Sequence[Message], to: SlotPlace
    ) -> Sequence[Sending]:
        """See `AnswerWay`.

        Collective: pair of ranks, one message of its rows per part and column.
        """
        rows = [column[part.sent].contiguous() for part in parts for column in columns]
        return [_OnStream(self.group.send([one], to.rank, ROWS_TAG), one) for one in rows]

    def receive(self, columns: Sequence[Tensor], parts: Sequence[Message], source: int) -> None:
        """See `AnswerWay`.

        Collective: pair of ranks, one message of its rows per part and column.
        """
        rows = [column[part.received] for part in parts for column in columns]
        for one in [self.group.recv([row], source, ROWS_TAG) for row in rows]:
            one.wait()
        torch.cuda.current_stream().synchronize()


@dataclass(frozen=True)
class _OnStream:
    """A message of NCCL, whose `wait` lets the host wait too; it holds the rows until then."""

    work: dist.Work
    rows: Tensor

    def wait(self, timeout: timedelta | None = None) -> object:  # noqa: ARG002
        self.work.wait()
        torch.cuda.current_stream().synchronize()
        return self.rows


def private_slots(plan: AnswerPlan, rank: int, replica: int, device: torch.device) -> Slots:
    """Allocate the slots of a rank of the student's last stage: `AnswerPlan.slot_bytes`."""
    rows = plan.need(rank, replica).rows
    return [
        [
            [column.empty(rows, plan.sequences, device) for column in plan.columns]
            for _ in range(plan.units.micro_batches)
        ]
        for _ in range(plan.blocks)
    ]


def create_shared(path: Path, plan: AnswerPlan, rank: int, replica: int) -> Slots:
    """Create the slots of a rank of the student in a file of shared memory.

    Raises ConfigError: there is not enough of it.
    """
    size = plan.slot_bytes(rank, replica)
    try:
        with path.open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(
            f"teacher.transfer.backend = 'ipc': {path} needs {size:,} bytes of shared memory "
            f"({error.strerror}); give {path.parent} more, lower teacher.steps_ahead, or set "
            "teacher.transfer.backend to gloo"
        ) from error
    return map_shared(path, plan, rank, replica)


def map_shared(path: Path, plan: AnswerPlan, rank: int, replica: int) -> Slots:
    """Map the slots of a rank of the student, whose file need not stay."""
    whole = torch.from_file(
        str(path), shared=True, size=plan.slot_bytes(rank, replica), dtype=torch.uint8
    )
    rows, place = plan.need(rank, replica).rows, 0

    def column_at(index: int) -> Tensor:
        nonlocal place
        column = plan.columns[index]
        shape = (rows, plan.sequences, *column.shape)
        size = math.prod(shape) * column.dtype.itemsize
        place += size
        return whole[place - size : place].view(column.dtype).view(shape)

    return [
        [
            [column_at(index) for index in range(len(plan.columns))]
            for _ in range(plan.units.micro_batches)
        ]
        for _ in range(plan.blocks)
    ]
