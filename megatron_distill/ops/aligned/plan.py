"""The rows of two models in order of their chunks, cut into tiles between chunks.

A chunk is a range of text that ends at a token boundary of both tokenizers. A row predicts one
label, and belongs to the chunk of that label. Losses are computed tile by tile; the logits of a
band of consecutive tiles are formed by one product with the head. The plan is made on the CPU,
before the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_distill.errors import counted
from megatron_distill.ops.workspace import Rows, equal_chunks

__all__ = ["TilePlan", "TileRange"]


class TileRange(NamedTuple):
    """One tile's part of the ordered chunks, rows and pairs of a plan."""

    chunks: slice
    student: slice
    teacher: slice
    pairs: slice


@dataclass(frozen=True)
class TilePlan:
    """The counted rows of both models, ordered by chunk.

    Rows of no chunk, and of chunks without rows on one side, are in no tile. An exception are
    student rows with a label loss, which are last, in tiles without chunks.

    Attributes:
        count: number C of chunks in the numbering of the input.
        chunks: ``[K]`` int64, numbers of the chunks with rows on both sides, ascending.
        student: the N student rows, with the order of the counted ones.
        teacher: the M teacher rows likewise.
        student_lengths: ``[K]`` int64, student rows of each chunk.
        teacher_lengths: ``[K]`` int64, teacher rows of each chunk.
        pairs: ``[3, P]`` int64 of the chunks with one row on each side: places in ``chunks`` and in
            the ordered student and teacher rows.
        tiles: the tiles, in order.
        bands: slices over the tiles; the logits of each are formed at once.
    """

    count: int
    chunks: Tensor
    student: Rows
    teacher: Rows
    student_lengths: Tensor
    teacher_lengths: Tensor
    pairs: Tensor
    tiles: tuple[TileRange, ...]
    bands: tuple[slice, ...]

    @classmethod
    def of_chunks(
        cls,
        student_chunks: Tensor,
        teacher_chunks: Tensor,
        count: int,
        *,
        tile_tokens: int,
        band_tokens: int = 0,
        has_label: Tensor | None = None,
    ) -> TilePlan:
        """The plan of rows with chunk numbers ``[N]`` and ``[M]`` int64, -1 for none.

        A tile has at most ``tile_tokens`` rows of each model, unless one chunk has more. A band has
        at most ``band_tokens``, unless one tile has more. ``has_label`` is bool ``[N]``: student
        rows that are needed without a chunk too.

        Raises:
            ValueError: a number is not one of ``count`` chunks, or no tile fits a row.
        """
        if tile_tokens < 1:
            raise ValueError(f"tile_tokens is {tile_tokens}; it must be at least 1")
        _check_numbers("student_chunks", student_chunks, count)
        _check_numbers("teacher_chunks", teacher_chunks, count)
        student_chunks, teacher_chunks = student_chunks.cpu(), teacher_chunks.cpu()
        sizes = [_sizes(student_chunks, count), _sizes(teacher_chunks, count)]
        is_used = (sizes[0] > 0) & (sizes[1] > 0)
        chunks = is_used.nonzero().squeeze(1)
        student_lengths, teacher_lengths = sizes[0][chunks], sizes[1][chunks]
        student_rows = _ordered(student_chunks, is_used)
        teacher_rows = _ordered(teacher_chunks, is_used)
        ends = [student_lengths.cumsum(0), teacher_lengths.cumsum(0)]
        is_pair = (student_lengths == 1) & (teacher_lengths == 1)
        places = is_pair.nonzero().squeeze(1)
        pairs = torch.stack([places, ends[0][places] - 1, ends[1][places] - 1])
        tiles = list(_tiles(ends[0].tolist(), ends[1].tolist(), places.tolist(), tile_tokens))
        if has_label is not None:
            rest = has_label.cpu() & ~_is_counted(student_chunks, is_used)
            further = rest.nonzero().squeeze(1)
            first, end, pair = len(student_rows), len(teacher_rows), len(places)
            for part in equal_chunks(len(further), tile_tokens):
                rows = slice(first + part.start, first + part.stop)
                none = slice(len(chunks), len(chunks))
                tiles.append(TileRange(none, rows, slice(end, end), slice(pair, pair)))
            student_rows = torch.cat([student_rows, further])
        return cls(
            count,
            chunks,
            Rows(len(student_chunks), student_rows),
            Rows(len(teacher_chunks), teacher_rows),
            student_lengths,
            teacher_lengths,
            pairs,
            tuple(tiles),
            tuple(_bands(tiles, band_tokens)),
        )

    @property
    def most_student_rows(self) -> int:
        """Student rows of the largest tile, at least one."""
        rows = (tile.student for tile in self.tiles)
        return max((part.stop - part.start for part in rows), default=1)

    @property
    def student_bands(self) -> list[slice]:
        """The ordered student rows of each band."""
        ends = [self.tiles[band.stop - 1].student.stop for band in self.bands]
        return [slice(*pair) for pair in zip([0, *ends], ends, strict=False)]

    @property
    def teacher_bands(self) -> list[slice]:
        """The ordered teacher rows of each band."""
        ends = [self.tiles[band.stop - 1].teacher.stop for band in self.bands]
        return [slice(*pair) for pair in zip([0, *ends], ends, strict=False)]

    def to(self, device: torch.device | str) -> TilePlan:
        """The plan with its tensors on a device; from pinned memory, the host does not wait."""
        return self._with_each(lambda values: values.to(device, non_blocking=True))

    def pinned(self) -> TilePlan:
        """The plan with its tensors in pinned host memory."""
        return self._with_each(Tensor.pin_memory)

    def _with_each(self, changed: Callable[[Tensor], Tensor]) -> TilePlan:
        """The plan with the result for each of its tensors."""
        assert self.student.indices is not None
        assert self.teacher.indices is not None
        return replace(
            self,
            chunks=changed(self.chunks),
            student=Rows(self.student.total, changed(self.student.indices)),
            teacher=Rows(self.teacher.total, changed(self.teacher.indices)),
            student_lengths=changed(self.student_lengths),
            teacher_lengths=changed(self.teacher_lengths),
            pairs=changed(self.pairs),
        )

    def per_chunk(self, values: Tensor) -> Tensor:
        """``[C]`` from the values ``[K]`` of the chunks in the plan, zero for the rest."""
        return values.new_zeros(self.count).index_copy_(0, self.chunks, values)

    def pair_chunks(self) -> Tensor:
        """bool ``[C]``: the chunks with one row on each side."""
        is_pair = torch.zeros(self.count, dtype=torch.bool, device=self.chunks.device)
        return is_pair.index_fill_(0, self.chunks[self.pairs[0]], True)

    def used_chunks(self) -> Tensor:
        """bool ``[C]``: the chunks with rows on both sides."""
        is_used = torch.zeros(self.count, dtype=torch.bool, device=self.chunks.device)
        return is_used.index_fill_(0, self.chunks, True)


