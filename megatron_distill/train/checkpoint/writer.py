"""Megatron-Core's sharded checkpoint format, written by the ranks themselves.

Megatron-Core passes the files to forked processes and fetches the results through a server process.
Both outlive a killed rank, and a fork beside running threads may hang. After a failure on the first
rank alone the remaining ranks keep waiting. Here every rank writes its own file, directly or in a
thread. torch's writer exchanges failures: a save that fails anywhere fails on all ranks.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_distill.runtime.atomic_files import FlushedFile

_FORMAT = CheckpointingConfig("torch_dist", 1)
_ENTRY_BYTES = 2048  # upper bound on the overhead of one tensor in torch's archive format


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a save: its shards, and the unsharded rest (first rank only)."""

    shards: dict[str, Any]
    common: dict[str, Any]
    shard_bytes: int


def take_snapshot(state: dict[str, Any], *, copied: bool) -> Snapshot:
    """Split a sharded state into the parts that this rank and the first rank write.

    With `copied` the shards are copied to host memory, so that training may go on while they are
    written; without, they are the live tensors.

    Collective: world, Megatron-Core's check that the shards cover every tensor once.
    """
    sharded, common = save_preprocess(state)
    mine, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    if copied:
        for tensor in nested_values(mine):
            if isinstance(tensor, ShardedTensor):
                assert tensor.data is not None
                tensor.data = tensor.data.detach().to("cpu", copy=True)
    sizes = [
        part.data.numel() * part.data.element_size() + _ENTRY_BYTES
        for part in nested_values(mine)
        if isinstance(part, ShardedTensor)
    ]
    shards = mcore_to_pyt_state_dict(mine)
    objects = [part for part in shards.values() if isinstance(part, io.BytesIO)]
    sizes += [part.getbuffer().nbytes + _ENTRY_BYTES for part in objects]
    return Snapshot(shards, common, sum(sizes))


def write_common(common: dict[str, Any], folder: Path) -> None:
    """Write the unsharded state and the format's name; call on one rank.

    Raises OSError.
    """
    # Through memory: torch raises a different error for a full disk.
    content = io.BytesIO()
    torch.save(common, content)
    (folder / COMMON_STATE_FNAME).write_bytes(content.getbuffer())
    save_config(_FORMAT, str(folder))


def write_shards(
    snapshot: Snapshot, folder: Path, group: dist.ProcessGroup | None = None
) -> str | None:
    """Write this rank's shards; return None, or the reason of a failure, the same on every rank.

    Collective: `group` (the world), torch's checkpoint planning and one exchange of results.
    """
    try:
        torch_checkpoint.save(
            snapshot.shards,
            storage_writer=RankWriter(folder),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=group,
        )
    except CheckpointException as error:
        return first_failure(error)
    return None


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
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch's archive notices only that its file is too short.
            if isinstance(error.__context__, OSError | KeyboardInterrupt):
                raise error.__context__ from error
            raise


def first_failure(error: CheckpointException) -> str:
    """Return a short description of the lowest failing rank's error."""
    rank = min(error.failures)
    found, _ = error.failures[rank]
    if isinstance(found, OSError) and found.strerror:
        place = f", {found.filename}" if found.filename else ""
        return f"{found.strerror} (rank {rank}{place})"
    lines = str(found).strip().splitlines() or [type(found).__name__]
    return f"{lines[0]} (rank {rank})"
