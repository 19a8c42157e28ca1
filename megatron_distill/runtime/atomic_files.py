"""Files that appear under their name only when all of them is on disk.

A file is written under a temporary name that a lock holds; what no process holds is stale.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from megatron_distill.errors import CheckpointError, MegatronDistillError, StoreError
from megatron_distill.runtime.collectives import together

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "FlushedFile",
    "flush_folder",
    "new_folder",
    "partial_file",
    "partial_files",
    "publish",
    "publish_first",
    "remove_stale",
    "write_errors",
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


_PARTIAL_FOLDER = ".partial"


@contextmanager
def new_folder(output: Path, *, bytes_needed: int, overwrite: bool) -> Iterator[Path]:
    """Give all ranks a folder to write into, and rename it to `output` when the block is done.

    What ranks may fail at on their own inside the block belongs into `together`. Raises
    CheckpointError on all ranks: `output` is not empty and not to be overwritten, it cannot be
    written, or the disk has too little space. After any failure, an interruption too, nothing is
    left but what was there before.

    Collective: world, all-gathers of a short object per rank.
    """
    output = output.resolve()  # a link stays, and what it points at is replaced
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
        # Gone after a success; a rank that was interrupted alone must not wait for the others.
        # Twice: a signal that came while another rank was waited for is raised in the first.
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
    """Return where the earlier content waits for the new one to take its name."""
    return output.with_name(f"{output.name}.old{_PARTIAL_FOLDER}")


@contextmanager
def write_errors(path: Path, error: type[MegatronDistillError] = StoreError) -> Iterator[None]:
    """Raise a failure of the operating system to write a path as ``error``, with the remedy."""
    try:
        yield
    except OSError as failure:
        raise error(
            f"cannot write {path}: {failure.strerror}; free disk space or name another folder"
        ) from failure


def flush_folder(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_FLUSH_BYTES = 2**27


class FlushedFile(io.FileIO):
    """A file for writing that flushes itself in a thread, every 128 MiB; raises OSError.

    A system that holds gigabytes unwritten stops whoever writes on until the disk has caught up.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self._unflushed = 0
        self._flush: threading.Thread | None = None
        self._failure: OSError | None = None

    def write(self, data: Buffer, /) -> int:
        """Write; raises what an earlier flush failed with."""
        count = super().write(data)
        self._unflushed += count
        if self._unflushed >= _FLUSH_BYTES and (self._flush is None or not self._flush.is_alive()):
            self._wait()
            self._unflushed = 0
            self._flush = threading.Thread(target=self._to_disk)
            self._flush.start()
        return count

    def close(self) -> None:
        """Wait for the flush that is under way, and close."""
        if not self.closed:
            try:
                self._wait()
            finally:
                super().close()

    def _wait(self) -> None:
        if self._flush is not None:
            self._flush.join()
            self._flush = None
        if self._failure is not None:
            # The system says it once; to fsync at the end the file would look whole.
            failure, self._failure = self._failure, None
            raise failure

    def _to_disk(self) -> None:
        try:
            os.fdatasync(self.fileno())
        except OSError as error:
            self._failure = error
