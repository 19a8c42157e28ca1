"""The weights of a sharded checkpoint, read window by window, whatever layout wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_distill.errors import CheckpointError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.parameters import Place, parameters
from megatron_distill.train.mapped_chunks import MappedChunks


class CheckpointWeights:
    """The weights of a checkpoint of this library under their global names; a `WeightSource`.

    Raises CheckpointError: files that are missing or damaged, a tensor that the architecture has
    and the checkpoint lacks, or one of another shape.
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
        """Return a window as it lies in one file, or None where it must be put together."""
        leading = tuple(1 for _ in place)
        parts = self._parts(key, (*place, *start), torch.Size([*leading, *shape]))
        _, part = next(parts)
        return part.view(shape) if part.shape == (*leading, *shape) else None

    def _parts(
        self, key: str, start: tuple[int, ...], shape: torch.Size
    ) -> Iterator[tuple[torch.Size, Tensor]]:
        """Yield what of a window each chunk holds, and where in the window it belongs."""
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
                raise self._damaged(f"{parameter.key} is {list(found)} there, not {list(wanted)}")

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder} is damaged or of another architecture: {reason}; use another one"
        )


def _window(tensor: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    for axis, (first, length) in enumerate(zip(start, shape, strict=True)):
        tensor = tensor.narrow(axis, first, length)
    return tensor
