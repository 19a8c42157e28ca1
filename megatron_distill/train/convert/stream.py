"""Weights from a source into a sharded checkpoint, tensor by tensor, without a model in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron_distill.errors import CheckpointError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.parameters import LayerIndex, Parameter, placed
from megatron_distill.models.weights import WeightSource, WindowReader, converted_dtype
from megatron_distill.train.checkpoint.writer import RankWriter, alone, lowest_failure

_BLOCK_BYTES = 2**28  # of one tensor: the memory of a rank at a time


@dataclass(frozen=True)
class TensorRows:
    """Rows of one tensor, read, held and written at once."""

    parameter: Parameter
    place: LayerIndex
    dtype: torch.dtype
    start: int
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of these rows."""
        return (self.rows, *self.parameter.shape[1:])

    @property
    def nbytes(self) -> int:
        """The number of bytes of these rows."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class CutSource(WeightSource, Protocol):
    """A weight source with information on how to split its tensors."""

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor, the same in every layer."""
        ...

    def cuts(self, key: str, place: LayerIndex) -> Sequence[int]:
        """Return row boundaries, 0 among them, between which a tensor is contiguous in a file."""
        ...


def blocks_of(
    architecture: Architecture, source: CutSource, *, dtype: torch.dtype | None
) -> list[TensorRows]:
    """Cut all tensors into blocks, in the order of the model's computation.

    `dtype` None preserves each tensor's own.
    """
    return [
        TensorRows(parameter, place, wanted, start, stop - start)
        for parameter, place in placed(architecture)
        for wanted in (converted_dtype(parameter.key, source.dtype(parameter.key), dtype),)
        for start, stop in _rows(parameter, source.cuts(parameter.key, place), wanted)
    ]


def _rows(
    parameter: Parameter, cuts: Sequence[int], dtype: torch.dtype
) -> Iterator[tuple[int, int]]:
    row_bytes = torch.Size(parameter.shape[1:]).numel() * dtype.itemsize
    most = max(1, _BLOCK_BYTES // row_bytes)
    for first, last in pairwise([*cuts, parameter.shape[0]]):
        for start in range(first, last, most):
            yield start, min(start + most, last)


def blocks_by_rank(blocks: list[TensorRows], size: int) -> list[list[TensorRows]]:
    """Give each of `size` ranks consecutive blocks of about the same number of bytes."""
    total = sum(block.nbytes for block in blocks)
    share: list[list[TensorRows]] = [[] for _ in range(size)]
    before = 0
    for block in blocks:
        share[min(size - 1, (2 * before + block.nbytes) * size // (2 * total))].append(block)
        before += block.nbytes
    return share


def write_blocks(
    blocks: list[TensorRows],
    architecture: Architecture,
    source: WeightSource,
    folder: Path,
    *,
    done: Callable[[int], None],
) -> str | None:
    """Write this rank's share of the blocks; return None, or a failure's reason on every rank.

    `done` is called with the bytes of each block that has been read. Where reading failed on one
    rank, or it was interrupted, every rank raises CheckpointError or KeyboardInterrupt.

    Collective: world, torch's checkpoint planning and one exchange of results.
    """
    own_blocks = blocks_by_rank(blocks, dist.get_world_size())[dist.get_rank()]
    try:
        with _no_checksums():
            torch_checkpoint.save(
                {},
                storage_writer=RankWriter(folder),
                planner=_StreamingPlanner(own_blocks, architecture, source, done),
            )
    except CheckpointException as error:
        _raise_original(error)
        return lowest_failure(error)
    return None


@contextmanager
def _no_checksums() -> Iterator[None]:
    """Disable checksums in torch's archives; its reader never checks them.

    A checksum would read bytes that otherwise only the system copies, from file to file.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _raise_original(error: CheckpointException) -> None:
    """Raise the original error that torch wraps as a write error."""
    causes = [cause for _, (cause, _) in sorted(error.failures.items())]
    for kind in (KeyboardInterrupt, CheckpointError):
        for cause in causes:
            if isinstance(cause, kind):
                raise kind(*cause.args) from error


class _StreamingPlanner(DefaultSavePlanner):
    """Reads each block when the writer requests it."""

    def __init__(
        self,
        blocks: list[TensorRows],
        architecture: Architecture,
        source: WeightSource,
        done: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._blocks = {_index(block, architecture): block for block in blocks}
        self._architecture = architecture
        self._windows = WindowReader(source)
        self._done = done

    def create_local_plan(self) -> SavePlan:
        items = [self._item(index, block) for index, block in self._blocks.items()]
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        block = self._blocks[MetadataIndex(write_item.index.fqn, write_item.index.offset)]
        start = (block.start, *(0 for _ in block.shape[1:]))
        key = block.parameter.key
        tensor = self._windows.read(key, block.place, start, block.shape, block.dtype)
        tensor = alone(tensor)
        self._done(block.nbytes)
        return tensor.view(self._stored_shape(block))

    def _stored_shape(self, block: TensorRows) -> tuple[int, ...]:
        _, place = block.parameter.stored(block.place, self._architecture)
        return (*(1 for _ in place), *block.shape)

    def _item(self, index: MetadataIndex, block: TensorRows) -> WriteItem:
        leading = block.parameter.leading_shape(self._architecture)
        assert index.offset is not None
        return WriteItem(
            index=index,
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(
                    offsets=index.offset,
                    sizes=torch.Size(self._stored_shape(block)),
                ),
                properties=TensorProperties(dtype=block.dtype),
                size=torch.Size([*leading, *block.parameter.shape]),
            ),
        )


def _index(block: TensorRows, architecture: Architecture) -> MetadataIndex:
    key, place = block.parameter.stored(block.place, architecture)
    return MetadataIndex(key, torch.Size((*place, block.start, *(0 for _ in block.shape[1:]))))
