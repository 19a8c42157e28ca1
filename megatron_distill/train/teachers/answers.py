"""Answers of a teacher on ranks of its own: who sends which rows to whom, and what goes with them.

The student asks for one round at a time: a training step, or a held-out batch. A round has one
answer for each unit. Both sides compute the same plan from the two layouts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from megatron_distill.runtime.batch import Batch, zigzag_index
from megatron_distill.train.teachers.attention_heads import FeatureKind, attention_messages
from megatron_distill.train.teachers.units import Grid, Holding, Message, Units, messages

__all__ = [
    "COMMAND_TAG",
    "CONNECT_TAG",
    "CREDIT_TAG",
    "EVALUATION_TAG",
    "HEADER_TAG",
    "HEAD_TAG",
    "ROWS_TAG",
    "AnswerError",
    "AnswerHeader",
    "AnswerPlan",
    "AnswerRows",
    "Column",
    "Output",
    "RequestKind",
    "RoundRequest",
    "token_hash",
]

COMMAND_TAG: Final = 1
HEADER_TAG: Final = 2
ROWS_TAG: Final = 3
HEAD_TAG: Final = 4
CONNECT_TAG: Final = 5
CREDIT_TAG: Final = 6
EVALUATION_TAG: Final = 7

_HASH_BYTES: Final = 7  # fits an int64 without its sign


class AnswerError(RuntimeError):
    """A teacher's answer is late, missing, of another shape or other tokens, or not finite.

    It names unit, round and ranks.

    It arises on one rank alone, and ends the launch as any failure of one rank does.
    """


class RequestKind(IntEnum):
    """The kinds of commands from the student's first rank to every rank of the teacher."""

    STOP = 0
    STEP = 1
    HELD_OUT = 2
    EVALUATE = 3


@dataclass(frozen=True)
class RoundRequest:
    """A request for a round: its number, counted over both kinds, and its slots at the student.

    Attributes:
        number: the step, or the held-out batch, both counted from 1.
        block: which of the student's blocks of slots the answers go to.
    """

    request: RequestKind
    number: int = 0
    turn: int = 0
    block: int = 0

    def tensor(self) -> Tensor:
        """The command as it is sent, int64 [4]."""
        return torch.tensor([self.request, self.number, self.turn, self.block])

    @classmethod
    def of(cls, sent: Tensor) -> RoundRequest:
        """Read a received command."""
        request, number, turn, block = sent.tolist()
        return cls(RequestKind(request), number, turn, block)

    @property
    def place(self) -> str:
        """The round in words."""
        return {
            RequestKind.STOP: "the end",
            RequestKind.STEP: f"step {self.number}",
            RequestKind.HELD_OUT: f"held-out batch {self.number}",
            RequestKind.EVALUATE: "the evaluation",
        }[self.request]


@dataclass(frozen=True)
class AnswerHeader:
    """Sent before the rows of a unit from one rank to another.

    Attributes:
        tokens: `token_hash` of the unit at the receiver's positions.
        non_finite: number of values that are not finite on the sending rank.
        asks_to_stop: whether the sender was asked to stop, by SIGTERM or SIGINT.
        has_failed: whether the teacher could not read the unit; no rows follow.
        is_left_out: whether no sample of the unit is this teacher's, one of several; no rows
            follow.
    """

    turn: int
    unit: int
    tokens: int
    non_finite: int
    asks_to_stop: bool = False
    has_failed: bool = False
    is_left_out: bool = False

    @property
    def has_rows(self) -> bool:
        """Whether the rows of the unit are sent."""
        return not self.has_failed and not self.is_left_out

    @classmethod
    def empty(cls) -> Tensor:
        """A tensor to receive a header, int64 [7]."""
        return torch.empty(7, dtype=torch.int64)

    def tensor(self) -> Tensor:
        """The header as it is sent, int64 [7]."""
        flags = int(self.asks_to_stop), int(self.has_failed), int(self.is_left_out)
        return torch.tensor([self.turn, self.unit, self.tokens, self.non_finite, *flags])

    @classmethod
    def of(cls, sent: Tensor) -> AnswerHeader:
        """Read a received header."""
        turn, unit, tokens, non_finite, *flags = sent.tolist()
        return cls(turn, unit, tokens, non_finite, *map(bool, flags))


