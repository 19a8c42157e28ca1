"""A stored tensor in a rank's file: torch's archive format, read in blocks with its checksum."""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from typing_extensions import Buffer

from megatron_distill.errors import CheckpointError
from megatron_distill.models.hugging_face.settings import one_line
from megatron_distill.train.checkpoint.checksums import (
    joined,
    register_of,
    register_of_whole,
    shifted,
)
from megatron_distill.train.checkpoint.description import USE_ANOTHER

# Errors that torch raises for a damaged pickle or a damaged archive around one.
UNPICKLING_ERRORS: tuple[type[Exception], ...] = (
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

_BLOCK_BYTES = 2**22  # read at once: little beside a rank's share, much beside a system call
_VALUES = "/data/0"  # the record of a tensor's values


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor's values in a file, contiguous.

    `checksum`: their CRC-32; None where they are not compared.
    """

    path: Path
    key: str
    start: int
    shape: torch.Size
    dtype: torch.dtype
    checksum: int | None

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def register(self) -> int:
        """The register of its values; see `checksums`."""
        assert self.checksum is not None
        return register_of_whole(self.checksum, self.nbytes)

    def mapped(self) -> Tensor:
        """Return its values, memory-mapped."""
        # Copy on write, which never happens: torch requires writable memory.
        values = np.memmap(self.path, np.uint8, "c", offset=self.start, shape=(self.nbytes,))
        return torch.from_numpy(values).view(self.dtype).view(self.shape)

    def differs(self) -> CheckpointError:
        """Return the error of values with another checksum."""
        return broken(self.path, self.key, "its checksum differs")


def locate(
    path: Path,
    key: str,
    offset: int,
    length: int,
    shape: torch.Size,
    dtype: torch.dtype,
    *,
    checked: bool,
) -> StoredTensor:
    """Find a tensor in its archive; raises CheckpointError.

    `checked`: compare all of the archive but the values with checksums, and note theirs. Imported
    checkpoints have none.
    """
    try:
        with path.open("rb", buffering=0) as file:
            archive = cast(IO[bytes], _Part(file.fileno(), offset, length))
            checksum = _checksum(archive) if checked else None
            archive.seek(0)
            with FakeTensorMode():
                stored = torch.load(archive, weights_only=True)
        # For a fake tensor torch reads everything but the bytes, and records their offset.
        start = offset + stored.untyped_storage()._checkpoint_offset  # noqa: SLF001
    except FileNotFoundError:
        raise missing(path, key) from None
    except UNPICKLING_ERRORS as error:
        raise broken(path, key, one_line(error)) from error
    is_as_described = stored.shape == shape and stored.dtype == dtype and stored.is_contiguous()
    if not is_as_described or stored.storage_offset():
        raise CheckpointError(
            f"{path} has a tensor at {key} that differs from the metadata; {USE_ANOTHER}"
        )
    return StoredTensor(path, key, start, shape, dtype, checksum)


def _checksum(archive: IO[bytes]) -> int:
    """Return the checksum of an archive's values; raises BadZipFile where other records differ."""
    with ZipFile(archive) as records:
        found = None
        for record in records.infolist():
            if record.filename.endswith(_VALUES):
                found = record.CRC
            else:
                records.read(record)
    if found is None:
        raise BadZipFile("it has no values")
    return found


def read_object(path: Path, key: str, offset: int, length: int) -> Any:
    """Return a stored object of plain values and arrays; raises CheckpointError."""
    try:
        content = bytearray(length)
        with path.open("rb", buffering=0) as file:
            _read_at(file.fileno(), memoryview(content), offset)
        archive = io.BytesIO(content)
        with ZipFile(archive) as records:
            if records.testzip() is not None:
                raise BadZipFile("its checksum differs")
        archive.seek(0)
        with torch.serialization.safe_globals(_PLAIN):
            return torch.load(archive, weights_only=True)
    except FileNotFoundError:
        raise missing(path, key) from None
    except UNPICKLING_ERRORS as error:
        raise broken(path, key, one_line(error)) from error


def missing(path: Path, key: str) -> CheckpointError:
    """Return the error of a file that is not there."""
    return CheckpointError(
        f"{path} is missing (it contains {key}): the checkpoint is damaged; {USE_ANOTHER}"
    )


def broken(path: Path, key: str, reason: str) -> CheckpointError:
    """Return the error of a damaged file."""
    return CheckpointError(f"{path} is damaged at {key} ({reason}); {USE_ANOTHER}")


class BlockReader:
    """Reads rectangles of stored tensors, a block of at most 4 MiB at a time.

    Only bytes of the rectangle are read, each once, into memory that every block uses.
    """

    def __init__(self) -> None:
        self._memory = np.empty(_BLOCK_BYTES, np.uint8)

    def read(
        self, stored: StoredTensor, first: Sequence[int], sizes: Sequence[int], into: Tensor | None
    ) -> int:
        """Copy a rectangle into a tensor of its sizes, and return its register in the whole.

        `into`: None reads for the register alone. Raises CheckpointError.
        """
        register = 0
        try:
            with stored.path.open("rb", buffering=0) as file:
                for start, count in _blocks(first, sizes, _BLOCK_BYTES // stored.dtype.itemsize):
                    register ^= self._read_block(file.fileno(), stored, start, count)
                    if into is not None:
                        place = (
                            slice(a - b, a - b + n)
                            for a, b, n in zip(start, first, count, strict=True)
                        )
                        into[tuple(place)].copy_(self._values(stored.dtype, count))
        except FileNotFoundError:
            raise missing(stored.path, stored.key) from None
        except (OSError, EOFError) as error:
            raise broken(stored.path, stored.key, one_line(error)) from error
        return register

    def _values(self, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
        nbytes = math.prod(sizes) * dtype.itemsize
        return torch.from_numpy(self._memory[:nbytes]).view(dtype).view(*sizes)

    def _read_block(
        self, file: int, stored: StoredTensor, start: Sequence[int], sizes: Sequence[int]
    ) -> int:
        """Fill the memory with a block; return its register in the whole tensor."""
        item = stored.dtype.itemsize
        strides = [math.prod(stored.shape[axis + 1 :]) * item for axis in range(len(sizes))]
        # A run of bytes: along the axes of which the block has everything, and the one before.
        outer = len(sizes)
        while outer and sizes[outer:] == tuple(stored.shape[outer:]):
            outer -= 1
        run = math.prod(sizes[outer:]) * item
        places = np.array(sum(a * n for a, n in zip(start, strides, strict=True)), np.int64)
        for axis in range(outer):
            places = np.add.outer(places, np.arange(sizes[axis], dtype=np.int64) * strides[axis])
        memory = self._memory.data
        registers = np.empty(places.size, np.int64)
        for index, place in enumerate(places.flat):
            content = memory[index * run : (index + 1) * run]
            _read_at(file, content, stored.start + int(place))
            registers[index] = register_of(content)
        register = joined(registers.reshape(sizes[:outer]), strides[:outer])
        return shifted(register, stored.nbytes - int(places.flat[-1]) - run)


def _blocks(
    first: Sequence[int], sizes: Sequence[int], most: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield start and sizes of blocks of at most `most` elements that cover a rectangle."""
    if not sizes:
        yield (), ()
        return
    inner = math.prod(sizes[1:])
    step = max(1, most // inner)
    for index in range(0, sizes[0], step):
        count = min(step, sizes[0] - index)
        rest = (
            [(tuple(first[1:]), tuple(sizes[1:]))]
            if inner <= most
            else (_blocks(first[1:], sizes[1:], most))
        )
        for start, shape in rest:
            yield (first[0] + index, *start), (count, *shape)


def _read_at(file: int, room: memoryview, offset: int) -> None:
    """Fill memory from a place in a file; raises EOFError where the file ends."""
    done = 0
    while done < len(room):
        count = os.preadv(file, [room[done:]], offset + done)
        if not count:
            raise EOFError("the file ends early")
        done += count


class _Part(io.RawIOBase):
    """A part of an open file as a separate read-only file."""

    def __init__(self, file: int, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset from the part's start, from here, or from the part's end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a place before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        """Fill a buffer up to the end of the part."""
        wanted = memoryview(buffer).cast("B")
        count = max(0, min(len(wanted), self._length - self._at))
        if count:
            _read_at(self._file, wanted[:count], self._start + self._at)
        self._at += count
        return count
