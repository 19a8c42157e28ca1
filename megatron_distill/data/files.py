"""Input files: glob expansion, decompression by extension, and reading that knows where it is."""

from __future__ import annotations

import glob
import gzip
import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final, cast

import zstandard

from megatron_distill.errors import DataError

_SKIP_BYTES: Final = 1 << 20
_COMPRESSED_BYTES: Final = 1 << 14  # per step: bounds what a highly compressed file unfolds to
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_DAMAGE: Final = (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile)


class DamagedFileError(Exception):
    """The compressed content cannot be read any further; the message names file and reason."""


def expand_paths(patterns: Sequence[str]) -> list[Path]:
    """The files that paths and globs name, sorted, each once; every one can be opened.

    Raises DataError naming the pattern that is empty, missing, matches nothing, or is a folder, and
    the file that cannot be opened.
    """
    if not patterns:
        raise DataError("a data source names no file: give data.sources.paths at least one path")
    found: set[str] = set()
    for pattern in patterns:
        found.update(_expand(pattern))
    paths = [Path(name) for name in sorted(found)]
    for path in paths:
        try:
            with path.open("rb") as stream:
                stream.read(1)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return paths


def _expand(pattern: str) -> list[str]:
    if not pattern.strip():
        raise DataError("data.sources.paths holds an empty path: remove it or name a file")
    path = Path(pattern).expanduser()
    if path.is_dir():
        raise DataError(f"{pattern}: is a folder; name its files with a glob, as {pattern}/*.txt")
    if path.exists():
        return [str(path)]
    if not glob.has_magic(pattern):
        raise DataError(f"{pattern}: no such file; correct data.sources.paths")
    names = glob.glob(str(path), recursive=True)  # noqa: PTH207 (takes absolute patterns)
    matches = [name for name in names if Path(name).is_file()]
    if not matches:
        raise DataError(f"{pattern}: the glob matches no file; correct data.sources.paths")
    return matches


class _ZstdFrames(io.RawIOBase):
    """Zstandard frames as a byte stream that, unlike the library's own, refuses a cut-off end."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._compressed = b""
        self._pending = memoryview(b"")
        self._inside = False

    def readable(self) -> bool:
        return True

    def readinto(self, target: object) -> int:
        view = memoryview(target).cast("B")  # type: ignore[arg-type]
        while not self._pending:
            if not self._unfold():
                return 0
        count = min(len(view), len(self._pending))
        view[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count

    def _unfold(self) -> bool:
        """Decompress some more; False at the end of the file."""
        compressed = self._compressed or self._source.read(_COMPRESSED_BYTES)
        self._compressed = b""
        if not compressed:
            if self._inside:
                raise EOFError("the file ends inside a zstandard frame")
            return False
        self._pending = memoryview(self._frame.decompress(compressed))
        self._inside = not self._frame.eof
        if self._frame.eof:
            self._compressed = self._frame.unused_data
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        return True

    def close(self) -> None:
        self._source.close()
        super().close()


def _open_zstandard(path: Path) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(_ZstdFrames(path.open("rb")), _SKIP_BYTES))


def _open_plain(path: Path) -> BinaryIO:
    return path.open("rb")


def _open_gzip(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb"))


_OPENERS: Final = {".gz": _open_gzip, ".zst": _open_zstandard, ".zstd": _open_zstandard}


class InputFile:
    """A file read forward in bytes, decompressed if its name ends in .gz, .zst or .zstd.

    `offset` counts uncompressed bytes. A byte-order mark at the beginning is passed over. Every
    method raises DamagedFileError where the decompressor gives up, and DataError where the
    operating system does.
    """

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self.path = path
        self.offset = 0
        try:
            self._stream = _OPENERS.get(path.suffix.lower(), _open_plain)(path)
            if offset and path.suffix.lower() not in _OPENERS:
                self.offset = self._stream.seek(offset)
            elif not offset:
                self._pass_byte_order_mark()
        except _DAMAGE as error:
            raise self._damage(error) from error
        except OSError as error:
            raise self._refusal(error) from error
        while self.offset < offset:
            if not self.read(min(_SKIP_BYTES, offset - self.offset)):
                raise DamagedFileError(f"{path}: ends after {self.offset} bytes, not {offset}")

    def _pass_byte_order_mark(self) -> None:
        if self._stream.peek(3)[:3] == _BYTE_ORDER_MARK:  # type: ignore[attr-defined]
            self.offset += len(self._stream.read(3))

    def _damage(self, error: BaseException) -> DamagedFileError:
        return DamagedFileError(
            f"{self.path}: damaged or cut off after {self.offset} bytes of content ({error}); "
            "replace the file"
        )

    def _refusal(self, error: OSError) -> DataError:
        return DataError(f"{self.path}: cannot be read at byte {self.offset} ({error.strerror})")

    def read(self, size: int) -> bytes:
        """The next `size` bytes, fewer only at the end."""
        try:
            data = self._stream.read(size)
        except _DAMAGE as error:
            raise self._damage(error) from error
        except OSError as error:
            raise self._refusal(error) from error
        self.offset += len(data)
        return data

    def read_line(self, limit: int) -> bytes:
        """The next line with its end, or its first `limit` bytes; empty at the end of the file."""
        try:
            data = self._stream.readline(limit)
        except _DAMAGE as error:
            raise self._damage(error) from error
        except OSError as error:
            raise self._refusal(error) from error
        self.offset += len(data)
        return data

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
