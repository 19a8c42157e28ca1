"""Our weights into a Hugging Face folder: planned whole, then written tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.errors import CheckpointError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.hugging_face.family import Family
from megatron_distill.models.hugging_face.model import NamedPiece, tensor_pieces
from megatron_distill.models.hugging_face.rules import TensorPiece
from megatron_distill.models.hugging_face.safetensors_files import (
    INDEX_FILE,
    WEIGHTS_FILE,
    SafetensorsWriter,
    TensorEntry,
)
from megatron_distill.models.parameters import LayerIndex, Parameter, placed
from megatron_distill.models.weights import WeightSource, WindowReader
from megatron_distill.runtime.collectives import together

_BLOCK_BYTES = 2**28  # largest part of one tensor in a rank's memory


@dataclass(frozen=True)
class Unit:
    """One of our tensors and its Hugging Face tensors."""

    parameter: Parameter
    place: LayerIndex
    dtype: torch.dtype
    pieces: list[NamedPiece]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return torch.Size(self.parameter.shape).numel() * self.dtype.itemsize


@dataclass
class PlannedFile:
    """One safetensors file and its tensors, in order."""

    units: list[Unit] = field(default_factory=list)
    nbytes: int = 0
    name: str = WEIGHTS_FILE

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """The tensors of its header."""
        return {
            named.name: TensorEntry(unit.dtype, named.piece.shape)
            for unit in self.units
            for named in unit.pieces
        }


def plan_files(
    family: Family,
    architecture: Architecture,
    *,
    dtype_of: Callable[[str], torch.dtype],
    max_shard_bytes: int,
) -> list[PlannedFile]:
    """Distribute all tensors over files of at most `max_shard_bytes`; a larger tensor is one file.

    `dtype_of` returns the dtype of one of our tensors in the files. Raises CheckpointError if the
    family lacks a tensor of the architecture.
    """
    files = [PlannedFile()]
    for parameter, place in placed(architecture):
        pieces = tensor_pieces(family, architecture, parameter, place)
        unit = Unit(parameter, place, dtype_of(parameter.key), pieces)
        if files[-1].units and files[-1].nbytes + unit.nbytes > max_shard_bytes:
            files.append(PlannedFile())
        files[-1].units.append(unit)
        files[-1].nbytes += unit.nbytes
    if len(files) > 1:
        for index, file in enumerate(files):
            file.name = f"model-{index + 1:05}-of-{len(files):05}.safetensors"
    return files


def write_files(
    files: Sequence[PlannedFile],
    source: WeightSource,
    folder: Path,
    *,
    done: Callable[[int], None],
) -> None:
    """Write this rank's share of the files and, on the first rank, their index.

    `done` is called with the bytes of each written tensor. Raises CheckpointError on all ranks if
    one could not write or read. Memory: a block of one tensor; none where its rows can be copied
    from file to file.

    Collective: world, one all-gather of a short object per rank.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    with together():
        try:
            windows = WindowReader(source)
            for file in files[rank::size]:
                _write_file(file, windows, folder / file.name, done=done)
            if rank == 0 and len(files) > 1:
                (folder / INDEX_FILE).write_text(_index(files))
        except OSError as error:
            raise CheckpointError(
                f"writing {folder.with_suffix('')} failed on rank {rank}: {error.strerror}; free "
                "disk space or name another folder"
            ) from error


def _write_file(
    file: PlannedFile, windows: WindowReader, path: Path, *, done: Callable[[int], None]
) -> None:
    with SafetensorsWriter(path, file.entries) as writer:
        for unit in file.units:
            for named in unit.pieces:
                writer.write(named.name, _parts(windows, unit, named.piece))
            done(unit.nbytes)


def _parts(windows: WindowReader, unit: Unit, piece: TensorPiece) -> Iterator[Tensor]:
    """Yield a Hugging Face tensor's rows in order, in the largest contiguous parts."""
    key, shape = unit.parameter.key, unit.parameter.shape
    origin = (0,) * len(shape)
    runs = sorted(piece.runs, key=lambda run: run.theirs)
    if piece.transposed:
        ours = windows.read(key, unit.place, origin, shape, unit.dtype)
        yield torch.cat([ours[run.ours : run.ours + run.rows] for run in runs]).t()
        return
    most = max(1, _BLOCK_BYTES // (torch.Size(shape[1:]).numel() * unit.dtype.itemsize))
    for run in runs:
        for first in range(run.ours, run.ours + run.rows, most):
            rows = min(most, run.ours + run.rows - first)
            start = (first, *origin[1:])
            yield windows.read(key, unit.place, start, (rows, *shape[1:]), unit.dtype)


def _index(files: Sequence[PlannedFile]) -> str:
    weight_map = {name: file.name for file in files for name in file.entries}
    total = sum(file.nbytes for file in files)
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
