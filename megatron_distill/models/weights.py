"""Initial weights, from a source or at random; every rank fills only its slices.

Random weights are a function of the seed, the parameter's name and the place of a tile in it,
independent of the layout. A sharded checkpoint describes every local tensor by its position in a
global one. A rank draws the tiles of the random tensor that its window touches. So a model under
any tensor, pipeline, virtual pipeline or expert layout starts from the same weights.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.transformer import MegatronModule
from torch import Tensor

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.parameters import EXPERT_BIAS, LAYERS, LayerIndex
from megatron_distill.runtime.groups import Groups


class WeightSource(Protocol):
    """A source of a model's global tensors by their names in sharded checkpoints."""

    def read_into(
        self, destination: Tensor, key: str, place: LayerIndex, start: Sequence[int]
    ) -> None:
        """Copy a window of the tensor at `place` (layer, expert) into `destination`.

        `start` is the window's first row and column. Rows past the real vocabulary become zero.
        """
        ...

    def read(
        self, key: str, place: LayerIndex, start: Sequence[int], shape: tuple[int, ...]
    ) -> Tensor | None:
        """Return a window as a memory-mapped view of one file, or None if not contiguous there.

        The window has real rows only.
        """
        ...


class WindowReader:
    """Temporary windows of a source: views of a file, or assembled in one reused buffer.

    The buffer is reused because the first touch of new memory is slow.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(
        self,
        key: str,
        place: LayerIndex,
        start: Sequence[int],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return a read-only window in `dtype`, valid until the next read."""
        found = self._source.read(key, place, start, shape)
        if found is not None and found.dtype == dtype:
            return found
        count = torch.Size(shape).numel() * dtype.itemsize
        if self._buffer.numel() < count:
            self._buffer = torch.empty(count, dtype=torch.uint8)
        window = self._buffer[:count].view(dtype).view(shape)
        self._source.read_into(window, key, place, start)
        return window


@torch.no_grad()
def fill(
    chunks: Sequence[torch.nn.Module],
    source: WeightSource,
    *,
    groups: Groups,
    keep_layers: Sequence[int] | None = None,
) -> None:
    """Fill every parameter in place, in any layout.

    `keep_layers`: for each of our layers, the source layer of its initial weights.
    """
    for part in sharded_tensors(chunks, groups):
        read_part(part, source, keep_layers=keep_layers)


def read_part(
    part: ShardedTensor, source: WeightSource, *, keep_layers: Sequence[int] | None
) -> None:
    """Fill one part of a tensor; `keep_layers` as in `fill`."""
    assert part.data is not None
    key, place = _named_place(part)
    if place and keep_layers is not None:
        place = (keep_layers[place[0]], *place[1:])
    source.read_into(part.data, key, place, part.global_offset[part.prepend_axis_num :])


_LAYER_KEY = re.compile(rf"({re.escape(LAYERS)})(\d+)\.(.+)")


def _named_place(part: ShardedTensor) -> tuple[str, LayerIndex]:
    """Return the name of a tensor of the model and its place, from its part of a checkpoint."""
    index = part.global_offset[: part.prepend_axis_num]
    found = _LAYER_KEY.fullmatch(part.key)
    if found is None:
        return part.key, index
    return found[1] + found[3], (int(found[2]), *index)


