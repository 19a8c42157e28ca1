"""The stored chunks of a sharded checkpoint as tensors that lie in their files."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from typing_extensions import Buffer

from megatron_distill.errors import CheckpointError
from megatron_distill.models.hugging_face.validation import one_line

_METADATA_FILE = ".metadata"
# What reading a damaged pickle, or torch's archive around one, raises.
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
_DATA = "/data/0"  # the entry of torch's archive that holds a tensor's bytes, uncompressed
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip entry; lengths of its name and extra field


class MappedChunks:
    """Chunks by their place in a checkpoint, mapped: what is not looked at is not read.

    torch loads a chunk whole, however little of it a rank wants. Raises CheckpointError for files
    that are missing or damaged.
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
            with path.open("rb") as stream:
                part = _Part(stream, place.offset, place.length)
                archive = cast(IO[bytes], io.BufferedReader(part))
                start = place.offset + _data_start(archive, size=shape.numel() * dtype.itemsize)
                archive.seek(0)
                stored = torch.load(archive, map_location="meta", weights_only=True)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing, which holds {index.fqn}; the checkpoint is damaged, use "
                "another one"
            ) from None
        except (zipfile.BadZipFile, *_UNPICKLING_ERRORS) as error:
            raise CheckpointError(
                f"{path} is damaged at {index.fqn} ({one_line(error)}); use another checkpoint"
            ) from error
        is_as_said = stored.shape == shape and stored.dtype == dtype and stored.is_contiguous()
        if not is_as_said or stored.storage_offset():
            raise CheckpointError(
                f"{path} holds another tensor at {index.fqn} than its metadata says; use another "
                "checkpoint"
            )
        # Copy on write, which never happens: torch wants memory that could be written.
        count = shape.numel() * dtype.itemsize
        mapped = np.memmap(path, np.uint8, "c", offset=start, shape=(count,))
        return torch.from_numpy(mapped).view(dtype).view(shape)


def _read_metadata(folder: Path) -> Metadata:
    path = folder / _METADATA_FILE
    try:
        metadata = FileSystemReader(str(folder)).read_metadata()
        if not isinstance(metadata, Metadata) or metadata.storage_data is None:
            raise TypeError(f"it holds {type(metadata).__name__}")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing, without which no checkpoint can be read; use another one"
        ) from None
    except _UNPICKLING_ERRORS as error:
        raise CheckpointError(f"{path} is damaged ({error}); use another checkpoint") from error
    return metadata


def _data_start(archive: IO[bytes], *, size: int) -> int:
    """Return where the tensor's bytes start in torch's archive; raises ValueError, BadZipFile."""
    with zipfile.ZipFile(archive) as entries:
        (entry,) = (one for one in entries.infolist() if one.filename.endswith(_DATA))
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != size:
        raise ValueError(f"{entry.file_size} bytes where {size} are described")
    archive.seek(entry.header_offset)
    name, extra = _LOCAL_HEADER.unpack(archive.read(_LOCAL_HEADER.size))
    return entry.header_offset + _LOCAL_HEADER.size + name + extra


class _Part(io.RawIOBase):
    """A part of an open file as a file of its own, for reading."""

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
        """Fill a buffer as far as the part goes."""
        wanted = memoryview(buffer)
        self._stream.seek(self._start + self._at)
        found = self._stream.read(max(0, min(len(wanted), self._length - self._at)))
        wanted[: len(found)] = found
        self._at += len(found)
        return len(found)
