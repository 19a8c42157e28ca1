"""The stored chunks of a sharded checkpoint as tensors that lie in their files."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
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
            with path.open("rb") as stream, FakeTensorMode():
                archive = io.BufferedReader(_Part(stream, place.offset, place.length))
                stored = torch.load(cast(IO[bytes], archive), weights_only=True)
            # Of a fake tensor torch reads everything but the bytes, and notes where they are.
            start = place.offset + stored.untyped_storage()._checkpoint_offset  # noqa: SLF001
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing, which holds {index.fqn}; the checkpoint is damaged, use "
                "another one"
            ) from None
        except _UNPICKLING_ERRORS as error:
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
