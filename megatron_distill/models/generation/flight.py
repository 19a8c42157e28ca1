"""Rows on their way through the model together: their cache, the last ids, and their ends.

Shapes: b rows, N positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_distill.models.generation.attend import Step
from megatron_distill.models.generation.cache import Cache, integers
from megatron_distill.models.generation.draw import Drawn
from megatron_distill.models.generation.request import (
    Ending,
    OnTokens,
    Stops,
    WriteRow,
    Written,
)
from megatron_distill.models.generation.text import Decode, TextStream
from megatron_distill.runtime.host_copy import HostCopy

__all__ = ["Beginning", "Flight", "RowText"]

# Ended rows are dropped once they are this share: each drop copies the rows that go on.
_DROPPED_SHARE = 0.25


@dataclass
class RowText:
    """A row's ids so far; `index` in the request, None for a row that only keeps ranks in step."""

    index: int | None
    limit: int
    stops: Stops
    stream: TextStream | None = None
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    ended: Ending | None = None

    @classmethod
    def of(
        cls,
        index: int,
        row: WriteRow,
        limit: int,
        stops: Stops,
        decode: Decode | None,
        prefix: Sequence[int],
    ) -> RowText:
        """Begin a row; `limit`: the most ids that it may add."""
        stream = None
        if decode is not None:
            stream = TextStream(decode, stops.strings, (*prefix, *row.ids)[-8:])
        return cls(index, limit, stops, stream)

    @property
    def is_live(self) -> bool:
        """Whether the row goes on."""
        return self.index is not None and self.ended is None

    def extend(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Add drawn ids, up to the row's end."""
        tokens = tokens[: self.limit - len(self.ids)]
        stop = next((place for place, token in enumerate(tokens) if token in self.stops.ids), None)
        taken = len(tokens) if stop is None else stop + 1
        if self.stream is not None and self.stops.strings:
            count = self.stream.extend(tokens[:stop])
            if self.stream.is_stopped:
                taken, self.ended = count, "string"
        self.ids += tokens[:taken]
        self.log_probs += [min(one, 0.0) for one in log_probs[:taken]]
        if self.ended is None and stop is not None:
            self.ended = "id"
        elif self.ended is None and len(self.ids) >= self.limit:
            self.ended = "length"

    def written(self) -> Written:
        """Return the result of an ended row."""
        assert self.ended is not None
        text = None
        if self.stream is not None:
            if not self.stops.strings:  # no text was needed earlier
                self.stream.extend(self.ids[: -1 if self.ended == "id" else None])
            text = self.stream.finish()
        return Written(tuple(self.ids), tuple(self.log_probs), self.ended, text)


@dataclass
class Flight:
    """Rows that are stepped together.

    Attributes:
        row_keys_b: of draws, int64. ids_b: the ids to read next, int64.
        padding: positions besides the rows, which keep expert ranks in step.
        history: drawn ids and log-probabilities, of which no copy to the host has begun.
    """

    rows: list[RowText]
    cache: Cache
    row_keys_b: Tensor
    ids_b: Tensor
    padding: int = 0
    is_over: bool = False
    history: list[Drawn] = field(default_factory=list)
    # Steps, and their ids and log-probabilities, each [steps, b] or, of one step, [b].
    _looks: list[tuple[int, HostCopy]] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """Whether every row has ended or drawn all of its ids, as far as the host knows."""
        drawn = len(self.history) + sum(steps for steps, _ in self._looks)
        return all(not row.is_live or len(row.ids) + drawn >= row.limit for row in self.rows)

    def begin_look(self) -> None:
        """Begin to copy the drawn ids to the host."""
        if not self.history:
            return
        parts = [
            one[0] if len(one) == 1 else torch.stack(one) for one in zip(*self.history, strict=True)
        ]
        self._looks.append((len(self.history), HostCopy.begin(*parts)))
        self.history.clear()

    def finish_look(self, on_tokens: OnTokens | None) -> bool:
        """Give copied ids to their rows; returns whether a log-probability is not finite."""
        drawn: list[tuple[list[int], list[float]]] = []
        for steps, look in self._looks:
            ids, log_probs = (part.tolist() for part in look.read())
            if steps == 1:
                drawn.append((ids, log_probs))
            else:
                drawn.extend(zip(ids, log_probs, strict=True))
        self._looks.clear()
        is_broken = False
        for place, row in enumerate(self.rows):
            if not row.is_live:
                continue
            before = len(row.ids)
            own = [log_probs[place] for _, log_probs in drawn]
            row.extend([ids[place] for ids, _ in drawn], own)
            is_broken |= not all(map(math.isfinite, own[: len(row.ids) - before]))
            if on_tokens is not None:
                new = row.ids[before : -1 if row.ended == "id" else None]
                if new:
                    assert row.index is not None
                    on_tokens(row.index, new)
        return is_broken

    def end_all(self) -> None:
        """End every row."""
        for row in self.rows:
            row.ended = row.ended or "length"

    @property
    def live(self) -> int:
        """The rows that go on."""
        return sum(row.is_live for row in self.rows)

    def drop_ended(self, finished: list[RowText]) -> None:
        """Move ended rows to `finished` and out of the cache, if they are many."""
        alive = [place for place, row in enumerate(self.rows) if row.is_live]
        if not alive:
            alive = [0]  # for ranks that have rows left
        if len(self.rows) - len(alive) < max(1.0, _DROPPED_SHARE * len(self.rows)):
            return
        index = integers(alive, self.ids_b.device)
        finished += [row for place, row in enumerate(self.rows) if place not in set(alive)]
        self.rows = [self.rows[place] for place in alive]
        self.cache.reduce_to(alive)
        self.row_keys_b, self.ids_b = self.row_keys_b[index], self.ids_b[index]
        self.history = [Drawn(*(part[index] for part in drawn)) for drawn in self.history]


@dataclass(frozen=True)
class Beginning:
    """The first step of a flight: its ids, and the last position of each row among them.

    copies: of each row, the row of the cache that it begins with; None: its own.
    """

    flight: Flight
    ids_N: Tensor
    step: Step
    ends_b: Tensor
    copies: Sequence[int] | None

    def finish(self) -> None:
        """Store the keys of the step, and give each row its own; one layer at a time is twice."""
        self.step.finish()
        if self.copies is not None:
            self.flight.cache.reduce_to(self.copies)
