"""Files and folders that appear under their name only when they are completely on disk.

If several processes may write a file, its writer locks the temporary file; an unlocked one is
stale. torch is imported only in the folder of all ranks, since data worker processes import this
module.
"""

from __future__ import annotations

import fcntl
import glob
import io
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from megatron_distill.errors import CheckpointError, MegatronDistillError, StoreError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "PARTIAL",
    "FlushedFile",
    "flush_folder",
    "name_flushed",
    "new_folder",
    "partial_file",
    "partial_files",
    "partial_paths",
    "publish",
    "publish_first",
    "remove_stale",
    "replace_file",
    "replace_files",
    "replace_folder",
    "set_aside",
    "whole_folder",
    "write_errors",
    "write_flushed",
]


PARTIAL: Final = ".partial"  # end of the name of a file or folder that is not complete
_PARTIAL_FILE: Final = f"{PARTIAL}-"
# Age at which another machine's file counts as stale; locks may not work across machines.
_IDLE_SECONDS: Final = 3600.0


@contextmanager
def partial_file(path: Path, *, waits: bool = False) -> Iterator[tuple[Path, int]]:
    """Yield a temporary file beside `path` and its descriptor, locked by this process.

    A file still under the temporary name after the block is removed. Raises StoreError: another
    process writes the same file (unless `waits`), or the file cannot be written.
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
        # After a rename another process may already use the temporary name.
        if _is_named(partial, descriptor):
            partial.unlink(missing_ok=True)
        os.close(descriptor)


def _is_named(partial: Path, descriptor: int) -> bool:
    try:
        return partial.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _hold(partial: Path, lock: int) -> int | None:
    """A locked descriptor of an empty file of this name; None if another process holds the lock."""
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
    """Write a file atomically, replacing any existing one. Raises StoreError."""
    with partial_file(path, waits=True) as (partial, descriptor):
        _fill(descriptor, content)
        name_flushed(partial, descriptor, path)


def publish_first(path: Path, content: bytes) -> bool:
    """Write a file atomically unless it exists; return whether it was new. Raises StoreError."""
    if path.exists():
        return False
    with partial_file(path, waits=True) as (partial, descriptor):
        _fill(descriptor, content)
        os.fsync(descriptor)
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


def name_flushed(partial: Path, descriptor: int, path: Path) -> None:
    """Flush a complete file of `partial_file`, and rename it to `path`. Raises OSError."""
    os.fsync(descriptor)
    partial.replace(path)
    flush_folder(path.parent)


def partial_files(folder: Path) -> list[Path]:
    """Temporary files in a folder, sorted."""
    return sorted(folder.glob(f"*{_PARTIAL_FILE}*"))


def remove_stale(folder: Path) -> None:
    """Remove temporary files that no process has locked. Raises StoreError."""
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


def write_flushed(path: Path, content: bytes) -> None:
    """Write a file inside a temporary folder and flush it to disk. Raises OSError."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically, replacing any existing one; for a single writer. Raises OSError.

    `publish` is for files that several processes may write.
    """
    partial = path.with_name(f"{path.name}{PARTIAL}")
    is_done = False
    try:
        write_flushed(partial, content)
        with suppress(OSError):  # there is no earlier file, or its disk has no modes
            partial.chmod(stat.S_IMODE(path.stat().st_mode))
        partial.replace(path)
        is_done = True
    finally:
        if not is_done:
            with suppress(OSError):  # an unfinished file would keep a full disk full
                partial.unlink(missing_ok=True)
    flush_folder(path.parent)


@contextmanager
def partial_paths(paths: Sequence[Path]) -> Iterator[dict[Path, Path]]:
    """Yield the temporary path of each path; files that still have it after the block are removed.

    For a single writer, which ends the block with `replace_files`.
    """
    partial = {path: path.with_name(f"{path.name}{PARTIAL}") for path in paths}
    try:
        yield partial
    finally:
        for path in partial.values():
            with suppress(NotADirectoryError):
                path.unlink(missing_ok=True)


def replace_files(partial: Mapping[Path, Path]) -> None:
    """Flush closed temporary files, and give them their names in turn. Raises OSError.

    The last name is free in between: a set without it is seen as incomplete.
    """
    for temporary in partial.values():
        _flush(temporary)
    *_, last = partial
    last.unlink(missing_ok=True)
    for path, temporary in partial.items():
        temporary.replace(path)
    flush_folder(last.parent)


@contextmanager
def whole_folder(
    folder: Path,
    *,
    beside: Path | None = None,
    replaces: bool = False,
    is_whole: Callable[[Path], bool] = Path.is_dir,
) -> Iterator[Path]:
    """Yield a temporary folder to write into; it is renamed to `folder` after the block.

    Of several processes the first one wins; with `replaces` the last. If the rename fails, an
    existing folder that `is_whole` stays. The temporary folder is in `beside`, by default next
    to `folder`. It is removed after a failure, as are those of this machine's ended processes.
    Raises OSError.
    """
    start = f"{folder.name}{PARTIAL}-{socket.gethostname()}-"
    partial = (beside or folder.parent) / f"{start}{os.getpid()}"
    _remove_abandoned(partial.parent, start)
    try:
        partial.mkdir(parents=True)
        yield partial
        flush_folder(partial)
        if replaces and folder.exists():
            shutil.rmtree(folder)
        try:
            partial.rename(folder)
        except OSError:
            if not is_whole(folder):
                raise
        flush_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_abandoned(parent: Path, start: str) -> None:
    """Remove the temporary folders of ended processes."""
    for leftover in parent.glob(f"{glob.escape(start)}*"):
        number = leftover.name.removeprefix(start)
        is_known = number.isdigit() and Path("/proc/self").exists()
        if is_known and (int(number) == os.getpid() or not Path(f"/proc/{number}").exists()):
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def write_errors(path: Path, error: type[MegatronDistillError] = StoreError) -> Iterator[None]:
    """Raise an OSError of writing a path as ``error``, with the remedy."""
    try:
        yield
    except OSError as failure:
        raise error(
            f"cannot write {path}: {failure.strerror}; free disk space or name another folder"
        ) from failure


def flush_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    _flush(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_FLUSH_BYTES = 2**27


class FlushedFile(io.FileIO):
    """A file for writing that is flushed in a thread, every 128 MiB; raises OSError.

    With gigabytes of unwritten pages the kernel blocks further writes until the disk catches up.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self._unflushed = 0
        self._flush: threading.Thread | None = None
        self._failure: OSError | None = None

    def write(self, data: Buffer, /) -> int:
        """Write; raises the OSError of an earlier flush."""
        count = super().write(data)
        self._unflushed += count
        if self._unflushed >= _FLUSH_BYTES and (self._flush is None or not self._flush.is_alive()):
            self._wait()
            self._unflushed = 0
            self._flush = threading.Thread(target=self._to_disk)
            self._flush.start()
        return count

    def close(self) -> None:
        """Wait for the running flush, and close."""
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
            # The kernel reports the error once; a later fsync would succeed.
            failure, self._failure = self._failure, None
            raise failure

    def _to_disk(self) -> None:
        try:
            os.fdatasync(self.fileno())
        except OSError as error:
            self._failure = error


