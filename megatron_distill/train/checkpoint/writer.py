"""Megatron-Core's sharded checkpoint format, written by the ranks themselves.

Megatron-Core passes the files to forked processes and fetches the results through a server process.
Both outlive a killed rank, and a fork beside running threads may hang. Here every rank writes its
own file, directly or in a thread, without any communication; the first rank writes the index.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystem,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_distill.runtime.atomic_files import FlushedFile, write_flushed
from megatron_distill.train.checkpoint.shards import Shard, Staging, TensorWindow, own_parts

METADATA_FILE = ".metadata"
_FORMAT = CheckpointingConfig("torch_dist", 1)
_ENTRY_BYTES = 2048  # upper bound on the overhead of one tensor in torch's archive format


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a save."""

    windows: Sequence[TensorWindow]
    objects: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        """Upper bound on the size of its file."""
        sizes = [window.data.nbytes for window in self.windows]
        sizes += [len(content) for content in self.objects.values()]
        return sum(sizes) + _ENTRY_BYTES * len(sizes)


def take_snapshot(
    shards: Sequence[Shard], objects: Mapping[str, bytes], staging: Staging | None
) -> Snapshot:
    """Return the parts of the shards that this rank writes, and this rank's objects by name.

    With `staging` they are copied there, so that training may go on while they are written;
    without, they are the live tensors.
    """
    windows = [
        window
        for part in own_parts([shard for shard in shards if shard.is_stored])
        for window in part.windows()
    ]
    return Snapshot(windows if staging is None else staging.copies(windows), objects)


@dataclass(frozen=True)
class IndexEntry:
    """One tensor or object in a rank's file, for the index."""

    key: str
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: an object
    place: _StorageInfo

    @property
    def index(self) -> MetadataIndex:
        """Its name in torch's index."""
        if self.dtype is None:
            return MetadataIndex(self.key)
        return MetadataIndex(self.key, torch.Size(self.offset))


def write_rank_file(snapshot: Snapshot, folder: Path, rank: int) -> list[IndexEntry] | str:
    """Write this rank's file and flush it to disk; return its contents, or a failure's reason."""
    path = folder / f"__{rank}_0.distcp"
    if not snapshot.windows and not snapshot.objects:
        return []
    try:
        with FlushedFile(path) as raw, io.BufferedWriter(raw) as stream:
            stored = _write_entries(snapshot, cast(IO[bytes], stream), path.name)
            stream.flush()
            os.fsync(raw.fileno())
    except (OSError, RuntimeError) as error:
        # A rank that raised here would leave the others waiting for its contents.
        return failure_of(error, rank)
    return stored


def _write_entries(snapshot: Snapshot, stream: IO[bytes], name: str) -> list[IndexEntry]:
    stored = []
    for key, content in snapshot.objects.items():
        start = stream.tell()
        stream.write(content)
        place = _StorageInfo(name, start, len(content))
        stored.append(IndexEntry(key, (), (), (), None, place))
    for window in snapshot.windows:
        start = stream.tell()
        data = window.data.cpu()  # no copy of a tensor in host memory
        with _errors_of_the_disk():
            torch.save(alone(data), stream)
        place = _StorageInfo(name, start, stream.tell() - start)
        sizes = tuple(data.shape)
        stored.append(
            IndexEntry(window.key, window.offset, sizes, window.global_shape, data.dtype, place)
        )
    return stored


def write_index(stored: Iterable[IndexEntry], folder: Path) -> None:
    """Write the index of all ranks' files; call on one rank.

    Raises OSError, and ValueError for a tensor that the files do not contain as a whole.
    """
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for entry in stored:
        if entry.index in places:
            raise ValueError(f"two ranks wrote {entry.key} at {entry.offset}")
        places[entry.index] = entry.place
        if entry.dtype is None:
            described[entry.key] = BytesStorageMetadata()
            continue
        found = described.setdefault(
            entry.key,
            TensorStorageMetadata(
                TensorProperties(dtype=entry.dtype), torch.Size(entry.global_shape), []
            ),
        )
        assert isinstance(found, TensorStorageMetadata)
        chunk = ChunkStorageMetadata(torch.Size(entry.offset), torch.Size(entry.sizes))
        found.chunks.append(chunk)
    for key, tensor in described.items():
        if isinstance(tensor, TensorStorageMetadata):
            count = sum(chunk.sizes.numel() for chunk in tensor.chunks)
            if count != tensor.size.numel():
                raise ValueError(f"the ranks wrote {count} of {tensor.size.numel()} of {key}")
    index = Metadata(described, storage_data=places, storage_meta=StorageMeta())
    index.version = CURRENT_DCP_VERSION
    write_flushed(folder / METADATA_FILE, pickle.dumps(index))


def write_common(folder: Path) -> None:
    """Write the format's name and Megatron-Core's file of unsharded state; call on one rank.

    Raises OSError.
    """
    # Through memory: torch raises a different error for a full disk.
    content = io.BytesIO()
    torch.save({}, content)
    (folder / COMMON_STATE_FNAME).write_bytes(content.getbuffer())
    save_config(_FORMAT, str(folder))


def alone(tensor: Tensor) -> Tensor:
    """Return the same memory as a separate tensor; torch's writer copies parts of larger ones."""
    plain = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return torch.from_numpy(plain).view(tensor.dtype).view(tensor.shape)


@contextmanager
def _errors_of_the_disk() -> Generator[None, None, None]:
    """Raise the disk's error; torch's archive notices only that its file is too short."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError | KeyboardInterrupt):
            raise error.__context__ from error
        raise


class _FlushedFiles(FileSystem):
    """The local file system; written bytes start on their way to disk at once."""

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """Open a file."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with FlushedFile(Path(path)) as raw, io.BufferedWriter(raw) as buffered:
            yield buffered


class RankWriter(torch_checkpoint.FileSystemWriter):
    """torch's writer of one file per rank, in the calling thread; it reports the disk's error."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)
        self.fs = _FlushedFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; raises OSError, or KeyboardInterrupt."""
        with _errors_of_the_disk():
            return super().write_data(plan, planner)


def lowest_failure(error: CheckpointException) -> str:
    """Return a short description of the lowest failing rank's error."""
    rank = min(error.failures)
    return failure_of(error.failures[rank][0], rank)


def failure_of(error: BaseException, rank: int) -> str:
    """Return a short description of a rank's error."""
    if isinstance(error, OSError) and error.strerror:
        place = f", {error.filename}" if error.filename else ""
        return f"{error.strerror} (rank {rank}{place})"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0]} (rank {rank})"
