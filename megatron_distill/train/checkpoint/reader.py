"""The stored chunks of a sharded checkpoint as memory-mapped tensors."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from typing_extensions import Buffer

from megatron_distill.errors import CheckpointError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.hugging_face.settings import one_line
from megatron_distill.models.weights import Place, parameters

_METADATA_FILE = ".metadata"
# Errors that torch raises for a damaged pickle or a damaged archive around one.
_UNPICKLING_ERRORS = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class MappedChunks:
    """Chunks by their place in a checkpoint, memory-mapped: only accessed pages are read.

    torch loads a whole chunk, however small the part that a rank needs. Raises CheckpointError for
    files that are missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: tuple[MetadataIndex, Tensor] | None = None
        self.metadata = _read_metadata(folder)

    def chunk(self, index: MetadataIndex, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a stored chunk; raises CheckpointError."""
        if self._last is None or self._last[0] != index:
            self._last = (index, self._map(index, shape, dtype))
        return self._last[1]

    def _map(self, index: MetadataIndex, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        place = self.metadata.storage_data[index]
        path = self.folder / place.relative_path
        try:
            with path.open("rb") as stream, FakeTensorMode():
                archive = io.BufferedReader(_Part(stream, place.offset, place.length))
                stored = torch.load(cast(IO[bytes], archive), weights_only=True)
            # For a fake tensor torch reads everything but the bytes, and records their offset.
            start = place.offset + stored.untyped_storage()._checkpoint_offset  # noqa: SLF001
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing (it contains {index.fqn}): the checkpoint is damaged; use "
                "another one"
            ) from None
        except _UNPICKLING_ERRORS as error:
            raise CheckpointError(
                f"{path} is damaged at {index.fqn} ({one_line(error)}); use another checkpoint"
            ) from error
        is_as_said = stored.shape == shape and stored.dtype == dtype and stored.is_contiguous()
        if not is_as_said or stored.storage_offset():
            raise CheckpointError(
                f"{path} has a tensor at {index.fqn} that differs from the metadata; use another "
                "checkpoint"
            )
        # Copy on write, which never happens: torch requires writable memory.
        count = shape.numel() * dtype.itemsize
        mapped = np.memmap(path, np.uint8, "c", offset=start, shape=(count,))
        return torch.from_numpy(mapped).view(dtype).view(shape)


def _read_metadata(folder: Path) -> Metadata:
    path = folder / _METADATA_FILE
    try:
        metadata = FileSystemReader(str(folder)).read_metadata()
        if not isinstance(metadata, Metadata) or metadata.storage_data is None:
            raise TypeError(f"it contains {type(metadata).__name__}")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing, which every checkpoint needs; use another one"
        ) from None
    except _UNPICKLING_ERRORS as error:
        raise CheckpointError(f"{path} is damaged ({error}); use another checkpoint") from error
    return metadata


class _Part(io.RawIOBase):
    """A part of an open file as a separate read-only file."""

    def __init__(self, stream: IO[bytes], start: int, length: int) -> None:
        self._stream, self._start, self._length = stream, start, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset from the part's start, from here, or from the part's end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        """Fill a buffer up to the end of the part."""
        wanted = memoryview(buffer)
        self._stream.seek(self._start + self._at)
        found = self._stream.read(max(0, min(len(wanted), self._length - self._at)))
        wanted[: len(found)] = found
        self._at += len(found)
        return len(found)


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
        self._stored = {key: self._find(key) for key in self._parameters}
        self._check_shapes()

    def dtype(self, key: str) -> torch.dtype:
        """The dtype in which a tensor is stored, the same in every layer."""
        return self._stored[key].properties.dtype

    def read_into(self, destination: Tensor, key: str, place: Place, start: Sequence[int]) -> None:
        """Copy a window of the tensor at `place` into `destination`; see `WeightSource`."""
        rows = max(0, self._parameters[key].shape[0] - start[0])
        destination[rows:].zero_()
        destination = destination[:rows]
        if not destination.numel():
            return
        wanted = destination.view(*(1 for _ in place), *destination.shape)
        for at, part in self._parts(key, (*place, *start), wanted.shape):
            _window(wanted, at, part.shape).copy_(part)

    def read(
        self, key: str, place: Place, start: Sequence[int], shape: tuple[int, ...]
    ) -> Tensor | None:
        """Return a window that lies in one file, or None where it must be assembled."""
        leading = tuple(1 for _ in place)
        parts = self._parts(key, (*place, *start), torch.Size([*leading, *shape]))
        _, part = next(parts)
        return part.view(shape) if part.shape == (*leading, *shape) else None

    def _parts(
        self, key: str, start: tuple[int, ...], shape: torch.Size
    ) -> Iterator[tuple[torch.Size, Tensor]]:
        """Yield the part of a window in each chunk, and its position in the window."""
        stored = self._stored[key]
        wanted = ChunkStorageMetadata(offsets=torch.Size(start), sizes=shape)
        items = create_read_items_for_chunk_list(key, stored, [wanted])
        if sum(item.lengths.numel() for item in items) != shape.numel():
            raise self._damaged(f"{key} is not stored as a whole")
        for item in items:
            index = item.storage_index
            assert index.index is not None
            sizes = stored.chunks[index.index].sizes
            chunk = self._chunks.chunk(index, sizes, stored.properties.dtype)
            yield item.dest_offsets, _window(chunk, item.storage_offsets, item.lengths)

    def _find(self, key: str) -> TensorStorageMetadata:
        stored = self._chunks.metadata.state_dict_metadata.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            raise self._damaged(f"it has no tensor {key}")
        return stored

    def _check_shapes(self) -> None:
        for parameter in self._parameters.values():
            leading = parameter.leading_shape(self.architecture)
            wanted, found = (*leading, *parameter.shape), tuple(self._stored[parameter.key].size)
            padded = parameter.is_vocabulary and found[0] >= wanted[0] and found[1:] == wanted[1:]
            if found != wanted and not padded:
                raise self._damaged(f"{parameter.key} has shape {list(found)}, not {list(wanted)}")

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder} is damaged or of another architecture: {reason}; use another one"
        )


def _window(tensor: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    for axis, (first, length) in enumerate(zip(start, shape, strict=True)):
        tensor = tensor.narrow(axis, first, length)
    return tensor
