"""A folder that all ranks write and that is renamed to its final name at the end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron_distill.errors import CheckpointError
from megatron_distill.runtime.atomic_files import flush_folder, write_errors
from megatron_distill.runtime.collectives import together

__all__ = ["new_folder"]


_PARTIAL_FOLDER = ".partial"


@contextmanager
def new_folder(output: Path, *, bytes_needed: int, overwrite: bool) -> Iterator[Path]:
    """Yield a folder for all ranks to write into; it is renamed to `output` after the block.

    Wrap rank-local work that may fail inside the block in `together`. Raises CheckpointError on
    all ranks: `output` is not empty and `overwrite` is false, it cannot be written, or the disk
    has too little space. A failure or interruption leaves `output` unchanged and no other folder.

    Collective: world, all-gathers of a short object per rank.
    """
    output = output.resolve()  # a symbolic link stays; its target is replaced
    partial = output.with_name(f"{output.name}{_PARTIAL_FOLDER}")
    is_first = dist.get_rank() == 0
    with together():
        if is_first:
            with write_errors(output, CheckpointError):
                _prepare(output, partial, bytes_needed=bytes_needed, overwrite=overwrite)
    try:
        with together():
            if not partial.is_dir():
                raise CheckpointError(
                    f"rank {dist.get_rank()} does not see {partial}, which rank 0 made; name an "
                    "output folder that all nodes share"
                )
        yield partial
        with together():
            if is_first:
                with write_errors(output, CheckpointError):
                    _publish(partial, output)
    finally:
        # No-op after a success. No `together` here: an interrupted rank must not wait for the rest.
        # Called twice: a signal that came during a wait is raised inside the first call.
        try:
            if is_first:
                _clear(partial, output)
        finally:
            if is_first:
                _clear(partial, output)


def _prepare(output: Path, partial: Path, *, bytes_needed: int, overwrite: bool) -> None:
    old = _aside(output)
    if old.exists() and not output.exists():
        old.rename(output)  # an earlier start was killed between two renames
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"{output} is a file; name a folder")
    if output.is_dir() and any(output.iterdir()) and not overwrite:
        raise CheckpointError(
            f"{output} is not empty; name another folder, or replace it with --overwrite"
        )
    if output.is_mount():
        raise CheckpointError(
            f"{output} is a mount point, which cannot be replaced; name a folder inside it"
        )
    for leftover in (partial, old):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    free = shutil.disk_usage(partial).free
    if free < bytes_needed:
        shutil.rmtree(partial)
        raise CheckpointError(
            f"no space left for {output}: it needs {bytes_needed / 1e9:.2f} GB and "
            f"{free / 1e9:.2f} GB are free; free some or name a folder on another disk"
        )


def _publish(partial: Path, output: Path) -> None:
    flush_folder(partial)
    old = _aside(output)
    try:
        if output.exists():
            output.rename(old)
        partial.rename(output)
    finally:
        if old.exists() and not output.exists():
            old.rename(output)
    flush_folder(output.parent)


def _clear(partial: Path, output: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    if output.exists():
        shutil.rmtree(_aside(output), ignore_errors=True)


def _aside(output: Path) -> Path:
    """Return the temporary name of the earlier folder while `output` is replaced."""
    return output.with_name(f"{output.name}.old{_PARTIAL_FOLDER}")
