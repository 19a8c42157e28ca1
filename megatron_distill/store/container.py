"""ArrayRecord files: one record per chunk, uncompressed, the same bytes for the same records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from megatron_distill.errors import StoreError, counted

__all__ = ["RecordFile", "RecordFileWriter"]

_WRITE_OPTIONS: Final = "group_size:1,uncompressed"
_READ_OPTIONS: Final = "readahead_buffer_size:0"


def _module() -> Any:
    """The library; imported only to open a file, since it has no build for some machines."""
    try:
        from array_record.python import array_record_module
    except ModuleNotFoundError as error:
        raise StoreError(
            "a teacher store needs the package array_record, which is not installed: "
            "pip install array-record (Linux)"
        ) from error
    return array_record_module


class RecordFileWriter:
    """Writes records to a file, which is unreadable before `close`."""

    def __init__(self, path: Path, *, named: Path) -> None:
        self._named = named
        self._writer = _module().ArrayRecordWriter(str(path), _WRITE_OPTIONS)
        self._require_ok()

    def write(self, record: bytes) -> None:
        """Append a record. Raises StoreError."""
        with self._said():
            self._writer.write(record)

    def close(self) -> None:
        """Finish the file and make it readable. Raises StoreError."""
        # After close(), ok() is always false; close() raises write errors itself.
        self._require_ok()
        with self._said():
            self._writer.close()

    def abandon(self) -> None:
        """Close an unfinished file in any state, ignoring errors."""
        try:
            self._writer.close()
        except RuntimeError:
            return

    def _require_ok(self) -> None:
        if not self._writer.ok():
            raise StoreError(f"cannot write {self._named}: {_WHAT_TO_DO}")

    @contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise StoreError(f"cannot write {self._named}: {error}; {_WHAT_TO_DO}") from error


_WHAT_TO_DO: Final = "free disk space or name another folder"


class RecordFile:
    """Random access to the records of a file.

    Raises StoreError on opening: the file is missing, cut off or was never closed (the library
    reports none of these), or the number of records is not `count`.
    """

    def __init__(self, path: Path, *, count: int | None = None) -> None:
        self.path = path
        if not path.is_file():
            raise StoreError(f"{path}: missing")
        self._reader = _module().ArrayRecordReader(str(path), _READ_OPTIONS)
        if not self._reader.ok():
            raise StoreError(f"{path}: cut off, not closed, or not an ArrayRecord file")
        self.count: int = self._reader.num_records()
        if count is not None and self.count != count:
            raise StoreError(f"{path}: {counted(self.count, 'record')} instead of {count}")

    def read(self, positions: Sequence[int]) -> list[bytes]:
        """Records at positions from 0. Raises StoreError: one of them is damaged."""
        try:
            records: list[bytes] = self._reader.read(list(positions))
        except (RuntimeError, IndexError, ValueError) as error:
            # The library's message is about internal blocks; it stays in the exception chain.
            raise StoreError(
                f"{self.path}: damaged: its bytes do not match their checksums"
            ) from error
        return records

    def close(self) -> None:
        """Close the file."""
        self._reader.close()