def token_hash(batch: Batch, *, context_rank: int = 0, context_size: int = 1) -> int:
    """Return a hash of a micro-batch's sample numbers and tokens at a context rank's positions.

    With a tokenizer of the teacher's own also of the tokens on its side. A batch that is sharded
    already is taken as it is. Reads the host copy only.
    """
    host = batch.on_host
    found = hashlib.blake2b(host.sample_ids_b.numpy().tobytes(), digest_size=_HASH_BYTES)
    for side in (host, host.teacher):
        if side is None:
            continue
        tokens_bs = side.tokens_bs
        if context_size > 1 and tokens_bs.shape[1] == side.document_ids_bS.shape[1]:
            index_s = zigzag_index(tokens_bs.shape[1], rank=context_rank, size=context_size)
            tokens_bs = tokens_bs[:, index_s]
        found.update(tokens_bs.contiguous().numpy().tobytes())
    return int.from_bytes(found.digest(), "little")


@dataclass(frozen=True)
class Column:
    """One tensor of an answer: its dtype, and its shape after rows and sequences.

    `has_logarithms`: of probabilities, which may be zero.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    has_logarithms: bool = False

    def empty(self, rows: int, sequences: int, device: torch.device) -> Tensor:
        """A tensor [s, b, ...] for a unit's rows on one rank."""
        return torch.empty(rows, sequences, *self.shape, dtype=self.dtype, device=device)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a position."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Output:
    """Tensors of an answer that go together, from a stage of the teacher to one of the student.

    Attributes:
        layer: of the teacher, from 1; None: the answer for the losses between logits, which the
            last stages send and receive.
        source: pipeline rank of the teacher.
        destination: pipeline rank of the student.
        splits: whether tensor ranks have parts of it under sequence parallelism, as models leave
            hidden states; otherwise each has all positions of its context rank.
        is_whole: whether each context rank of the student receives the whole sequence, for a loss
            on chunks, which may lie on several ranks.
        kind: of a layer: its output, or the queries or keys of its attention. These have a tensor
            for each part of the heads that a student's tensor rank receives; see `attention_parts`.
    """

    layer: int | None
    source: int
    destination: int
    columns: tuple[Column, ...]
    splits: bool = True
    is_whole: bool = False
    kind: FeatureKind = "output"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a position."""
        return sum(column.bytes_per_token for column in self.columns)


@dataclass(frozen=True)
class AnswerRows:
    """Rows of one tensor of an answer on their way; `column` is its number in the answer."""

    column: int
    message: Message


@dataclass(frozen=True)
class AnswerPlan:
    """The rows of every unit that go from ranks of the teacher to ranks of the student.

    Ranks are those of the bridge. `length`: positions in the teacher's tokens. `outputs`: the
    tensors of an answer, one after the other, by which a tensor has its number. `steps_ahead`
    rounds may be under way while one is in use. `role`: of the teacher, its key in the
    configuration.
    """

    units: Units
    teacher: Grid
    student: Grid
    length: int
    sequences: int
    outputs: tuple[Output, ...]
    steps_ahead: int
    role: str = "teacher"

    @property
    def blocks(self) -> int:
        """Number of rounds that a receiving rank of the student has room for."""
        return self.steps_ahead + 1

    @property
    def columns(self) -> tuple[tuple[Output, Column], ...]:
        """The tensors of an answer by number, each with its output."""
        return tuple((output, column) for output in self.outputs for column in output.columns)

    @property
    def routes(self) -> tuple[tuple[int, int], ...]:
        """The pairs of a sending and a receiving rank, in order."""
        return tuple(sorted(self.step_bytes()))

    @property
    def has_features(self) -> bool:
        """Whether layer outputs are sent."""
        return any(output.layer is not None for output in self.outputs)

    def sends(self, rank: int) -> bool:
        """Whether a rank of the teacher has an output of its units."""
        return any(output.source == self.teacher.stage(rank) for output in self.outputs)

    def needed(self, rank: int) -> tuple[Output, ...]:
        """Return the outputs that a rank of the student receives."""
        stage = self.student.stage(rank)
        return tuple(output for output in self.outputs if output.destination == stage)

    def sources(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the teacher that send to a rank of the student."""
        return tuple(source for source, destination in self.routes if destination == rank)

    def micro_batches(self, source: int, destination: int) -> tuple[int, ...]:
        """Return the micro-batches of a round whose units have rows on a route."""
        units = self.units.of_wave(range(self.units.micro_batches))
        numbers = (
            unit // self.units.student_replicas
            for unit in units
            if destination in self.sent(unit, source)
        )
        return tuple(dict.fromkeys(numbers))

    def slot_rows(self, rank: int) -> dict[int, int]:
        """Return the rows of each tensor that a rank of the student receives, by number."""
        needed, found = self.needed(rank), {}
        for number, (output, _) in enumerate(self.columns):
            if output in needed:
                found[number] = self._need(output, rank).rows
        return found

    def sent_rows(self, rank: int) -> dict[int, int]:
        """Return the rows of each tensor of a unit on a rank of the teacher, by number."""
        replica, stage, found = self.teacher.replica(rank), self.teacher.stage(rank), {}
        for number, (output, _) in enumerate(self.columns):
            if output.source == stage:
                grid, is_whole = _grid(self.teacher, output), output.kind == "key"
                holdings = grid.holdings(
                    self.length, replica=replica, stage=stage, is_whole=is_whole
                )
                (found[number],) = [one.rows for one in holdings if one.rank == rank]
        return found

    def _need(self, output: Output, rank: int) -> Holding:
        holdings = _grid(self.student, output).holdings(
            self.length,
            replica=self.student.replica(rank),
            stage=output.destination,
            is_whole=output.is_whole,
        )
        (own,) = [one for one in holdings if one.rank == rank]
        return own

    def replica_of(self, unit: int) -> int:
        """Return the student replica of a unit."""
        return unit % self.units.student_replicas

    def messages(self, output: Output, unit: int) -> tuple[Message, ...]:
        """Return the messages of an output of a unit."""
        replicas = self.units.teacher_replica(unit), self.replica_of(unit)
        grids = _grid(self.teacher, output), _grid(self.student, output)
        stages = output.source, output.destination
        return _messages(grids, stages, self.length, replicas, is_whole=output.is_whole)

    def _of_heads(self, output: Output, unit: int) -> tuple[tuple[int, Message], ...]:
        """Return the messages of queries or keys, each with the number of its part of the heads."""
        replicas = self.units.teacher_replica(unit), self.replica_of(unit)
        stages = output.source, output.destination
        return attention_messages(
            (self.teacher, self.student), stages, self.length, replicas, is_whole=output.is_whole
        )

    def sent(self, unit: int, rank: int) -> dict[int, list[AnswerRows]]:
        """Return the rows of a unit from one rank, by destination."""
        return _grouped(
            (part.message.destination, part)
            for part in self._parts(unit)
            if part.message.source == rank
        )

    def received(self, unit: int, rank: int) -> dict[int, list[AnswerRows]]:
        """Return the rows of a unit to one rank, by source."""
        return _grouped(
            (part.message.source, part)
            for part in self._parts(unit)
            if part.message.destination == rank
        )

    def _parts(self, unit: int) -> Iterator[AnswerRows]:
        first = 0
        for output in self.outputs:
            numbers = range(first, first + len(output.columns))
            first = numbers.stop
            if output.kind == "output":
                moved = self.messages(output, unit)
                yield from (AnswerRows(number, message) for message in moved for number in numbers)
            else:
                for place, message in self._of_heads(output, unit):
                    yield AnswerRows(numbers[place], message)

    def slot_bytes(self, rank: int) -> int:
        """Return the memory of all slots on a rank of the student."""
        columns = self.columns
        unit = sum(
            rows * self.sequences * columns[number][1].bytes_per_token
            for number, rows in self.slot_rows(rank).items()
        )
        return self.blocks * self.units.micro_batches * unit

    def step_bytes(self) -> dict[tuple[int, int], int]:
        """Return the bytes of a step by route: from a rank of the teacher to one of the student."""
        found: dict[tuple[int, int], int] = {}
        columns = self.columns
        for unit in self.units.of_wave(range(self.units.micro_batches)):
            for part in self._parts(unit):
                route = part.message.source, part.message.destination
                width = columns[part.column][1].bytes_per_token
                found[route] = found.get(route, 0) + part.message.rows * self.sequences * width
        return found


def _grid(grid: Grid, output: Output) -> Grid:
    """Return a layout as it holds an output."""
    return grid if output.splits else replace(grid, sequence=False)


@lru_cache(maxsize=4096)
def _messages(
    grids: tuple[Grid, Grid],
    stages: tuple[int, int],
    length: int,
    replicas: tuple[int, int],
    *,
    is_whole: bool,
) -> tuple[Message, ...]:
    holders = grids[0].holdings(length, replica=replicas[0], stage=stages[0])
    needs = grids[1].holdings(length, replica=replicas[1], stage=stages[1], is_whole=is_whole)
    return messages(holders, needs)


def _grouped(pairs: Iterable[tuple[int, AnswerRows]]) -> dict[int, list[AnswerRows]]:
    found: dict[int, list[AnswerRows]] = {}
    for rank, part in pairs:
        found.setdefault(rank, []).append(part)
    return found
