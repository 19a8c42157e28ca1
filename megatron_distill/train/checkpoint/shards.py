"""A rank's parts of a checkpoint's global tensors, cut into the windows that files contain.

A distributed optimizer gives every data-parallel rank a flat range of each parameter. A flat range
of a matrix is at most three rectangles: the end of a row, whole rows, the beginning of a row. So a
rank stores its range as windows of the global tensor, and any layout reads the windows it needs.
Host memory for copies of shards is used again from save to save.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.errors import CheckpointError

_BLOCK_BYTES = 2**26  # of one stored window: the memory of a rank where it needs a copy


@dataclass(frozen=True)
class Shard:
    """A flat range of a rectangle of a global tensor.

    Attributes:
        key: name of the global tensor.
        data: the live values, [n], contiguous.
        global_shape: shape of the global tensor.
        offset: first index of the rectangle along each axis.
        shape: shape of the rectangle.
        first: flat index of `data[0]` in the rectangle.
        replicas: ranks that hold the same range, this one among them; None: this rank alone.
        copied_in: ranks one of which has read the same values and can send them. None: this rank
            or one of its replicas writes and reads it.
        is_padded: whether the number of rows depends on the layout; missing rows are zero.
    """

    key: str
    data: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    first: int = 0
    replicas: dist.ProcessGroup | None = None
    copied_in: dist.ProcessGroup | None = None
    is_padded: bool = False

    @property
    def is_stored(self) -> bool:
        """Whether this rank or one of its replicas writes and reads it."""
        return self.copied_in is None


@dataclass(frozen=True)
class TensorWindow:
    """A rectangle of a global tensor; `data` has its shape and is contiguous."""

    key: str
    data: Tensor
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    is_padded: bool = False


@dataclass(frozen=True)
class ShardPart:
    """The elements from `start` to `stop` of a shard."""

    shard: Shard
    start: int
    stop: int

    @property
    def data(self) -> Tensor:
        """The live values."""
        return self.shard.data[self.start : self.stop]

    def windows(self) -> Iterator[TensorWindow]:
        """Yield the part as rectangles of at most 64 MiB, or of one row."""
        shard = self.shard
        row = math.prod(shard.shape[-1:])
        most = max(1, _BLOCK_BYTES // (row * shard.data.element_size())) * row
        begin, end = shard.first + self.start, shard.first + self.stop
        cuts = [begin, *range(begin // most * most + most, end, most), end]
        for first, last in pairwise(cuts):
            at = first - shard.first
            for offset, sizes in rectangles(shard.shape, first, last):
                count = math.prod(sizes)
                yield TensorWindow(
                    key=shard.key,
                    data=shard.data[at : at + count].view(sizes),
                    offset=tuple(a + b for a, b in zip(shard.offset, offset, strict=True)),
                    global_shape=shard.global_shape,
                    is_padded=shard.is_padded,
                )
                at += count


def rectangles(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offset and sizes of the rectangles of a flat range, in the order of its elements."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    index, within = divmod(start, inner)
    if within or stop - start < inner:
        last = min(stop, (index + 1) * inner)
        for offset, sizes in rectangles(shape[1:], within, last - index * inner):
            yield (index, *offset), (1, *sizes)
        yield from rectangles(shape, last, stop)
        return
    whole = (stop - start) // inner
    yield (index, *(0 for _ in shape[1:])), (whole, *shape[1:])
    yield from rectangles(shape, start + whole * inner, stop)


def shares(shards: Sequence[Shard], size: int) -> list[list[ShardPart]]:
    """Divide the shards of a group of replicas into `size` parts of about the same bytes.

    A cut is at the beginning of a row, so that a part has few windows.
    """
    total = sum(shard.data.nbytes for shard in shards)
    share: list[list[ShardPart]] = [[] for _ in range(size)]
    before = 0
    for shard in shards:
        cuts = [_cut(shard, total * rank // size - before) for rank in range(1, size)]
        for rank, (start, stop) in enumerate(pairwise([0, *cuts, shard.data.numel()])):
            if start < stop:
                share[rank].append(ShardPart(shard, start, stop))
        before += shard.data.nbytes
    return share


def _cut(shard: Shard, nbytes: int) -> int:
    """Return the element of a shard at a number of bytes, moved back to its row's beginning."""
    count = shard.data.numel()
    element = min(max(nbytes // shard.data.element_size(), 0), count)
    if element == count:
        return count
    return max(0, element - (shard.first + element) % math.prod(shard.shape[-1:]))


def replicated(shards: Iterable[Shard]) -> dict[dist.ProcessGroup, list[Shard]]:
    """Return the shards that several ranks hold, by their group."""
    found: dict[dist.ProcessGroup, list[Shard]] = {}
    for shard in shards:
        if shard.replicas is not None:
            found.setdefault(shard.replicas, []).append(shard)
    return found


def own_parts(shards: Sequence[Shard]) -> list[ShardPart]:
    """Return the parts that this rank writes or reads on behalf of all that hold them."""
    own = [
        ShardPart(shard, 0, shard.data.numel())
        for shard in shards
        if shard.replicas is None and shard.data.numel()
    ]
    for group, held in replicated(shards).items():
        own += shares(held, group.size())[group.rank()]
    return own


@torch.no_grad()
def exchange_parts(shards: Sequence[Shard]) -> None:
    """Give every replica the parts that the others have read.

    Collective: the groups of replicas, one broadcast per part; each byte is sent once.
    """
    for group, held in replicated(shards).items():
        for rank, parts in enumerate(shares(held, group.size())):
            source = dist.get_global_rank(group, rank)
            for part in parts:
                dist.broadcast(part.data.view(torch.uint8), source, group=group)


_ALIGNMENT = 64  # bytes; of every dtype, and of a cache line


class Staging:
    """A buffer of the size of this rank's file, page-locked where it is filled from a GPU.

    The memory is allocated in the first save: its first touch is slow, and so is page-locking.
    torch's page-locked tensors would have the next power of two in bytes. Raises CheckpointError
    where the memory cannot be page-locked.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._is_locked = False

    @torch.no_grad()
    def copies(self, windows: Sequence[TensorWindow]) -> list[TensorWindow]:
        """Return the windows with their values in the buffer, valid until the next call.

        Copies from a GPU are started on the current stream, after its work, and waited for once.
        """
        on_device = any(window.data.is_cuda for window in windows)
        self._reserve(sum(_aligned(window.data.nbytes) for window in windows), locked=on_device)
        copied, at = [], 0
        for window in windows:
            data = window.data
            room = self._buffer[at : at + data.nbytes].view(data.dtype).view(data.shape)
            room.copy_(data, non_blocking=True)
            copied.append(replace(window, data=room))
            at += _aligned(data.nbytes)
        if on_device:
            torch.cuda.current_stream().synchronize()
        return copied

    def release(self) -> None:
        """Free the memory."""
        if self._is_locked:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr()))
            self._is_locked = False
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _reserve(self, count: int, *, locked: bool) -> None:
        if self._buffer.numel() >= count:
            return
        self.release()
        self._buffer = torch.empty(count, dtype=torch.uint8)
        if locked:
            cuda = torch.cuda.cudart()
            status = cuda.cudaHostRegister(self._buffer.data_ptr(), count, 0)
            if status != cuda.cudaError.success:
                raise CheckpointError(
                    f"checkpoint.asynchronous needs {count / 1e9:.2f} GB of page-locked host "
                    f"memory on this rank, which CUDA refused ({status}); free host memory, or set "
                    "checkpoint.asynchronous=false"
                )
            self._is_locked = True


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
