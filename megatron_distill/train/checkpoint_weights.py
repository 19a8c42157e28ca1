"""The weights of a sharded checkpoint, read window by window, whatever layout wrote it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    LoadPlan,
    ReadItem,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_distill.errors import CheckpointError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.hugging_face.validation import one_line
from megatron_distill.models.parameters import Place, parameters

METADATA_FILE = ".metadata"
# What reading a damaged pickle, or torch's archive around one, raises.
UNPICKLING_ERRORS = (
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


class CheckpointWeights:
    """The weights of a checkpoint of this library under their global names; a `WeightSource`.

    Raises CheckpointError: files that are missing or damaged, a tensor that the architecture has
    and the checkpoint lacks, or one of another shape.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self.folder = folder
        self.architecture = architecture
        self._reader = FileSystemReader(str(folder))
        metadata = self._read_metadata()
        self._parameters = {parameter.key: parameter for parameter in parameters(architecture)}
        self._stored = {key: self._find(metadata, key) for key in self._parameters}
        self._check_shapes()

    def dtype(self, key: str) -> torch.dtype:
        """The dtype in which a tensor is stored, the same in every layer."""
        return self._stored[key].properties.dtype

    def read_into(self, destination: Tensor, key: str, place: Place, start: Sequence[int]) -> None:
        """Copy a window of the tensor at `place` into `destination`; see `WeightSource`."""
        stored = self._stored[key]
        rows = max(0, self._parameters[key].shape[0] - start[0])
        destination[rows:].zero_()
        destination = destination[:rows]
        if not destination.numel():
            return
        wanted = ChunkStorageMetadata(
            offsets=torch.Size([*place, *start]),
            sizes=torch.Size([*(1 for _ in place), *destination.shape]),
        )
        items = create_read_items_for_chunk_list(key, stored, [wanted])
        if sum(item.lengths.numel() for item in items) != destination.numel():
            raise self._damaged(f"{key} is not stored as a whole")
        planner = _Window(destination.view(wanted.sizes) if place else destination)
        try:
            self._reader.read_data(LoadPlan(items), planner).wait()
        except UNPICKLING_ERRORS as error:
            raise self._damaged(f"{key}: {one_line(error)}") from error

    def _read_metadata(self) -> Metadata:
        path = self.folder / METADATA_FILE
        try:
            metadata = self._reader.read_metadata()
            if not isinstance(metadata, Metadata):
                raise TypeError(f"it holds {type(metadata).__name__}")
            self._reader.set_up_storage_reader(metadata, is_coordinator=False)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing, without which no checkpoint can be read; use another one"
            ) from None
        except UNPICKLING_ERRORS as error:
            raise CheckpointError(f"{path} is damaged ({error}); use another checkpoint") from error
        return metadata

    def _find(self, metadata: Metadata, key: str) -> TensorStorageMetadata:
        stored = metadata.state_dict_metadata.get(key)
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


class _Window(DefaultLoadPlanner):
    """Puts what is read where it belongs in one tensor."""

    def __init__(self, destination: Tensor) -> None:
        super().__init__()
        self._destination = destination

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        window = self._destination
        for axis, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            window = window.narrow(axis, start, length)
        return window

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Leave it: it was copied in place."""
