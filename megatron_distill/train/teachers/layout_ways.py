"""The ways of a teacher's outputs between its layout and the student's, on the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.runtime.groups import Groups
from megatron_distill.train.teachers.answers import Column
from megatron_distill.train.teachers.attention_heads import (
    FeatureKind,
    attention_messages,
    attention_parts,
)
from megatron_distill.train.teachers.units import Grid, Message, Units, messages

__all__ = ["StageTensor", "Ways", "message_group"]


@dataclass(frozen=True)
class StageTensor:
    """A tensor of the teacher's stage `source` that the student's stage `destination` needs.

    Attributes:
        layer: from 1; None: the last hidden state, or a column of its top-k.
        kind: of a layer: its output, or the queries or keys of its attention.
        part: of the heads of queries and keys, by number; see `attention_parts`.
        column: of a top-k, which every tensor rank has and needs for all positions of its context
            rank; None: a state of the model.
        is_whole: whether each context rank of the student needs a column's whole sequence.
    """

    layer: int | None
    source: int
    destination: int
    kind: FeatureKind = "output"
    part: int = 0
    column: Column | None = None
    is_whole: bool = False


class Ways:
    """The ways of outputs between both layouts, on this rank.

    teacher, student: the groups of both. group: of all ranks, for their messages.
    """

    def __init__(self, teacher: Groups, student: Groups, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        ranks = range(group.size())
        self.teacher = Grid.of(teacher.layout, ranks)
        self.student = Grid.of(student.layout, ranks)
        self.places = (_place(teacher, self.teacher), _place(student, self.student))
        self.parts, _ = attention_parts(self.teacher.tensor, self.student.tensor)
        self._own_part = teacher.tensor.rank() % self.parts
        self._found: dict[tuple[StageTensor, int, int, int], tuple[Message, ...]] = {}

    def units(self, micro_batches: int) -> Units:
        """Return the units of a step of so many micro-batches."""
        return Units(
            micro_batches,
            self.student.replicas,
            self.teacher.replicas,
            least=self.teacher.pipeline,
        )

    def messages(self, output: StageTensor, unit: int, length: int) -> tuple[Message, ...]:
        """Return the messages of an output of a unit of `length` positions."""
        replicas = unit % self.teacher.replicas, unit % self.student.replicas
        key = (output, *replicas, length)
        if key not in self._found:
            self._found[key] = self._messages(output, replicas, length)
        return self._found[key]

    def _messages(
        self, output: StageTensor, replicas: tuple[int, int], length: int
    ) -> tuple[Message, ...]:
        if output.kind == "output":
            teacher, student = self.teacher, self.student
            if output.column is not None:
                teacher, student = (replace(grid, sequence=False) for grid in (teacher, student))
            return messages(
                teacher.holdings(length, replica=replicas[0], stage=output.source),
                student.holdings(
                    length,
                    replica=replicas[1],
                    stage=output.destination,
                    is_whole=output.is_whole,
                ),
            )
        of_heads = attention_messages(
            (self.teacher, self.student),
            (output.source, output.destination),
            length,
            replicas,
            is_whole=output.kind == "key",
        )
        return tuple(message for part, message in of_heads if part == output.part)

    def holds(self, output: StageTensor, unit: int) -> bool:
        """Whether this rank's teacher computes a part of the output of a unit."""
        if output.kind != "output" and output.part != self._own_part:
            return False
        return self.places[0] == (unit % self.teacher.replicas, output.source)

    def needs(self, output: StageTensor, unit: int) -> bool:
        """Whether this rank's student needs a part of the output of a unit."""
        return self.places[1] == (unit % self.student.replicas, output.destination)

    def is_in_place(self, own: Tensor, found: Sequence[Message]) -> bool:
        """Whether the rank's own tensor is all that it needs, in the same order."""
        needed = [message for message in found if message.destination == self.rank]
        return needed == [Message(self.rank, 0, self.rank, 0, own.shape[0])]


def _place(groups: Groups, grid: Grid) -> tuple[int, int]:
    """Return this rank's replica and stage, compared with the grid."""
    replica, stage = groups.data.rank(), groups.pipeline.rank()
    tensor, context = groups.tensor.rank(), groups.context.rank()
    expected = grid.rank(tensor=tensor, context=context, replica=replica, stage=stage)
    assert expected == groups.world.rank(), (expected, groups.world.rank(), grid)
    return replica, stage


def message_group(device: torch.device, timeout_seconds: float) -> dist.ProcessGroup:
    """Return a group of all ranks for messages, connected.

    Collective: world, creation of a group; the new group, one all-reduce of 4 bytes.
    """
    group = dist.new_group(timeout=timedelta(seconds=timeout_seconds))
    assert group is not None
    dist.all_reduce(torch.zeros((), device=device), group=group)
    return group
