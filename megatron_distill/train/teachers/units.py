"""Units of a step, their replicas, and the rows that each rank of a layout holds and needs.

Pure functions of layouts: every rank computes all of it without a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_distill.runtime.segments import pieces_of

if TYPE_CHECKING:
    from megatron_distill.runtime.layout import Layout

__all__ = ["Grid", "Holding", "Message", "Units", "messages", "moved_rows"]

# Half-open, of positions in a sequence or of rows of a vocabulary.
Interval = tuple[int, int]


@dataclass(frozen=True)
class Units:
    """The units of a step: one micro-batch of one data-parallel replica of the student each.

    Unit ``g = micro_batch * student_replicas + replica`` has the rows ``[g m, (g + 1) m)`` of the
    global batch, where m is the micro-batch size. Teacher replica ``g % teacher_replicas`` runs it.
    `least`: units that each teacher replica runs in a wave, as many as its pipeline has stages.
    """

    micro_batches: int
    student_replicas: int
    teacher_replicas: int
    least: int = 1

    def of_student(self, micro_batch: int, replica: int) -> int:
        """Return the unit of a micro-batch of a student replica."""
        return micro_batch * self.student_replicas + replica

    def teacher_replica(self, unit: int) -> int:
        """Return the teacher replica that runs a unit."""
        return unit % self.teacher_replicas

    @property
    def wave(self) -> int:
        """Number of micro-batches whose units are `least` for each teacher replica."""
        return -(-self.teacher_replicas * self.least // self.student_replicas)

    def of_wave(self, micro_batches: range) -> range:
        """Return the units of consecutive micro-batches of all student replicas."""
        size = self.student_replicas
        return range(micro_batches.start * size, micro_batches.stop * size)

    def of_teacher(self, micro_batches: range, replica: int) -> tuple[int, ...]:
        """Return the units of consecutive micro-batches that a teacher replica runs, in order."""
        units = self.of_wave(micro_batches)
        return tuple(unit for unit in units if self.teacher_replica(unit) == replica)

    def evened(self, micro_batches: range, replica: int) -> tuple[int, ...]:
        """Return `of_teacher`, as many for each replica: some run the first unit again at the end.

        For experts or shards of weights spread over the replicas, whose messages need every one.
        """
        units = self.of_wave(micro_batches)
        own = self.of_teacher(micro_batches, replica)
        rounds = -(-len(units) // self.teacher_replicas)
        return own + (units.start,) * (rounds - len(own))


@dataclass(frozen=True)
class Holding:
    """The rows that a rank holds or needs: ascending intervals, in the rank's local order.

    `rank` is that of the group in which the rows move.
    """

    rank: int
    intervals: tuple[Interval, ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(stop - start for start, stop in self.intervals)

    def local(self, position: int) -> int | None:
        """Return the local index of a row; None if it is not in the holding."""
        first = 0
        for start, stop in self.intervals:
            if start <= position < stop:
                return first + position - start
            first += stop - start
        return None


@dataclass(frozen=True)
class Message:
    """Consecutive rows on their way from one rank's tensor to another's; local indices."""

    source: int
    source_start: int
    destination: int
    destination_start: int
    rows: int

    @property
    def is_local(self) -> bool:
        """Whether the rows stay on their rank."""
        return self.source == self.destination

    @property
    def sent(self) -> slice:
        """Rows of the source's tensor."""
        return slice(self.source_start, self.source_start + self.rows)

    @property
    def received(self) -> slice:
        """Rows of the destination's tensor."""
        return slice(self.destination_start, self.destination_start + self.rows)


