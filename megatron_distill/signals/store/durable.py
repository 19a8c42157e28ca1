"""Files that appear under their name only when all of them is on disk.

A file is written under a temporary name that a lock holds; what no process holds is stale.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from megatron_distill.errors import StoreError
from megatron_distill.runtime.new_folder import flush_folder, write_errors

__all__ = [
    "partial_file",
    "partial_files",
    "publish",
    "publish_first",
    "remove_stale",
]

_PARTIAL_FILE: Final = ".partial-"
# Where locks do not reach other machines, a file of theirs is left alone for this long.
_IDLE_SECONDS: Final = 3600.0


@contextmanager
def partial_file(path: Path, *, waits: bool = False) -> Iterator[tuple[Path, int]]:
    """A temporary name beside `path` and a descriptor of its file, held by this process alone.

    Whatever is left under the temporary name after the block is removed. Raises StoreError: another
    process writes the same file and is not waited for, or the disk does not let it be written.
    """
    partial = path.with_name(f"{path.name}{_PARTIAL_FILE}{socket.gethostname()}")
    with write_errors(path):
        descriptor = _hold(partial, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    if descriptor is None:
        raise StoreError(
            f"{path}: another process is writing it; give every process shards of its own"
        )
    try:
        with write_errors(path):
            yield partial, descriptor
    finally:
        # After a rename another process may already write under the name.
        if _is_named(partial, descriptor):
            partial.unlink(missing_ok=True)
        os.close(descriptor)


def _is_named(partial: Path, descriptor: int) -> bool:
    try:
        return partial.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _hold(partial: Path, lock: int) -> int | None:
    """A locked descriptor of an empty file of this name; None where another process holds it."""
    while True:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, lock)
            # Another process may have removed or renamed the file before it was locked.
            if _is_named(partial, descriptor):
                os.ftruncate(descriptor, 0)
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.close(descriptor)


def publish(path: Path, content: bytes) -> None:
    """Write a whole file, replacing any. Raises StoreError."""
    with partial_file(path, waits=True) as (partial, descriptor):
        _fill(descriptor, content)
        partial.replace(path)
        flush_folder(path.parent)


def publish_first(path: Path, content: bytes) -> bool:
    """Write a whole file if there is none of this name, and say whether. Raises StoreError."""
    if path.exists():
        return False
    with partial_file(path, waits=True) as (partial, descriptor):
        _fill(descriptor, content)
        try:
            path.hardlink_to(partial)
        except FileExistsError:
            return False
        flush_folder(path.parent)
    return True


def _fill(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)


def partial_files(folder: Path) -> list[Path]:
    """Temporary files in a folder, sorted."""
    return sorted(folder.glob(f"*{_PARTIAL_FILE}*"))


def remove_stale(folder: Path) -> None:
    """Remove temporary files that no process writes any more. Raises StoreError."""
    for partial in partial_files(folder):
        with write_errors(partial):
            try:
                descriptor = os.open(partial, os.O_RDWR)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                idle = time.time() - os.fstat(descriptor).st_mtime
                if (
                    partial.name.endswith(_PARTIAL_FILE + socket.gethostname())
                    or idle > _IDLE_SECONDS
                ):
                    partial.unlink(missing_ok=True)
            except BlockingIOError:
                pass
            finally:
                os.close(descriptor)
