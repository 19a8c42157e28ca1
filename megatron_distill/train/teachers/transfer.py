"""Movement of rows of tensors between the ranks of one group, along messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_distill.train.teachers.units import Message

__all__ = ["Movement", "begin_transfer", "transfer"]


@dataclass(frozen=True)
class Movement:
    """The rows of one tensor on their way.

    Attributes:
        messages: all of them, in one order on all ranks.
        sent: this rank's rows ``[r, ...]``, contiguous; None if no message leaves it.
        received: ``[r', ...]``, contiguous, of the same dtype and shape per row; overwritten. None
            if no message of another rank reaches this one; its own rows stay where they are then.
    """

    messages: Sequence[Message]
    sent: Tensor | None
    received: Tensor | None


def begin_transfer(
    movements: Sequence[Movement], *, group: dist.ProcessGroup, first_tag: int = 0
) -> list[dist.Work]:
    """Begin all messages of the movements at once; rows that stay on this rank are copied.

    Neither `sent` nor `received` may change until `wait` of every returned work has returned. With
    NCCL that lets the current stream wait, not the host. The communicator must exist: NCCL creates
    it in the first collective of all ranks of the group. With gloo, messages in flight between the
    same ranks need different tags: `first_tag` plus the number of the message.

    Collective: `group`, point to point: the bytes of its rows per message between two ranks.
    """
    rank, next_tag = group.rank(), first_tag
    operations = []
    for movement in movements:
        tags = range(next_tag, next_tag + len(movement.messages))
        next_tag = tags.stop
        if movement.sent is None and movement.received is None:
            continue
        for tag, message in zip(tags, movement.messages, strict=True):
            if rank not in (message.source, message.destination):
                continue
            if message.is_local:
                if movement.received is not None:
                    assert movement.sent is not None
                    movement.received[message.received].copy_(movement.sent[message.sent])
                continue
            sends = message.source == rank
            rows = movement.sent if sends else movement.received
            assert rows is not None, (message, rank)
            assert rows.is_contiguous(), rows.stride()
            operations.append(
                dist.P2POp(
                    dist.isend if sends else dist.irecv,
                    rows[message.sent if sends else message.received],
                    group=group,
                    tag=tag,
                    group_peer=message.destination if sends else message.source,
                )
            )
    return dist.batch_isend_irecv(operations) if operations else []


def transfer(
    movements: Sequence[Movement], *, group: dist.ProcessGroup, first_tag: int = 0
) -> None:
    """Move the rows, and return when the current stream may read and overwrite them.

    Collective: that of `begin_transfer`.
    """
    for work in begin_transfer(movements, group=group, first_tag=first_tag):
        work.wait()
