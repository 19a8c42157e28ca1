"""Ways of an answer's rows from a rank of the teacher into a slot of a rank of the student.

A header goes over the bridge beside the rows. It goes ahead of rows that the receiver has to take;
it follows rows that the sender writes into the receiver's memory (`mapped_slots`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.runtime.bridge import Bridge, Sending
from megatron_distill.train.teachers.answers import (
    CONNECT_TAG,
    ROWS_TAG,
    AnswerPlan,
    AnswerRows,
    RoundRequest,
)

__all__ = [
    "AnswerWay",
    "Columns",
    "HostWay",
    "NcclWay",
    "SlotPlace",
    "Slots",
    "connect_routes",
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

    def offer(self, command: RoundRequest, sources: Sequence[int]) -> None:
        """Let senders write into a round's block, after what the current stream has to do.

        Called once per round on a receiver.
        """
        ...

    def claim(self, command: RoundRequest, rank: int) -> None:
        """Wait until a receiver has offered a round's block; before each answer to it."""
        ...

    def send(
        self, columns: Columns, parts: Sequence[AnswerRows], to: SlotPlace
    ) -> Sequence[Sending]:
        """Begin to send rows ``[s, b, ...]`` after what the current stream has to do."""
        ...

    def receive(
        self, columns: Columns, parts: Sequence[AnswerRows], source: int, at: SlotPlace
    ) -> None:
        """Receive rows into a slot; later work of the current stream reads them."""
        ...


class _ByMessages:
    """Base of the ways by messages: no slot is written before its receiver takes it."""

    writes_slots: ClassVar[bool] = False

    def offer(self, command: RoundRequest, sources: Sequence[int]) -> None:
        """Nothing: a message waits for its receiver."""

    def claim(self, command: RoundRequest, rank: int) -> None:
        """Nothing: a message waits for its receiver."""


@dataclass(frozen=True)
class HostWay(_ByMessages):
    """Through host memory and the bridge; from and to a GPU by copies of the calling thread."""

    bridge: Bridge

    def connect(self, source: int, destination: int) -> None:
        """Nothing: `connect_routes` has used the bridge."""

    def send(
        self, columns: Columns, parts: Sequence[AnswerRows], to: SlotPlace
    ) -> Sequence[Sending]:
        """See `AnswerWay`.

        Collective: the bridge, one message of its rows per part.
        """
        rows = [columns[part.column][part.message.sent] for part in parts]
        held = [one.contiguous().cpu() for one in rows]
        return [self.bridge.send(one, to.rank, tag=ROWS_TAG) for one in held]

    def receive(
        self,
        columns: Columns,
        parts: Sequence[AnswerRows],
        source: int,
        at: SlotPlace,  # noqa: ARG002
    ) -> None:
        """See `AnswerWay`.

        Collective: the bridge, one message of its rows per part.
        """
        rows = [columns[part.column][part.message.received] for part in parts]
        held = [torch.empty_like(row, device="cpu") if row.is_cuda else row for row in rows]
        for receiving in [self.bridge.receive(one, source, tag=ROWS_TAG) for one in held]:
            receiving.wait()
        for row, one in zip(rows, held, strict=True):
            if row.is_cuda:
                row.copy_(one)  # the host waits: the memory is free after it


@dataclass(frozen=True)
class NcclWay(_ByMessages):
    """From GPU to GPU; each pair of ranks has a communicator of its own, made by `connect`."""

    group: dist.ProcessGroup
    device: torch.device

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

    def send(
        self, columns: Columns, parts: Sequence[AnswerRows], to: SlotPlace
    ) -> Sequence[Sending]:
        """See `AnswerWay`.

        Collective: pair of ranks, one message of its rows per part.
        """
        rows = [columns[part.column][part.message.sent].contiguous() for part in parts]
        return [_OnStream(self.group.send([one], to.rank, ROWS_TAG), one) for one in rows]

    def receive(
        self,
        columns: Columns,
        parts: Sequence[AnswerRows],
        source: int,
        at: SlotPlace,  # noqa: ARG002
    ) -> None:
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