def _check_numbers(name: str, chunks: Tensor, count: int) -> None:
    if chunks.dim() != 1 or chunks.dtype != torch.int64:
        raise ValueError(
            f"{name} is {chunks.dtype} of shape {tuple(chunks.shape)}; "
            "it must be int64, one number for each row"
        )
    if chunks.numel() and not (int(chunks.min()) >= -1 and int(chunks.max()) < count):
        raise ValueError(
            f"{name} has numbers from {int(chunks.min())} to {int(chunks.max())} for "
            f"{counted(count, 'chunk')}; they must be from -1 (no chunk) to {count - 1}"
        )


def _sizes(chunks: Tensor, count: int) -> Tensor:
    return torch.bincount(chunks[chunks >= 0], minlength=count)


def _is_counted(chunks: Tensor, is_used: Tensor) -> Tensor:
    if not is_used.numel():
        return torch.zeros_like(chunks, dtype=torch.bool)
    return (chunks >= 0) & is_used[chunks.clamp(min=0)]


def _ordered(chunks: Tensor, is_used: Tensor) -> Tensor:
    """The rows of used chunks, ordered by chunk."""
    rows = _is_counted(chunks, is_used).nonzero().squeeze(1)
    return rows[chunks[rows].argsort(stable=True)]


def _tiles(
    student_ends: list[int], teacher_ends: list[int], pairs: list[int], most: int
) -> Iterator[TileRange]:
    """The fewest tiles in order, each as long as both models' rows allow."""
    first, student, teacher, pair = 0, 0, 0, 0
    while first < len(student_ends):
        # The chunks that end within `most` rows of the tile's first one.
        fitting = bisect_right(student_ends, student + most)
        stop = max(first + 1, min(fitting, bisect_right(teacher_ends, teacher + most)))
        student_stop, teacher_stop = student_ends[stop - 1], teacher_ends[stop - 1]
        pair_stop = bisect_right(pairs, stop - 1)
        yield TileRange(
            slice(first, stop),
            slice(student, student_stop),
            slice(teacher, teacher_stop),
            slice(pair, pair_stop),
        )
        first, student, teacher, pair = stop, student_stop, teacher_stop, pair_stop


def _bands(tiles: Sequence[TileRange], most: int) -> Iterator[slice]:
    """The fewest runs of tiles in order, each as long as both models' rows allow."""
    first = 0
    for place, tile in enumerate(tiles):
        start = tiles[first]
        rows = tile.student.stop - start.student.start, tile.teacher.stop - start.teacher.start
        if place > first and max(rows) > most:
            yield slice(first, place)
            first = place
    if tiles:
        yield slice(first, len(tiles))