@contextmanager
def new_folder(output: Path, *, bytes_needed: int, overwrite: bool) -> Iterator[Path]:
    """Yield a folder for all ranks to write into; it is renamed to `output` after the block.

    Wrap rank-local work that may fail inside the block in `together`. Raises CheckpointError on
    all ranks: `output` is not empty and `overwrite` is false, it cannot be written, or the disk
    has too little space. A failure or interruption leaves `output` unchanged and no other folder.

    Collective: world, all-gathers of a short object per rank.
    """
    import torch.distributed as dist

    from megatron_distill.runtime.collectives import together

    output = output.resolve()  # a symbolic link stays; its target is replaced
    partial = output.with_name(f"{output.name}{PARTIAL}")
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
                    replace_folder(partial, output)
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
        from megatron_distill.runtime.progress import size  # loads rich, which locks do not need

        raise CheckpointError(
            f"no space left for {output}: it needs {size(bytes_needed)} and {size(free)} are free; "
            "free some or name a folder on another disk"
        )


def replace_folder(partial: Path, folder: Path) -> Path:
    """Flush a complete folder and give it its name; return where an earlier folder is set aside.

    The earlier one keeps its name after a failure or an interruption. Removing it is left to the
    caller. Raises OSError.
    """
    flush_folder(partial)
    old = _aside(folder)
    try:
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
    flush_folder(folder.parent)
    return old


def set_aside(folder: Path) -> Path:
    """Give a complete folder a name of partial ones, and return it. Raises OSError."""
    old = _aside(folder)
    folder.rename(old)
    return old


def _clear(partial: Path, output: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    if output.exists():
        shutil.rmtree(_aside(output), ignore_errors=True)


def _aside(output: Path) -> Path:
    """Return the temporary name of the earlier folder while `output` is replaced."""
    return output.with_name(f"{output.name}.old{PARTIAL}")
