"""Rules that map rows of our tensors to rows of Hugging Face tensors.

Both sides store a linear layer as [out, in], so a family differs only in names and the order of
rows. GPT-2 alone stores [in, out]. A rule defines that order once. Reading a slice, writing a
tensor and checking shapes follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megatron_distill.models.architecture import Architecture


class Run(NamedTuple):
    """`rows` rows that are contiguous on both sides, with their starts."""

    ours: int
    theirs: int
    rows: int


@dataclass(frozen=True)
class TensorPiece:
    """The rows of one of our tensors in one Hugging Face tensor.

    name: a template with `{layer}` and `{expert}`. shape: of the Hugging Face tensor, as stored.
    transposed: stored [in, out]; our rows are then its columns.
    """

    name: str
    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    transposed: bool = False


class Rule(Protocol):
    """Maps the rows of a tensor to Hugging Face tensors."""

    def pieces(self, shape: tuple[int, ...], architecture: Architecture) -> Sequence[TensorPiece]:
        """Return pieces whose runs cover every row exactly once."""
        ...


@dataclass(frozen=True)
class Same:
    """One tensor, the same rows."""

    name: str
    transposed: bool = False

    def pieces(self, shape: tuple[int, ...], architecture: Architecture) -> Sequence[TensorPiece]:  # noqa: ARG002
        """See `Rule`."""
        return (_piece(self.name, shape, [Run(0, 0, shape[0])], transposed=self.transposed),)


@dataclass(frozen=True)
class Stacked:
    """Several tensors of equal size, concatenated by rows: gate, then up."""

    names: tuple[str, ...]

    def pieces(self, shape: tuple[int, ...], architecture: Architecture) -> Sequence[TensorPiece]:  # noqa: ARG002
        """See `Rule`."""
        rows = shape[0] // len(self.names)
        return [
            _piece(name, (rows, *shape[1:]), [Run(index * rows, 0, rows)])
            for index, name in enumerate(self.names)
        ]


@dataclass(frozen=True)
class SplitQKV:
    """Queries, keys and values in three tensors; ours are ordered by group: queries, key, value."""

    query: str
    key: str
    value: str

    def pieces(self, shape: tuple[int, ...], architecture: Architecture) -> Sequence[TensorPiece]:
        """See `Rule`."""
        return [
            _piece(name, (_rows(runs), *shape[1:]), runs)
            for name, runs in zip(
                (self.query, self.key, self.value), _grouped_runs(architecture), strict=True
            )
        ]


@dataclass(frozen=True)
class FusedQKV:
    """All queries, all keys, all values in one tensor; ours are ordered by group."""

    name: str
    transposed: bool = False

    def pieces(self, shape: tuple[int, ...], architecture: Architecture) -> Sequence[TensorPiece]:
        """See `Rule`."""
        runs: list[Run] = []
        for part in _grouped_runs(architecture):
            start = _rows(runs)
            runs += [Run(run.ours, start + run.theirs, run.rows) for run in part]
        return (_piece(self.name, shape, runs, transposed=self.transposed),)


def _grouped_runs(architecture: Architecture) -> tuple[list[Run], list[Run], list[Run]]:
    """Return the runs of queries, keys and values, each counted from its first row."""
    head, groups = architecture.head_size, architecture.num_kv_heads
    queries = architecture.num_attention_heads // groups * head
    stride = queries + 2 * head
    return (
        [Run(g * stride, g * queries, queries) for g in range(groups)],
        [Run(g * stride + queries, g * head, head) for g in range(groups)],
        [Run(g * stride + queries + head, g * head, head) for g in range(groups)],
    )


def _rows(runs: Sequence[Run]) -> int:
    return sum(run.rows for run in runs)


def _piece(
    name: str, shape: tuple[int, ...], runs: Sequence[Run], *, transposed: bool = False
) -> TensorPiece:
    transposed = transposed and len(shape) == 2
    return TensorPiece(name, shape[::-1] if transposed else shape, tuple(runs), transposed)
