"""The stored chunks of a sharded checkpoint, read in any layout.

A rank reads the parts of the chunks that overlap its shards. Their checksums are joined with those
of the ranks that read the rest, so that no byte is read again to be verified.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_distill.errors import CheckpointError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.parameters import LayerIndex, parameters
from megatron_distill.runtime.collectives import together
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.checkpoint.archive import (
    UNPICKLING_ERRORS,
    BlockReader,
    StoredTensor,
    locate,
    read_object,
)
from megatron_distill.train.checkpoint.copies import fill_copies
from megatron_distill.train.checkpoint.description import USE_ANOTHER, resumed_from
from megatron_distill.train.checkpoint.shards import (
    Shard,
    ShardPart,
    TensorWindow,
    exchange_parts,
    own_parts,
)
from megatron_distill.train.checkpoint.writer import METADATA_FILE


@dataclass(frozen=True)
class Overlap:
    """The common part of a stored chunk and a wanted window, of `sizes`."""

    index: MetadataIndex
    chunk_shape: torch.Size
    dtype: torch.dtype
    in_chunk: tuple[int, ...]
    in_window: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


class _TensorChunks:
    """The chunks of one tensor by their position along its first axis."""

    def __init__(self, stored: TensorStorageMetadata) -> None:
        self._chunks = sorted(stored.chunks, key=lambda chunk: tuple(chunk.offsets))
        self._starts = [chunk.offsets[0] if chunk.offsets else 0 for chunk in self._chunks]
        self._most = max((chunk.sizes[0] for chunk in self._chunks if chunk.sizes), default=1)
        self._dtype = stored.properties.dtype

    def overlaps(self, key: str, offset: Sequence[int], sizes: Sequence[int]) -> Iterator[Overlap]:
        """Yield the overlaps with a window, in the order of their first rows."""
        start, count = (offset[0], sizes[0]) if offset else (0, 1)
        first = bisect_left(self._starts, start - self._most + 1)
        for chunk in self._chunks[first : bisect_left(self._starts, start + count)]:
            begin = tuple(map(max, offset, chunk.offsets))
            ends = (
                min(a + n, b + m)
                for a, n, b, m in zip(offset, sizes, chunk.offsets, chunk.sizes, strict=True)
            )
            common = tuple(end - at for at, end in zip(begin, ends, strict=True))
            if all(length > 0 for length in common):
                yield Overlap(
                    index=MetadataIndex(key, chunk.offsets),
                    chunk_shape=chunk.sizes,
                    dtype=self._dtype,
                    in_chunk=tuple(a - b for a, b in zip(begin, chunk.offsets, strict=True)),
                    in_window=tuple(a - b for a, b in zip(begin, offset, strict=True)),
                    sizes=common,
                )


class MappedChunks:
    """Chunks by their place in a checkpoint, memory-mapped where they are read piece by piece.

    torch loads a whole chunk, however small the part that a rank needs. Raises CheckpointError for
    files that are missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: tuple[MetadataIndex, Tensor] | None = None
        self._rows: dict[str, _TensorChunks] = {}
        self.metadata = _read_metadata(folder)

    def find(self, key: str) -> TensorStorageMetadata:
        """Return the description of a tensor; raises CheckpointError where there is none."""
        stored = self.metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise self.misfit(f"it has no tensor {key}")
        return stored

    def overlaps(self, key: str, offset: Sequence[int], sizes: Sequence[int]) -> list[Overlap]:
        """Return the parts of a window in each chunk; raises CheckpointError if some are absent."""
        if key not in self._rows:
            self._rows[key] = _TensorChunks(self.find(key))
        found = list(self._rows[key].overlaps(key, offset, sizes))
        if sum(torch.Size(part.sizes).numel() for part in found) != torch.Size(sizes).numel():
            raise self.misfit(f"{key} is not stored as a whole")
        return found

    def part(self, overlap: Overlap) -> Tensor:
        """Return an overlap's values, mapped; raises CheckpointError."""
        chunk = self.chunk(overlap.index, overlap.chunk_shape, overlap.dtype)
        return _window(chunk, overlap.in_chunk, overlap.sizes)

    def object(self, key: str) -> Any:
        """Return a stored object of plain values and arrays; raises CheckpointError."""
        place = self.metadata.storage_data.get(MetadataIndex(key))
        if place is None:
            raise self.misfit(f"it has no {key}")
        return read_object(self.folder / place.relative_path, key, place.offset, place.length)

    def misfit(self, reason: str) -> CheckpointError:
        """Return the error of a checkpoint that lacks a part."""
        return CheckpointError(
            f"{self.folder} is damaged or does not fit this model: {reason}. Remove it to continue "
            "from an earlier one, or name a checkpoint of the same architecture"
        )

    def chunk(self, index: MetadataIndex, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a stored chunk, mapped; raises CheckpointError."""
        if self._last is None or self._last[0] != index:
            self._last = (index, self.located(index, shape, dtype, checked=False).mapped())
        return self._last[1]

    def located(
        self, index: MetadataIndex, shape: torch.Size, dtype: torch.dtype, *, checked: bool
    ) -> StoredTensor:
        """Return the place of a stored chunk, with its checksum if asked; see `locate`."""
        place = self.metadata.storage_data[index]
        path = self.folder / place.relative_path
        return locate(path, index.fqn, place.offset, place.length, shape, dtype, checked=checked)


def _read_metadata(folder: Path) -> Metadata:
    path = folder / METADATA_FILE
    try:
        metadata = FileSystemReader(str(folder)).read_metadata()
        if not isinstance(metadata, Metadata) or metadata.storage_data is None:
            raise TypeError(f"it contains {type(metadata).__name__}")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing, which every checkpoint needs; {USE_ANOTHER}"
        ) from None
    except UNPICKLING_ERRORS as error:
        raise CheckpointError(f"{path} is damaged ({error}); {USE_ANOTHER}") from error
    return metadata


class CheckpointWeights:
    """The weights of a checkpoint of this library under their global names; a `WeightSource`.

    Raises CheckpointError: files that are missing or damaged, a tensor of the architecture that the
    checkpoint lacks, or one of a different shape.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self.folder = folder
        self.architecture = architecture
        self._chunks = MappedChunks(folder)
        self._parameters = {parameter.key: parameter for parameter in parameters(architecture)}
        self._stored = {
            parameter.key: [self._chunks.find(key) for key in parameter.stored_keys(architecture)]
            for parameter in self._parameters.values()
        }
        self._check_shapes()

    def dtype(self, key: str) -> torch.dtype:
        """The dtype in which a tensor is stored, the same in every layer."""
        return self._stored[key][0].properties.dtype

    def read_into(
        self, destination: Tensor, key: str, place: LayerIndex, start: Sequence[int]
    ) -> None:
        """Copy a window of the tensor at `place` into `destination`; see `WeightSource`."""
        rows = max(0, self._parameters[key].shape[0] - start[0])
        destination[rows:].zero_()
        destination = destination[:rows]
        if not destination.numel():
            return
        key, index = self._parameters[key].stored(place, self.architecture)
        wanted = destination.view(*(1 for _ in index), *destination.shape)
        for overlap in self._chunks.overlaps(key, (*index, *start), wanted.shape):
            part = self._chunks.part(overlap)
            _window(wanted, overlap.in_window, overlap.sizes).copy_(part)

    def read(
        self, key: str, place: LayerIndex, start: Sequence[int], shape: tuple[int, ...]
    ) -> Tensor | None:
        """Return a window that lies in one file, or None where it must be assembled."""
        key, index = self._parameters[key].stored(place, self.architecture)
        leading = (*(1 for _ in index), *shape)
        first, *others = self._chunks.overlaps(key, (*index, *start), leading)
        return None if others else self._chunks.part(first).view(shape)

    def _check_shapes(self) -> None:
        for parameter in self._parameters.values():
            wanted = (*parameter.leading_shape(self.architecture), *parameter.shape)
            for stored in self._stored[parameter.key]:
                found = tuple(stored.size)
                padded = parameter.is_vocabulary and found[0] >= wanted[0]
                if found != wanted and not (padded and found[1:] == wanted[1:]):
                    raise self._chunks.misfit(
                        f"{parameter.key} has shape {list(found)}, not {list(wanted)}"
                    )


def load_shards(
    shards: Sequence[Shard], chunks: MappedChunks, groups: Groups, *, resumes: bool = False
) -> int:
    """Fill shards from a checkpoint of any layout; return the bytes that this rank has read.

    The ranks together read each byte once, and compare it with its checksum. Replicas read parts of
    what they hold, and exchange them. Memory: one block of 4 MiB. Raises CheckpointError on all
    ranks when the checkpoint does not fit the model or is damaged; `resumes`: see `resumed_from`.

    Collective: the world, three all-gathers of short objects; the groups of replicas, one broadcast
    of each replicated byte. The tensor-parallel ranks, and the world with pipeline stages, see
    `fill_copies`.
    """
    stored = [shard for shard in shards if shard.is_stored]
    found = _Checked()
    with together(), resumed_from(chunks.folder) if resumes else nullcontext():
        found = _read(own_parts(stored), chunks)
    every: list[Any] = [None] * groups.world.size()
    dist.all_gather_object(every, found.partial_registers(), group=groups.world)
    with together(), resumed_from(chunks.folder) if resumes else nullcontext():
        found.check(np.concatenate(every))
    exchange_parts(stored)
    for group, is_divided in ((groups.tensor, True), (groups.world, groups.pipeline.size() > 1)):
        if is_divided and group.size() > 1:
            fill_copies(shards, group)
    return found.nbytes


class _Checked:
    """The registers of the chunks that this rank has read, as a whole or in part."""

    def __init__(self) -> None:
        self.nbytes = 0
        # By their number in the metadata: the chunk, the register, and the bytes of the parts.
        self._partial: dict[int, tuple[StoredTensor, int, int]] = {}

    def add(self, number: int, stored: StoredTensor, register: int, nbytes: int) -> None:
        """Note a chunk; raises CheckpointError for one that was read as a whole and differs."""
        self.nbytes += nbytes
        if nbytes < stored.nbytes:
            self._partial[number] = (stored, register, nbytes)
        elif register != stored.register:
            raise stored.differs()

    def partial_registers(self) -> NDArray[np.int64]:
        """Return number, register and bytes of each chunk that was read in part."""
        rows = [(number, value, size) for number, (_, value, size) in self._partial.items()]
        return np.array(rows, np.int64).reshape(-1, 3)

    def check(self, registers: NDArray[np.int64]) -> None:
        """Compare chunks that were read in part with those parts of all ranks.

        Raises CheckpointError.
        """
        own = np.fromiter(self._partial, np.int64, len(self._partial))
        joined = dict.fromkeys(self._partial, (0, 0))
        for number, register, nbytes in registers[np.isin(registers[:, 0], own)].tolist():
            value, count = joined[number]
            joined[number] = (value ^ register, count + nbytes)
        for number, (stored, _, _) in self._partial.items():
            value, count = joined[number]
            assert count == stored.nbytes, f"the ranks read {count} bytes of {stored}"
            if value != stored.register:
                raise stored.differs()


@torch.no_grad()
def _read(parts: Iterable[ShardPart], chunks: MappedChunks) -> _Checked:
    """Fill parts in the order of the files; raises CheckpointError."""
    numbers = {index: number for number, index in enumerate(chunks.metadata.storage_data)}
    copies = [
        (place.relative_path, place.offset, numbers[overlap.index], overlap, target)
        for part in parts
        for window in part.windows()
        for overlap, target in _overlaps(window, chunks)
        for place in (chunks.metadata.storage_data[overlap.index],)
    ]
    copies.sort(key=lambda copy: copy[:3])
    reader, found = BlockReader(), _Checked()
    for number, group in groupby(copies, key=lambda copy: copy[2]):
        overlaps = [(overlap, target) for *_, overlap, target in group]
        one = overlaps[0][0]
        stored = chunks.located(one.index, one.chunk_shape, one.dtype, checked=True)
        register, nbytes = 0, 0
        for overlap, target in overlaps:
            register ^= reader.read(stored, overlap.in_chunk, overlap.sizes, target)
            nbytes += overlap.nbytes
        found.add(number, stored, register, nbytes)
    return found


def _overlaps(
    window: TensorWindow, chunks: MappedChunks
) -> Iterator[tuple[Overlap, Tensor | None]]:
    """Yield the stored parts of a window, and where they belong in it.

    Stored rows beyond those of this layout belong nowhere. They are of the window with the last
    element: their checksum is that of rows before them, too.
    """
    stored = chunks.find(window.key).size
    sizes = tuple(window.data.shape)
    if tuple(stored) != window.global_shape:
        if not window.is_padded or tuple(stored[1:]) != window.global_shape[1:]:
            raise chunks.misfit(
                f"{window.key} has shape {list(stored)}, not {list(window.global_shape)}"
            )
        rows = min(sizes[0], stored[0] - window.offset[0])
        window.data[max(0, rows) :].zero_()
        if rows <= 0:
            return
        ends = tuple(at + n for at, n in zip(window.offset, sizes, strict=True))
        beyond = stored[0] - window.global_shape[0]
        if beyond > 0 and ends == window.global_shape:
            start = (window.global_shape[0], *(0 for _ in stored[1:]))
            for overlap in chunks.overlaps(window.key, start, (beyond, *stored[1:])):
                yield overlap, None
        sizes = (rows, *sizes[1:])
    for overlap in chunks.overlaps(window.key, window.offset, sizes):
        yield overlap, _window(window.data, overlap.in_window, overlap.sizes)


def _window(tensor: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    for axis, (first, length) in enumerate(zip(start, shape, strict=True)):
        tensor = tensor.narrow(axis, first, length)
    return tensor
