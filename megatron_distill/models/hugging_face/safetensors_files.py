"""Reading a folder of safetensors files slice by slice, and writing one file tensor by tensor.

The writer has one tensor at a time in memory. Layout: an 8-byte little-endian length, a JSON header
of that length with dtype, shape and offset of every tensor, then their bytes, row by row. Source:
the format page of the safetensors project.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_distill.errors import CheckpointError
from megatron_distill.runtime.atomic_files import FlushedFile

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class SafetensorsFolder:
    """The tensors of a Hugging Face folder by name; files are memory-mapped.

    Raises CheckpointError naming the file: missing, truncated, damaged, not in the index, or
    pickled.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._place = self._find()

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._place)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from its file's header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype of a tensor as safetensors spells it: F32, BF16, F16."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str, *window: slice) -> Tensor:
        """Return a part of a tensor; the rest of its file is not read."""
        return self._slice(name)[window]

    def check_index(self) -> None:
        """Raise CheckpointError if the tensors of a file differ from the index."""
        for file in sorted(set(self._place.values())):
            held = set(self._open(file).keys())
            indexed = {name for name, at in self._place.items() if at == file}
            if held == indexed:
                continue
            first = sorted(held ^ indexed)[0]
            where = "the file lacks" if first in indexed else "the index does not name"
            raise CheckpointError(
                f"{self.folder / file} and {INDEX_FILE} disagree: {where} {first}; copy the "
                "folder again"
            )

    def _slice(self, name: str) -> Any:
        return self._open(self._place[name]).get_slice(name)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.folder / file
            try:
                self._files[file] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise CheckpointError(
                    f"{path} is missing, though {INDEX_FILE} names it; copy the folder again"
                ) from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is truncated or damaged ({error}); copy it again"
                ) from error
        return self._files[file]

    def _find(self) -> dict[str, str]:
        """Return the file of every tensor."""
        index = self.folder / INDEX_FILE
        if index.is_file():
            return _read_index(index)
        found = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if len(found) == 1 or WEIGHTS_FILE in found:
            file = found[0] if len(found) == 1 else WEIGHTS_FILE
            return dict.fromkeys(self._open(file).keys(), file)
        if found:
            raise CheckpointError(
                f"{self.folder} has {len(found)} safetensors files and no {INDEX_FILE}, which "
                "maps tensors to files; copy it too"
            )
        raise CheckpointError(self._nothing())

    def _nothing(self) -> str:
        if not self.folder.is_dir():
            return f"{self.folder}: no such folder; name a folder with a Hugging Face model"
        pickles = [path.name for glob in _PICKLES for path in sorted(self.folder.glob(glob))]
        if pickles:
            return (
                f"{self.folder / pickles[0]} is a pickle, which can run code when it is read, and "
                "is refused; save the model as safetensors (save_pretrained of transformers does)"
            )
        return (
            f"{self.folder} contains no safetensors file; name a folder with the weights of a model"
        )


def _read_index(path: Path) -> dict[str, str]:
    try:
        place = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); copy it again") from error
    named = isinstance(place, Mapping) and all(isinstance(file, str) for file in place.values())
    if not named or any(Path(file).name != file for file in place.values()):
        raise CheckpointError(f"{path} is damaged: weight_map is not a map to files; copy it again")
    return dict(place)


_SPELLED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 8


class TensorEntry(NamedTuple):
    """The header entry of one tensor."""

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
        """Write the next tensor of the header, `name`, in parts."""
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
