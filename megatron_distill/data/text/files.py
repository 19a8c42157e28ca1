"""Input files: glob expansion, decompression by extension, and reading with byte offsets."""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import zstandard

from megatron_distill.errors import DataError

_SKIP_BYTES: Final = 1 << 20
_COMPRESSED_BYTES: Final = 1 << 14  # per step: bounds the output of a highly compressed file
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_DAMAGE: Final = (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile)
_NOT_CORPUS: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


class DamagedFileError(Exception):
    """A file's content cannot be read any further; the message names file and reason.

    Attributes:
        reason: without the file, for a message that names it.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason


def expand_paths(patterns: Sequence[str]) -> list[Path]:
    """The files of paths and globs, sorted, without duplicates; each is checked to open.

    Raises DataError naming a pattern that is empty, missing, matches nothing or is a folder, or a
    file that cannot be opened.
    """
    if not patterns:
        raise DataError("data.sources.paths is empty; give at least one path")
    found: set[str] = set()
    for pattern in patterns:
        found.update(_expand(pattern))
    paths = [Path(name) for name in sorted(found)]
    for path in paths:
        try:
            with path.open("rb") as stream:
                stream.read(1)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}); let this user read it, or leave it out"
            ) from error
    return paths


def _expand(pattern: str) -> list[str]:
    if not pattern.strip():
        raise DataError("data.sources.paths contains an empty path; remove it or name a file")
    path = Path(pattern).expanduser()
    if path.is_dir():
        raise DataError(
            f"{pattern}: is a folder; give its files as a glob, such as {pattern}/*.txt"
        )
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
    """Zstandard frames as a byte stream; unlike the library's reader it refuses a cut-off end."""

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

    `offset` counts uncompressed bytes. A byte-order mark at the beginning is skipped. Every
    method raises DamagedFileError if decompression fails, and DataError for an error of the
    operating system.
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
                raise DamagedFileError(path, f"ends after {self.offset} bytes, not {offset}")

    def _pass_byte_order_mark(self) -> None:
        if self._stream.peek(3)[:3] == _BYTE_ORDER_MARK:  # type: ignore[attr-defined]
            self.offset += len(self._stream.read(3))

    def _damage(self, error: BaseException) -> DamagedFileError:
        return DamagedFileError(
            self.path,
            f"damaged or cut off after {self.offset} bytes of content ({error}); replace the file",
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


_BATCH_ROWS: Final = 256
_STATE_FILE: Final = "state.json"  # of a dataset that save_to_disk wrote
_SPLITS_FILE: Final = "dataset_dict.json"
_FILE_MAGIC: Final = b"ARROW1"  # of Arrow's random-access format; else the streaming format


def expand_saved(patterns: Sequence[str]) -> list[str]:
    """The patterns, with the folder of a saved dataset replaced by its files.

    Raises DataError: a folder holds no saved dataset, or several splits of one.
    """
    found: list[str] = []
    for pattern in patterns:
        folder = Path(pattern).expanduser()
        found += _saved_files(folder) if pattern.strip() and folder.is_dir() else [pattern]
    return found


def _saved_files(folder: Path) -> list[str]:
    if (folder / _SPLITS_FILE).is_file():
        splits = _read_json(folder / _SPLITS_FILE).get("splits", [])
        named = ", ".join(str(folder / str(split)) for split in splits)
        raise DataError(f"{folder}: contains the splits of a dataset; name one of {named}")
    if not (folder / _STATE_FILE).is_file():
        raise DataError(
            f"{folder}: not a saved dataset (no {_STATE_FILE}); give its files as a glob, such as "
            f"{folder}/*.arrow"
        )
    files = [
        str(folder / entry["filename"])
        for entry in _read_json(folder / _STATE_FILE).get("_data_files", [])
    ]
    if not files:
        raise DataError(f"{folder}: the saved dataset lists no data file; save it again")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); save the dataset again") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: not in the format of save_to_disk; save the dataset again")
    return found


