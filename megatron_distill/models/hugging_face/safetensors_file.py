"""A safetensors file written tensor by tensor, so that one tensor at a time is in memory.

Layout: an 8-byte little-endian length, a JSON header of that length with dtype, shape and place
of every tensor, then their bytes, row by row. Source: the format page of the safetensors project.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_distill.runtime.flushed_file import FlushedFile

_SPELLED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 8


class TensorEntry(NamedTuple):
    """What the header says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsWriter:
    """Writes the tensors of one file in the order of its header; raises OSError."""

    def __init__(self, path: Path, entries: Mapping[str, TensorEntry]) -> None:
        self._waiting = list(entries.items())
        self._waiting.reverse()
        self._stream = FlushedFile(path)
        header = _header(entries)
        self._put(memoryview(len(header).to_bytes(8, "little") + header))

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                assert not self._waiting, f"{len(self._waiting)} tensors were not written"
                os.fsync(self._stream.fileno())
        finally:
            self._stream.close()

    def write(self, name: str, parts: Iterable[Tensor]) -> None:
        """Write the next tensor, which the header names `name`, part after part."""
        expected, entry = self._waiting.pop()
        assert name == expected, (name, expected)
        left = entry.nbytes
        for part in parts:
            assert part.dtype == entry.dtype, (part.dtype, entry)
            left -= part.nbytes
            self._put(part.contiguous().view(-1).view(torch.uint8).numpy().data)
        assert left == 0, (name, entry, left)

    def _put(self, data: memoryview) -> None:
        while data:
            data = data[self._stream.write(data) :]


def _header(entries: Mapping[str, TensorEntry]) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, entry in entries.items():
        end = start + entry.nbytes
        described[name] = {
            "dtype": _SPELLED[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(described, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % _ALIGNMENT)
