"""The stored chunks of a sharded checkpoint as memory-mapped tensors, of any layout.

A rank reads the parts of the chunks that overlap its shards, straight into the live tensors.
"""

from __future__ import annotations

import io
import pickle
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from typing_extensions import Buffer

from megatron_distill.errors import CheckpointError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.hugging_face.settings import one_line
from megatron_distill.models.parameters import LayerIndex, parameters
from megatron_distill.runtime.collectives import together
from megatron_distill.train.checkpoint.shards import (
    Part,
    Shard,
    Window,
    exchange,
    own_parts,
)
from megatron_distill.train.checkpoint.writer import METADATA_FILE

# Errors that torch raises for a damaged pickle or a damaged archive around one.
_UNPICKLING_ERRORS: tuple[type[Exception], ...] = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    BadZipFile,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)

# Besides torch's own tensors, in the states of random generators.
_RECONSTRUCT: Callable[..., Any] = np.empty(0).__reduce__()[0]  # type: ignore[assignment]
_PLAIN: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    _RECONSTRUCT,
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),  # of numpy 1
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
]


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


class _Rows:
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
    """Chunks by their place in a checkpoint, memory-mapped: only accessed pages are read.

    torch loads a whole chunk, however small the part that a rank needs. Raises CheckpointError for
    files that are missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: tuple[MetadataIndex, Tensor] | None = None
        self._rows: dict[str, _Rows] = {}
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
            self._rows[key] = _Rows(self.find(key))
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
        path = self.folder / place.relative_path
        try:
            with path.open("rb") as stream, torch.serialization.safe_globals(_PLAIN):
                part = io.BufferedReader(_Part(stream, place.offset, place.length))
                return torch.load(cast(IO[bytes], part), weights_only=True)
        except _UNPICKLING_ERRORS as error:
            raise self._broken(path, key, error) from error

    def verify(self, *, share: int, shares: int) -> None:
        """Compare the contents of every `shares`-th file with their checksums.

        In the layout that wrote them, these are the files that this rank reads. Raises
        CheckpointError.
        """
        places: dict[str, list[tuple[int, int, str]]] = {}
        for index, place in self.metadata.storage_data.items():
            entry = (place.offset, place.length, index.fqn)
            places.setdefault(place.relative_path, []).append(entry)
        for name in sorted(places, key=_rank_of)[share::shares]:
            self._verify_file(self.folder / name, sorted(places[name]))

    def _verify_file(self, path: Path, entries: Sequence[tuple[int, int, str]]) -> None:
        key = ""
        try:
            with path.open("rb") as stream:
                for offset, length, name in entries:
                    key = name
                    part = io.BufferedReader(_Part(stream, offset, length), 2**20)
                    with ZipFile(cast(IO[bytes], part)) as archive:
                        if archive.testzip() is not None:
                            raise BadZipFile("its checksum differs")
        except FileNotFoundError:
            raise self._missing(path, key) from None
        except _UNPICKLING_ERRORS as error:
            raise self._broken(path, key, error) from error

    def misfit(self, reason: str) -> CheckpointError:
        """Return the error of a checkpoint that lacks a part."""
        return CheckpointError(
            f"{self.folder} is damaged or does not fit this model: {reason}; remove it to continue "
            "from an earlier one, or name a checkpoint of the same architecture"
        )

    @staticmethod
    def _missing(path: Path, key: str) -> CheckpointError:
        holds = f" (it contains {key})" if key else ""
        return CheckpointError(
            f"{path} is missing{holds}: the checkpoint is damaged; use another one"
        )

    @staticmethod
    def _broken(path: Path, key: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{path} is damaged at {key} ({one_line(error)}); use another checkpoint"
        )

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
            raise self._missing(path, index.fqn) from None
        except _UNPICKLING_ERRORS as error:
            raise self._broken(path, index.fqn, error) from error
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
    path = folder / METADATA_FILE
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


def _rank_of(name: str) -> tuple[int, str]:
    """Return the rank that wrote a file, `__12_0.distcp`, for sorting."""
    number = name.removeprefix("__").partition("_")[0]
    return (int(number) if number.isdigit() else 0, name)


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


def load_shards(shards: Sequence[Shard], chunks: MappedChunks, *, rank: int, world: int) -> int:
    """Fill shards from a checkpoint of any layout; return the bytes that this rank has read.

    Every byte of the files is compared with its checksum by one rank. Replicas read parts of what
    they hold, and exchange them. Memory: the mapped pages of one chunk at a time. Raises
    CheckpointError on all ranks when the checkpoint does not fit the model or is damaged.

    Collective: the world, one all-gather of a short object per rank; the groups of replicas, one
    broadcast of each replicated byte.
    """
    count = 0
    with together():
        chunks.verify(share=rank, shares=world)
        count = _read(own_parts(shards), chunks)
    exchange(shards)
    return count


@torch.no_grad()
def _read(parts: Sequence[Part], chunks: MappedChunks) -> int:
    """Fill parts in the order of the files."""
    copies = [
        (place.relative_path, place.offset, number, overlap, target)
        for part in parts
        for window in part.windows()
        for number, (overlap, target) in enumerate(_overlaps(window, chunks))
        for place in (chunks.metadata.storage_data[overlap.index],)
    ]
    copies.sort(key=lambda copy: copy[:3])
    for *_, overlap, target in copies:
        target.copy_(chunks.part(overlap))
    return sum(overlap.nbytes for *_, overlap, _ in copies)


def _overlaps(window: Window, chunks: MappedChunks) -> Iterator[tuple[Overlap, Tensor]]:
    """Yield the stored parts of a window, and where they belong in it."""
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
        sizes = (rows, *sizes[1:])
    for overlap in chunks.overlaps(window.key, window.offset, sizes):
        yield overlap, _window(window.data, overlap.in_window, overlap.sizes)


def _window(tensor: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    for axis, (first, length) in enumerate(zip(start, shape, strict=True)):
        tensor = tensor.narrow(axis, first, length)
    return tensor
