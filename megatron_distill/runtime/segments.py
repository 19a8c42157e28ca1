"""Document lengths of a micro-batch, and the keys that each rank's queries see.

Everything here is host integers, known before a step starts. Kernels read them; no mask exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Consecutive positions of the sequence on one context rank."""

    first_query: int  # local index
    start: int  # position in the whole sequence
    length: int

    @property
    def stop(self) -> int:
        """The position after the last one."""
        return self.start + self.length

    @property
    def queries(self) -> slice:
        """Local indices of the queries."""
        return slice(self.first_query, self.first_query + self.length)


def pieces_of(sequence_length: int, *, rank: int, size: int) -> tuple[Piece, ...]:
    """Return the pieces of context rank `rank` of `size`, ascending.

    The sequence is cut into `2 * size` pieces, and rank r has pieces r and `2 * size - 1 - r`. Each
    rank has the same share of the causal triangle. The last rank's two are adjacent, so it has one.
    """
    if size == 1:
        return (Piece(0, 0, sequence_length),)
    assert sequence_length % (2 * size) == 0, (sequence_length, size)
    length = sequence_length // (2 * size)
    if rank == size - 1:
        return (Piece(0, rank * length, 2 * length),)
    return Piece(0, rank * length, length), Piece(length, (2 * size - 1 - rank) * length, length)


def in_sequence_order(ranks_S: Tensor, *, size: int) -> Tensor:
    """Reorder the first dimension, ranks' pieces, to the order of positions; differentiable."""
    if size == 1:
        return ranks_S
    halves = ranks_S.chunk(2 * size)
    return torch.cat([*halves[::2], *halves[::-2]])


@dataclass(frozen=True)
class Segment:
    """Consecutive queries of one document in one sample, with the keys of that document.

    The last query sees the last key and none sees past its own position: the causal triangle is
    aligned at the bottom right.
    """

    sample: int
    first_query: int  # local index
    queries: int
    first_key: int  # position in the whole sequence; that of the document's first token
    keys: int

    @property
    def earlier(self) -> int:
        """The keys before the first query's own."""
        return self.keys - self.queries


@dataclass(frozen=True)
class PackedPiece:
    """A piece as kernels for packed sequences read it: its samples' documents one after another."""

    piece: Piece
    first_keys: tuple[int, ...]  # per sample, the first key that a query of the piece sees
    query_ends: Tensor  # int32 [documents + 1], cumulative lengths, from 0
    key_ends: Tensor  # int32 [documents + 1]
    longest_query: int
    longest_key: int

    def to(self, device: torch.device | str) -> PackedPiece:
        """The same, its tensors copied from pinned memory without waiting."""
        return replace(
            self,
            query_ends=copied(self.query_ends, device),
            key_ends=copied(self.key_ends, device),
        )


def copied(host: Tensor, device: torch.device | str) -> Tensor:
    """Copy a host tensor to a device; a CUDA device gets it from pinned memory, without a wait."""
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class KeyRanges:
    """The first and last key that each query sees; on a device, with a copy on the host."""

    first_bs: Tensor  # int64
    last_s: Tensor  # int64, ascending: the query's own position
    last_on_host_s: Tensor

    def hidden(self, rows: slice) -> Tensor:
        """Return which of the keys [K] are hidden from some queries, bool [b, q, K].

        K is the number of keys up to the last that one of them sees.
        """
        keys_K = torch.arange(int(self.last_on_host_s[rows][-1]) + 1, device=self.last_s.device)
        first_bq1, last_q1 = self.first_bs[:, rows, None], self.last_s[rows, None]
        return (keys_K < first_bq1) | (keys_K > last_q1)


@dataclass(frozen=True)
class Segments:
    """The documents of a micro-batch, as one context rank's queries meet them.

    Attributes:
        bounds: cumulative lengths of each sample's documents, from 0 to the sequence length.
            Padding is one more document.
        rank, size: of the context group.
        packed: filled by `to`, one entry for each piece.
    """

    bounds: tuple[tuple[int, ...], ...]
    rank: int = 0
    size: int = 1
    packed: tuple[PackedPiece, ...] = ()
    _derived: dict[Any, Any] = field(init=False, compare=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        assert all(bound[0] == 0 and bound[-1] == self.keys for bound in self.bounds), self.bounds

    @classmethod
    def of_documents(cls, document_ids_bS: Tensor) -> Segments:
        """Return those of whole sequences; a document ends where the id changes. Host tensors."""
        length = document_ids_bS.shape[1]
        changes_bS = document_ids_bS[:, 1:] != document_ids_bS[:, :-1]
        rows = (row.nonzero().squeeze(1) + 1 for row in changes_bS)
        return cls(tuple((0, *row.tolist(), length) for row in rows))

    @classmethod
    def whole(cls, samples: int, length: int) -> Segments:
        """Return those of samples that are one document each."""
        return cls(((0, length),) * samples)

    @property
    def keys(self) -> int:
        """The positions of the whole sequence."""
        return self.bounds[0][-1]

    @property
    def queries(self) -> int:
        """The positions on this rank."""
        return self.keys // self.size

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """This rank's pieces."""
        return pieces_of(self.keys, rank=self.rank, size=self.size)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, sample by sample within each piece."""
        return tuple(
            segment
            for piece in self.pieces
            for sample in range(len(self.bounds))
            for segment in self._of_piece(piece, sample)
        )

    def sharded(self, rank: int, size: int) -> Segments:
        """The same documents on a context rank."""
        assert self.size == 1, "sharded already"
        return replace(self, rank=rank, size=size, packed=())

    def to(self, device: torch.device | str) -> Segments:
        """The same with `packed`, its tensors on the device."""
        return replace(self, packed=tuple(self._packed(piece).to(device) for piece in self.pieces))

    def derived(self, key: object, make: Callable[[], Any]) -> Any:
        """Return what a kernel makes of the documents, once for all layers of a micro-batch."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    def key_ranges(self, window: int | None, device: torch.device | str = "cpu") -> KeyRanges:
        """Return the keys that each query sees in a layer with this window."""
        first_bs = torch.empty(len(self.bounds), self.queries, dtype=torch.int64)
        last_s = torch.cat([torch.arange(piece.start, piece.stop) for piece in self.pieces])
        for segment in self.segments:
            rows = slice(segment.first_query, segment.first_query + segment.queries)
            first_bs[segment.sample, rows] = segment.first_key
        if window is not None:
            first_bs = torch.maximum(first_bs, last_s - (window - 1))
        return KeyRanges(copied(first_bs, device), copied(last_s, device), last_s)

    def _of_piece(self, piece: Piece, sample: int) -> Sequence[Segment]:
        found = []
        bound = self.bounds[sample]
        for start, stop in zip(bound, bound[1:], strict=False):
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                local = piece.first_query + first - piece.start
                found.append(Segment(sample, local, last - first, start, last - start))
        return found

    def _packed(self, piece: Piece) -> PackedPiece:
        samples = [self._of_piece(piece, sample) for sample in range(len(self.bounds))]
        documents = [segment for sample in samples for segment in sample]
        queries = torch.tensor([0, *(segment.queries for segment in documents)], dtype=torch.int32)
        keys = torch.tensor([0, *(segment.keys for segment in documents)], dtype=torch.int32)
        return PackedPiece(
            piece,
            tuple(sample[0].first_key for sample in samples),
            query_ends=queries.cumsum(0, dtype=torch.int32),
            key_ends=keys.cumsum(0, dtype=torch.int32),
            longest_query=max(segment.queries for segment in documents),
            longest_key=max(segment.keys for segment in documents),
        )
