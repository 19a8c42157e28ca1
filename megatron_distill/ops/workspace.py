"""Memory of the executors: chunks, row blocks, scratch buffers, and the selection of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_distill.signals import LogitRule

__all__ = [
    "Rows",
    "Scratch",
    "accumulation_dtype",
    "allocate",
    "allocate_logits",
    "chunk_tokens_for",
    "equal_chunks",
    "load_logits",
    "row_blocks",
    "tile_tokens_for",
]

# Elements per core so that five fp32 blocks fit in the cache of current CPUs: 8 rows at V = 32,768.
# All rows at once take four times as long, because every pass then goes through memory.
_CPU_ELEMENTS = 2**18
# On a GPU: large enough to hide launches, small enough that scratch stays a fraction of a chunk at
# a vocabulary of 262,144.
_GPU_ELEMENTS = 2**25
# Logits of a chunk, the same memory for every vocabulary. Enough tokens for fast products at common
# vocabularies: 256 or more on a CPU, 1024 or more on a GPU.
_CPU_CHUNK = 2**25
_GPU_CHUNK = 2**28
# Rows whose losses between tokenizers are computed at once: these make several matrices as large as
# their logits. A quarter of a chunk; on a GPU large enough to hide launches and collectives.
_CPU_TILE = 2**23
_GPU_TILE = 2**26
# Bytes: torch's alignment of tensors.
_ALIGNMENT = 64
# Elements between the rows of a matrix of logits on a GPU: a multiple of 128 bytes in 16 bits.
_ROW_MULTIPLE = 64


def row_blocks(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Consecutive slices over ``rows`` of a ``[rows, columns]`` tensor, sized for the device."""
    step = _rows_per_block(columns, device)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def _rows_per_block(columns: int, device: torch.device) -> int:
    if device.type == "cpu":
        # The same number of rows per core: waiting for one with an extra row costs more than memory
        # traffic.
        return torch.get_num_threads() * max(1, round(_CPU_ELEMENTS / max(columns, 1)))
    return max(1, _GPU_ELEMENTS // max(columns, 1))


def chunk_tokens_for(columns: int, device: torch.device) -> int:
    """Tokens of a chunk whose logits over so many columns fill the device's usual chunk."""
    elements = _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK
    return max(1, elements // max(columns, 1))


def tile_tokens_for(columns: int, device: torch.device) -> int:
    """Rows of a tile whose losses between tokenizers are computed at once."""
    elements = _CPU_TILE if device.type == "cpu" else _GPU_TILE
    return max(1, elements // max(columns, 1))


def equal_chunks(count: int, most: int) -> list[slice]:
    """The fewest consecutive slices over ``count`` rows of at most ``most``, equal but the last.

    A much shorter last chunk would waste its products.
    """
    if count == 0:
        return []
    size = -(-count // -(-count // most))
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of statistics and exponentials: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def allocate(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new matrix; on a CPU in numpy's memory.

    For large arrays numpy requests huge pages from the kernel, torch does not. The page faults of a
    chunk's fresh logits would otherwise cost a quarter of their product.
    """
    if device.type != "cpu":
        return torch.empty(rows, columns, dtype=dtype, device=device)
    size = rows * columns * dtype.itemsize
    memory = torch.from_numpy(np.empty(size + _ALIGNMENT, dtype=np.uint8))
    first = -memory.data_ptr() % _ALIGNMENT
    return memory[first : first + size].view(dtype).view(rows, columns)


def allocate_logits(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new matrix for the product of a head; on a GPU each row begins at an aligned address.

    A tokenizer may have any number of ids. With 151,665 of them in bf16, most rows would begin at
    an odd address. The fast products of cuBLAS need multiples of 16 bytes.
    """
    return allocate(rows, _row_stride(columns, device), dtype, device)[:, :columns]


def _row_stride(columns: int, device: torch.device) -> int:
    if device.type == "cpu":
        return columns
    return -(-columns // _ROW_MULTIPLE) * _ROW_MULTIPLE


class Scratch:
    """Named buffers of one row block each, allocated at first use and then reused."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = min(rows, _rows_per_block(columns, device))
        self._columns = columns
        self.dtype = dtype
        self._device = device
        self._buffers: dict[str, Tensor] = {}
        self._double: Scratch | None = None

    def in_double(self) -> Scratch:
        """The fp64 counterpart with as many rows, created once."""
        if self._double is None:
            self._double = Scratch(self._rows, self._columns, torch.float64, self._device)
        return self._double

    def take(self, name: str, rows: int) -> Tensor:
        """The first ``rows`` rows of the buffer ``name``, uninitialised."""
        if name not in self._buffers:
            self._buffers[name] = allocate(self._rows, self._columns, self.dtype, self._device)
        buffer = self._buffers[name]
        return buffer if rows == self._rows else buffer[:rows]


@dataclass(frozen=True)
class Rows:
    """The tokens of ``[N, ...]`` tensors with a weight, in order; ``indices=None`` means all."""

    total: int
    indices: Tensor | None

    @classmethod
    def of_weights(cls, *weights: Tensor) -> Rows:
        """Tokens on which any weight ``[N]`` is not zero; synchronises with the device."""
        used = torch.stack([weight != 0 for weight in weights]).any(0)
        indices = used.nonzero().squeeze(1)
        return cls(used.numel(), None if indices.numel() == used.numel() else indices)

    @classmethod
    def of_indices(cls, total: int, indices: Tensor) -> Rows:
        """Tokens with the given ``indices [n]``, int64 ascending; no device synchronisation."""
        return cls(total, None if indices.numel() == total else indices)

    @property
    def count(self) -> int:
        """Number of tokens with a weight."""
        return self.total if self.indices is None else self.indices.numel()

    def take(self, tensor: Tensor, chunk: slice) -> Tensor:
        """The chunk's tokens of ``tensor``: a view if all tokens count, else a copy."""
        if self.indices is None:
            return tensor[chunk]
        return tensor.index_select(0, self.indices[chunk])

    def scatter(self, values: Tensor) -> Tensor:
        """The inverse of `take` over all chunks: ``[N, ...]``, zero for the tokens left out."""
        if self.indices is None:
            return values
        whole = values.new_zeros(self.total, *values.shape[1:])
        return whole.index_copy_(0, self.indices, values)


def load_logits(rule: LogitRule, raw: Tensor, scratch: Scratch, name: str) -> Tensor:
    """Logits of a row block in the dtype of statistics; ``raw`` itself where nothing changes.

    ``raw`` is not modified; any other result is in the scratch buffer ``name``.
    """
    if rule.is_identity and raw.dtype == scratch.dtype:
        return raw
    return rule.apply_(scratch.take(name, raw.shape[0]).copy_(raw))
