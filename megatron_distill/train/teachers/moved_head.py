"""Movement of a teacher's output head from its vocabulary shards to the student's, at the start."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.models.execution import Execution
from megatron_distill.ops import VocabShard
from megatron_distill.train.teachers.transfer import Movement, transfer
from megatron_distill.train.teachers.units import Grid, Holding, Message, messages

__all__ = ["head_messages", "move_head"]


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