def converted_dtype(key: str, own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor after a conversion to `wanted`; None: its own.

    The router's bias stays as it is, because it is fp32 in models of every precision.
    """
    return own if wanted is None or key.endswith(EXPERT_BIAS) else wanted


# Projections into the residual stream start smaller (GPT-2, section 2.3).
_RESIDUAL_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")
_VOCABULARY_TENSORS = ("word_embeddings.weight", "output_layer.weight")


def sharded_parameters(
    chunks: Sequence[torch.nn.Module], groups: Groups
) -> Iterator[tuple[Tensor, list[ShardedTensor]]]:
    """Yield every tensor of the model on this rank, with the sharding description of its parts.

    Most tensors are one part; gate and up projection are one tensor and two parts.
    """
    for chunk in chunks:
        for value in described_tensors(chunk, groups):
            yield value.data, parts_of(value)


def described_tensors(
    chunk: torch.nn.Module, groups: Groups
) -> list[ShardedTensor | ShardedTensorFactory]:
    """Return the sharding description of every tensor of a chunk, by shape alone."""
    state = cast(MegatronModule, chunk).sharded_state_dict(
        metadata={"dp_cp_group": groups.data_context}
    )
    kinds = (ShardedTensor, ShardedTensorFactory)
    return [value for value in nested_values(state) if isinstance(value, kinds)]


def parts_of(value: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """Return the parts of a described tensor, which refer to its memory."""
    parts = value.build() if isinstance(value, ShardedTensorFactory) else value
    return [part for part in nested_values({"part": parts}) if isinstance(part, ShardedTensor)]


def sharded_tensors(chunks: Sequence[torch.nn.Module], groups: Groups) -> Iterator[ShardedTensor]:
    """Yield the sharding description of every part of every tensor of the model on this rank."""
    for _, parts in sharded_parameters(chunks, groups):
        yield from parts


def own_parts(
    chunks: Sequence[torch.nn.Module], groups: Groups
) -> Iterator[tuple[str, LayerIndex, ShardedTensor]]:
    """Yield the parts of tensors whose first replica this rank has: name, place and part.

    Over all ranks every number of the model is in one of them.
    """
    for part in sharded_tensors(chunks, groups):
        if is_main_replica(part.replica_id):
            yield *_named_place(part), part


@torch.no_grad()
def initialise(
    chunks: Sequence[torch.nn.Module], architecture: Architecture, *, seed: int, groups: Groups
) -> None:
    """Fill every parameter in place; padded vocabulary rows become zero.

    Extra memory: `_TILE` rows of a local tensor at a time.
    """
    for part in sharded_tensors(chunks, groups):
        initialise_part(part, architecture, seed=seed)


def initialise_part(part: ShardedTensor, architecture: Architecture, *, seed: int) -> None:
    """Fill one part of a tensor as `initialise` does."""
    assert part.data is not None
    assert part.flattened_range is None
    layers = part.prepend_axis_num
    key = part.key
    if key.endswith("bias"):
        part.data.zero_()
    elif "norm" in key:
        part.data.fill_(0.0 if architecture.is_zero_centered else 1.0)
    else:
        std = architecture.init_std
        if key.endswith(_RESIDUAL_PROJECTIONS):
            std /= math.sqrt(2.0 * architecture.num_layers)
        name = f"{seed}/{key}/{'.'.join(map(str, part.global_offset[:layers]))}"
        row, column = part.global_offset[layers:]
        vocabulary = architecture.vocab_size if key.endswith(_VOCABULARY_TENSORS) else None
        _fill_random(part.data, name, row, column, std=std, end=vocabulary)


def _fill_random(
    window: Tensor, name: str, row: int, column: int, *, std: float, end: int | None
) -> None:
    """Fill `window [rows, columns]` with its part of a random matrix, from `row` and `column` on.

    Rows from `end` on are zero.
    """
    stop = row + window.shape[0]
    drawn = stop if end is None else min(stop, end)
    window[max(drawn - row, 0) :].zero_()
    if drawn <= row:  # a rank of padding alone
        return
    for first in range(row - row % _TILE, drawn, _TILE):
        top, bottom = max(first, row), min(first + _TILE, drawn)
        rows = random_rows(name, (top, bottom), (column, column + window.shape[1]))
        window[top - row : bottom - row].copy_(rows.mul_(std))


# A tile is seeded by itself. Large enough that seeding costs little, small beside a matrix.
_TILE = 256


def random_rows(name: str, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    """Return a window of the standard normal matrix of a name, fp32; `rows` are of one tile.

    The matrix has no end, so neither padding nor a layout changes it.
    """
    (top, bottom), (left, right) = rows, columns
    first = top - top % _TILE
    assert bottom <= first + _TILE, rows
    window = torch.empty(bottom - top, right - left)
    for start in range(left - left % _TILE, right, _TILE):
        digest = hashlib.sha256(f"{name}/{first // _TILE}.{start // _TILE}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        tile = torch.randn(_TILE, _TILE, generator=generator)
        begin, stop = max(start, left), min(start + _TILE, right)
        window[:, begin - left : stop - left] = tile[
            top - first : bottom - first, begin - start : stop - start
        ]
    return window
