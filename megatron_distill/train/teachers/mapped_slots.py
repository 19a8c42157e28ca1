"""Slots in memory that two processes of one machine have mapped: the sender writes into them.

The memory is the host's here; `device_slots` has the same slots on a GPU.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, Final

import torch
from torch import Tensor

from megatron_distill.errors import ConfigError
from megatron_distill.runtime.bridge import Bridge, Sending
from megatron_distill.runtime.shared_memory import allocate_shared, shared_path
from megatron_distill.train.teachers.answer_ways import Columns, SlotPlace, Slots
from megatron_distill.train.teachers.answers import CREDIT_TAG, AnswerPlan, AnswerRows, RoundRequest

__all__ = [
    "Credits",
    "SharedMemoryWay",
    "create_shared",
    "map_shared",
    "map_slots",
    "mapped_bytes",
    "slots_of",
]

_ALIGNMENT: Final = 256  # bytes, for kernels that read several numbers at once


class Credits:
    """Blocks of slots that may be written: 8 bytes per round from a receiver to each sender.

    A command is not a credit: it comes from the student's first rank, and another one may
    still read the block's last round.
    """

    def __init__(self, bridge: Bridge, *, rounds: int) -> None:
        self._bridge = bridge
        # A message of the last but one use of a block has arrived: the block's answers have.
        self._under_way: deque[tuple[Tensor, list[Sending]]] = deque(maxlen=2 * rounds)
        self._claimed: dict[int, int] = {}

    def grant(self, turn: int, sources: Sequence[int]) -> None:
        """Let the sources write the answers of a round.

        Collective: the bridge, one message of 8 bytes to each source.
        """
        word = torch.tensor([turn])
        sending = [self._bridge.send(word, source, tag=CREDIT_TAG) for source in sources]
        self._under_way.append((word, sending))

    def claim(self, turn: int, rank: int) -> None:
        """Wait until a receiver has granted a round; again in the same round it does nothing.

        Collective: the bridge, one message of 8 bytes from the receiver per round.
        """
        word = torch.empty(1, dtype=torch.int64)
        while self._claimed.get(rank, 0) < turn:
            self._bridge.receive(word, rank, tag=CREDIT_TAG).wait()
            self._claimed[rank] = int(word)


@dataclass(frozen=True)
class SharedMemoryWay:
    """Into slots that both processes have mapped; `slots` by rank."""

    slots: Mapping[int, Slots]
    credits: Credits
    writes_slots: ClassVar[bool] = True

    def connect(self, source: int, destination: int) -> None:
        """Nothing: the slots are mapped."""

    def offer(self, command: RoundRequest, sources: Sequence[int]) -> None:
        """See `AnswerWay`.

        Collective: that of `Credits.grant`.
        """
        self.credits.grant(command.turn, sources)

    def claim(self, command: RoundRequest, rank: int) -> None:
        """See `AnswerWay`.

        Collective: that of `Credits.claim`.
        """
        self.credits.claim(command.turn, rank)

    def send(
        self, columns: Columns, parts: Sequence[AnswerRows], to: SlotPlace
    ) -> Sequence[Sending]:
        """See `AnswerWay`; rows in host memory are in the slot on return."""
        slot = self.slots[to.rank][to.block][to.micro_batch]
        for part in parts:
            message = part.message
            slot[part.column][message.received].copy_(columns[part.column][message.sent])
        return ()

    def receive(
        self, columns: Columns, parts: Sequence[AnswerRows], source: int, at: SlotPlace
    ) -> None:
        """See `AnswerWay`; the rows are there with the header."""


def _extents(
    plan: AnswerPlan, rank: int, numbers: Collection[int]
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield number, bytes and shape ``[blocks, micro-batches, s, b, ...]`` of each tensor."""
    rows = plan.slot_rows(rank)
    for number in numbers:
        column = plan.columns[number][1]
        own = (rows[number], plan.sequences, *column.shape)
        shape = (plan.blocks, plan.units.micro_batches, *own)
        yield number, math.prod(shape) * column.dtype.itemsize, shape


def mapped_bytes(plan: AnswerPlan, rank: int, numbers: Collection[int]) -> int:
    """Return the size of one piece of memory for some tensors of a rank's slots, by number.

    That is their part of `AnswerPlan.slot_bytes`, each tensor to 256 bytes more.
    """
    return sum(_aligned(size) for _, size, _ in _extents(plan, rank, numbers))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def map_slots(
    whole: Tensor, plan: AnswerPlan, rank: int, numbers: Collection[int]
) -> dict[int, Tensor]:
    """Return some tensors of a rank's slots by number, in one piece of memory of bytes.

    Each is of all blocks and micro-batches: ``[blocks, micro-batches, s, b, ...]``.
    """
    found, place = {}, 0
    for number, size, shape in _extents(plan, rank, numbers):
        dtype = plan.columns[number][1].dtype
        found[number] = whole[place : place + size].view(dtype).view(shape)
        place += _aligned(size)
    return found


def slots_of(plan: AnswerPlan, tensors: Mapping[int, Tensor]) -> Slots:
    """Return the slots of a rank whose tensors are those of `map_slots`."""
    return [
        [
            {number: tensors[number][block, index] for number in sorted(tensors)}
            for index in range(plan.units.micro_batches)
        ]
        for block in range(plan.blocks)
    ]


def create_shared(
    plan: AnswerPlan, rank: int, numbers: Collection[int]
) -> tuple[dict[int, Tensor], BinaryIO]:
    """Allocate shared memory for some tensors of a rank's slots; see `map_slots`.

    Returns also the memory, which is closed once the senders have mapped `shared_path` of it.
    Raises ConfigError: there is not enough of it.
    """
    size = mapped_bytes(plan, rank, numbers)
    try:
        memory = allocate_shared(size)
    except OSError as error:
        raise ConfigError(
            f"{plan.role}.transfer.backend: the slots of a rank take {size:,} bytes of shared "
            f"memory ({error.strerror}); give the job more memory, lower {plan.role}.steps_ahead, "
            f"or set {plan.role}.transfer.backend to gloo"
        ) from error
    return map_shared(shared_path(memory), plan, rank, numbers), memory


def map_shared(
    path: Path, plan: AnswerPlan, rank: int, numbers: Collection[int]
) -> dict[int, Tensor]:
    """Map the memory of `create_shared` by its path. Raises ConfigError: the system forbids it."""
    size = mapped_bytes(plan, rank, numbers)
    try:
        path.open("r+b").close()
    except OSError as error:
        raise ConfigError(
            f"{plan.role}.transfer.backend: {path}, the memory of rank {rank}'s slots, cannot be "
            f"opened ({error.strerror}); set {plan.role}.transfer.backend to gloo"
        ) from error
    whole = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    return map_slots(whole, plan, rank, numbers)