def record_batches(
    path: Path, *, required: Sequence[str], optional: Sequence[str] = (), first_row: int = 0
) -> Iterator[tuple[int, Any]]:
    """Yield a pyarrow RecordBatch of these columns, preceded by the number of rows before it.

    Rows before `first_row` are skipped. The file's first bytes give its format. Memory:
    one batch, and for Parquet the pages of one row group. Raises DamagedFileError, and DataError
    if a required column is missing.
    """
    import pyarrow as pa  # takes 0.2 s, which other formats should not pay

    try:
        row = 0
        for batch in _batches(path, required, optional, first_row):
            if isinstance(batch, int):
                row += batch
                continue
            skipped = min(max(0, first_row - row), batch.num_rows)
            if skipped < batch.num_rows:
                yield row + skipped, batch.slice(skipped)
            row += batch.num_rows
    except (pa.ArrowException, OSError) as error:  # OSError for a cut-off stream
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise DamagedFileError(
            path,
            f"damaged or cut off ({reason}); replace it, or name its true format if it is not a "
            "Parquet or Arrow file",
        ) from error


def _batches(
    path: Path, required: Sequence[str], optional: Sequence[str], first_row: int
) -> Iterator[Any]:
    """Yield batches, or the number of rows of a row group that is skipped unread."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with path.open("rb") as stream:
        magic = stream.read(len(_FILE_MAGIC))
    if magic[:4] == b"PAR1":
        with pq.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
            columns = _columns(path, file.schema_arrow.names, required, optional)
            row = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                row += rows
                if row <= first_row:
                    yield rows
                else:
                    yield from file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns)
        return
    with pa.memory_map(str(path)) as source:
        if magic == _FILE_MAGIC:
            reader = pa.ipc.open_file(source)
            found = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            reader = pa.ipc.open_stream(source)
            found = iter(reader)
        columns = _columns(path, reader.schema.names, required, optional)
        for batch in found:
            chosen = batch.select(columns)
            for start in range(0, chosen.num_rows, _BATCH_ROWS):
                yield chosen.slice(start, _BATCH_ROWS)


def table_columns(path: Path) -> list[str]:
    """The names of a Parquet or Arrow file's columns.

    Raises OSError, and pyarrow's errors for a damaged file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with path.open("rb") as stream:
        magic = stream.read(len(_FILE_MAGIC))
    if magic[:4] == b"PAR1":
        return list(pq.read_schema(path).names)
    with pa.memory_map(str(path)) as source:
        opened = pa.ipc.open_file if magic == _FILE_MAGIC else pa.ipc.open_stream
        return list(opened(source).schema.names)


def _columns(
    path: Path, names: Sequence[str], required: Sequence[str], optional: Sequence[str]
) -> list[str]:
    for name in required:
        if name not in names:
            raise DataError(
                f"{path}: has no column {name!r} (its columns: {', '.join(names) or 'none'}); set "
                "text_key or `conversation` of the data source"
            )
    return [name for name in (*required, *optional) if name in names]


def kind_of(value: object) -> str:
    """The kind of a value of a row, in the words of a user of JSON."""
    if value is None:
        return "null"
    kinds = {bool: "true or false", str: "text", list: "a list", dict: "an object"}
    kinds |= {int: "a number", float: "a number"}
    return kinds.get(type(value), type(value).__name__)


def stdlib_files(root: Path | None = None) -> list[Path]:
    """Every module of the running Python's standard library, sorted by its path below `root`.

    Installed packages and tests are left out, and so are files that are not UTF-8 (source code may
    declare another encoding). Raises DataError if there is none.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    candidates = sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).parts)
    files = [
        path
        for path in candidates
        if _NOT_CORPUS.isdisjoint(path.relative_to(folder).parts) and _is_utf8(path)
    ]
    if not files:
        raise DataError(
            f"{folder}: contains no Python source for format python_stdlib; use a Python that is "
            "installed with its sources, or another data source"
        )
    return files


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True


def fingerprint(files: Sequence[Path]) -> str:
    """Number of files, and one digest of their names and sizes, to compare two runs' corpora."""
    listing = "\n".join(f"{path.name} {path.stat().st_size}" for path in files)
    return f"{len(files)} files {hashlib.sha256(listing.encode()).hexdigest()[:16]}"
