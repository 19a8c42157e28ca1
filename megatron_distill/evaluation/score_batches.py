"""The plan of a scoring: requests become rows, rows sorted by length become equal batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_distill.evaluation.requests import Request, model_input

__all__ = ["RankBatch", "ScoredRow", "Wave", "scored_rows", "waves_of"]


@dataclass(frozen=True)
class ScoredRow:
    """One input of the model and the ids that are scored in it.

    Attributes:
        tokens: int32 [s].
        positions: int64 [q], ascending; position i predicts token i + 1.
        ids: int64 [q], the scored id at each of these positions.
        requests: int64 [q], the number of the request that each of them belongs to.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int64]
    ids: NDArray[np.int64]
    requests: NDArray[np.int64]


def scored_rows(requests: Sequence[Request], positions: int) -> list[ScoredRow]:
    """Return the rows of requests; answers of one token after one context share a row.

    The rows come in descending order of their length, equal ones in the order of their tokens. So
    the batches are the same for any order of the requests. An empty answer needs no row.
    """
    shared: dict[tuple[bytes, int], list[int]] = {}
    for number, request in enumerate(requests):
        if not len(request.answer):
            continue
        is_single = len(request.answer) == 1
        shared.setdefault((request.context.tobytes(), -1 if is_single else number), []).append(
            number
        )
    rows = [_row(requests, numbers, positions) for numbers in shared.values()]
    return sorted(rows, key=lambda row: (-len(row.tokens), row.tokens.tolist(), row.ids.tolist()))


def _row(requests: Sequence[Request], numbers: list[int], positions: int) -> ScoredRow:
    first = requests[numbers[0]]
    tokens, count = model_input(first, positions)
    if len(first.answer) == 1:
        ids = np.array([int(requests[number].answer[0]) for number in numbers], np.int64)
        places = np.full(len(numbers), len(tokens) - 1, np.int64)
        return ScoredRow(tokens, places, ids, np.array(numbers, np.int64))
    places = np.arange(len(tokens) - count, len(tokens), dtype=np.int64)
    ids = first.answer[-count:].astype(np.int64)
    return ScoredRow(tokens, places, ids, np.full(count, numbers[0], np.int64))


@dataclass(frozen=True)
class RankBatch:
    """One micro-batch of a rank: tokens [b, s] padded on the right, and its pairs to score.

    Attributes:
        tokens_bs: int64.
        flat: int64 [q], ascending indices into the flattened [b * s].
        ids: int64 [q].
        requests: int64 [q].
    """

    tokens_bs: NDArray[np.int64]
    flat: NDArray[np.int64]
    ids: NDArray[np.int64]
    requests: NDArray[np.int64]


@dataclass(frozen=True)
class Wave:
    """Micro-batches of one shape for all ranks: each rank takes its own part of the rows."""

    rows: Sequence[ScoredRow]
    ranks: int
    micro_batches: int  # of each rank
    sequences: int  # of each micro-batch
    length: int

    def of_rank(self, rank: int) -> list[RankBatch]:
        """Return the micro-batches of a rank; places without a row are filled with id 0."""
        own = self.rows[rank :: self.ranks]
        return [
            self._batch(own[first : first + self.sequences])
            for first in range(0, self.micro_batches * self.sequences, self.sequences)
        ]

    def _batch(self, rows: Sequence[ScoredRow]) -> RankBatch:
        tokens_bs = np.zeros((self.sequences, self.length), np.int64)
        for place, row in enumerate(rows):
            tokens_bs[place, : len(row.tokens)] = row.tokens
        nothing = np.zeros(0, np.int64)
        flat = [place * self.length + row.positions for place, row in enumerate(rows)]
        return RankBatch(
            tokens_bs,
            np.concatenate([nothing, *flat]),
            np.concatenate([nothing, *(row.ids for row in rows)]),
            np.concatenate([nothing, *(row.requests for row in rows)]),
        )


def waves_of(
    rows: Sequence[ScoredRow], *, ranks: int, micro_batches: int, tokens: int, multiple: int
) -> Iterator[Wave]:
    """Cut sorted rows into waves, the same on every rank.

    `ranks` share the rows; each runs `micro_batches` of at most `tokens` tokens (at least one row)
    per wave. A length is a multiple of `multiple`. Every rank runs every micro-batch, with rows or
    without, so that collectives of experts meet.
    """
    first = 0
    while first < len(rows):
        length = -(-len(rows[first].tokens) // multiple) * multiple
        left = len(rows) - first
        most = max(1, tokens // length)
        sequences = min(most, -(-left // (ranks * micro_batches)))
        part = rows[first : first + ranks * micro_batches * sequences]
        yield Wave(part, ranks, micro_batches, sequences, length)
        first += len(part)
