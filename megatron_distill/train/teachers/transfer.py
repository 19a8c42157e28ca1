"""Movement of rows of tensors between the ranks of one group, also of a teacher's head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.models.execution import Execution
from megatron_distill.ops import VocabShard
from megatron_distill.train.teachers.units import Grid, Holding, Message, messages

__all__ = ["Movement", "begin_transfer", "head_messages", "move_head", "transfer"]


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


def head_messages(
    teacher: Grid, student: Grid, *, rows: tuple[int, int], size: int
) -> tuple[Message, ...]:
    """Return the messages that bring each rank of the student's last stage its rows of the head.

    rows: of one tensor rank of the teacher and of the student, padding included. size: rows of the
    vocabulary, without padding. Each rank receives from one tensor group of the teacher, its own if
    it has the head.
    """
    found: list[Message] = []
    groups = [
        [
            Holding(teacher.rank(tensor=tensor, context=context, replica=replica), interval)
            for tensor in range(teacher.tensor)
            if (interval := _rows(tensor, rows[0], size))
        ]
        for replica in range(teacher.replicas)
        for context in range(teacher.context)
    ]
    number = 0
    for replica in range(student.replicas):
        for context in range(student.context):
            for tensor in range(student.tensor):
                rank = student.rank(tensor=tensor, context=context, replica=replica)
                own = [group for group in groups if any(one.rank == rank for one in group)]
                need = Holding(rank, _rows(tensor, rows[1], size))
                found += messages((own or groups)[0 if own else number % len(groups)], [need])
                number += 1
    return tuple(found)


def _rows(index: int, rows: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return the real rows of a shard; none if it has only padding."""
    start, stop = index * rows, min((index + 1) * rows, size)
    return ((start, stop),) if start < stop else ()


@torch.no_grad()
def move_head(
    weight_VH: Tensor | None,
    *,
    own: VocabShard,
    wanted: VocabShard | None,
    rows: tuple[int, int],
    width: int,
    grids: tuple[Grid, Grid],
    execution: Execution,
    group: dist.ProcessGroup,
) -> Tensor | None:
    """Return this rank's rows of the head in the student's shards; None off its last stage.

    weight_VH: the rows of the teacher's shard `own`, None off its last stage. `grids` and `rows` of
    a tensor rank, of the teacher and the student. Rows past the vocabulary are zero.

    Collective: `group`, point to point: 2 bytes (in bf16) per value and row that the rank does not
    hold itself.
    """
    found = head_messages(*grids, rows=rows, size=own.size)
    rank = group.rank()
    received = None
    if wanted is not None:
        shape = (wanted.stop - wanted.start, width)
        received = torch.zeros(shape, dtype=execution.dtype, device=execution.device)
    sent = None if weight_VH is None else weight_VH.contiguous()
    transfer([Movement(found, sent, received)], group=group)
    if weight_VH is not None and own == wanted:
        local = all(message.is_local for message in found if message.destination == rank)
        return weight_VH if local else received  # no copy beside the model's
    return received