@dataclass(frozen=True)
class Grid:
    """The ranks of one layout in Megatron-Core's order: tensor, context, data, pipeline.

    `ranks[i]` is the rank, in the group in which rows move, of the layout's i-th rank.
    """

    tensor: int
    context: int
    pipeline: int
    replicas: int
    sequence: bool
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout, ranks: Sequence[int]) -> Grid:
        """The grid of a layout on some ranks of a group; their number fits the layout."""
        replicas, rest = divmod(len(ranks), layout.model_ranks)
        assert rest == 0, (len(ranks), layout)
        return cls(
            layout.tensor,
            layout.context,
            layout.pipeline,
            replicas,
            layout.sequence and layout.tensor > 1,
            tuple(ranks),
        )

    def rank(self, *, tensor: int = 0, context: int = 0, replica: int = 0, stage: int = -1) -> int:
        """Return the rank, in the group in which rows move, at a place of the grid."""
        stage %= self.pipeline
        place = tensor + self.tensor * (context + self.context * (replica + self.replicas * stage))
        return self.ranks[place]

    def stage(self, rank: int) -> int:
        """Return the pipeline rank of a rank of the group in which rows move."""
        return self.ranks.index(rank) // (self.tensor * self.context * self.replicas)

    def replica(self, rank: int) -> int:
        """Return the replica of a rank of the group in which rows move."""
        return self.ranks.index(rank) // (self.tensor * self.context) % self.replicas

    def context_rank(self, rank: int) -> int:
        """Return the context-parallel rank of a rank of the group in which rows move."""
        return self.ranks.index(rank) // self.tensor % self.context

    def holdings(
        self, length: int, *, replica: int, stage: int = -1, is_whole: bool = False
    ) -> tuple[Holding, ...]:
        """Return the positions of a unit of `length` positions on each rank of a stage.

        A context rank has its zigzag pieces, or the whole sequence. Under sequence parallelism a
        tensor rank has one of equal consecutive parts of them, otherwise all.
        """
        found = []
        for context in range(self.context):
            place, size = (0, 1) if is_whole else (context, self.context)
            pieces = pieces_of(length, rank=place, size=size)
            intervals = tuple((piece.start, piece.stop) for piece in pieces)
            for tensor in range(self.tensor):
                rank = self.rank(tensor=tensor, context=context, replica=replica, stage=stage)
                own = _part(intervals, tensor, self.tensor) if self.sequence else intervals
                found.append(Holding(rank, own))
        return tuple(found)


def _part(intervals: Sequence[Interval], index: int, count: int) -> tuple[Interval, ...]:
    """Return part `index` of `count` equal parts of the rows, in their order."""
    rows = sum(stop - start for start, stop in intervals)
    assert rows % count == 0, (rows, count)
    low, high = index * rows // count, (index + 1) * rows // count
    found, first = [], 0
    for start, stop in intervals:
        begin, end = max(low, first), min(high, first + stop - start)
        if begin < end:
            found.append((start + begin - first, start + end - first))
        first += stop - start
    return tuple(found)


def messages(holders: Sequence[Holding], needs: Sequence[Holding]) -> tuple[Message, ...]:
    """Return the messages that bring every needed row once, from one rank that holds it.

    A row that its destination holds stays there. Rows that several ranks hold are divided evenly
    among them. The order is the same on all ranks.
    """
    bounds = sorted({bound for one in holders for pair in one.intervals for bound in pair})
    return tuple(
        message for need in needs for message in _joined(list(_to_one(holders, need, bounds)))
    )


def _to_one(holders: Sequence[Holding], need: Holding, bounds: Sequence[int]) -> list[Message]:
    found, first = [], 0
    for start, stop in need.intervals:
        cuts = [start, *(bound for bound in bounds if start < bound < stop), stop]
        for low, high in zip(cuts, cuts[1:], strict=False):
            sources = [one for one in holders if one.local(low) is not None]
            assert sources, f"no rank holds the rows {low} to {high}"
            sources = [one for one in sources if one.rank == need.rank][:1] or sources
            for index, source in enumerate(sources):
                begin = low + index * (high - low) // len(sources)
                end = low + (index + 1) * (high - low) // len(sources)
                local = source.local(begin)
                if begin < end:
                    assert local is not None
                    place = first + begin - start
                    found.append(Message(source.rank, local, need.rank, place, end - begin))
        first += stop - start
    return found


def _joined(parts: Sequence[Message]) -> list[Message]:
    """Join neighbours on both sides."""
    found: list[Message] = []
    for part in parts:
        last = found[-1] if found else None
        if (
            last is not None
            and last.source == part.source
            and last.sent.stop == part.source_start
            and last.received.stop == part.destination_start
        ):
            rows = last.rows + part.rows
            found[-1] = Message(
                last.source, last.source_start, last.destination, last.destination_start, rows
            )
        else:
            found.append(part)
    return found


def moved_rows(found: Sequence[Message]) -> int:
    """Return the number of rows that change their rank."""
    return sum(message.rows for message in found if not message.is_local)
