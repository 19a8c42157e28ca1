"""Documents read from files in order, each with the cursor from which reading can resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatron_distill.data.text.files import (
    DamagedFileError,
    InputFile,
    kind_of,
    record_batches,
)
from megatron_distill.errors import DataError
from megatron_distill.log import get_logger

PIECE_BYTES: Final = 4 << 20  # a longer file is read, and packed, in pieces of at most this
LINE_BYTES: Final = 256 << 20
_REPORTED_RECORDS: Final = 10  # number of skipped records that are logged one by one

_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position between two documents: `file` counts in the order in which the files are read.

    offset: uncompressed bytes before it in that file; line: lines before it. Inside a file that is
    read in pieces, `document` is the digest (hex) of the current document.
    """

    file: int = 0
    offset: int = 0
    line: int = 0
    document: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """A document, or a piece of a long one: `is_start` and `is_end` tell which."""

    text: str
    digest: bytes  # of the content; of the first piece's content for every piece
    is_end: bool
    after: Cursor
    path: Path
    is_start: bool = True

    @property
    def text_digest(self) -> bytes:
        """8 bytes that identify the text: of a document, or of a piece of a long one."""
        return self.digest if self.is_start else content_digest(self.text.encode())

    @property
    def place(self) -> str:
        """File and, where documents are rows, row."""
        return f"{self.path}:{self.after.line}" if self.after.line else str(self.path)


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that is not a document; the message names file, line or byte, and reason."""

    message: str
    after: Cursor


Record = Document | BadRecord
ReadFile = Callable[[InputFile, Cursor], Iterator[Record]]
"""Reads the rest of one open file from a cursor."""


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Selects the rows whose ``field`` is ``value``."""

    field: str
    value: str

    def selects(self, row: Mapping[str, Any]) -> bool:
        """Whether a row is selected."""
        return row.get(self.field) == self.value


def content_digest(data: bytes) -> bytes:
    """8 bytes that identify a document by its content, independent of file and seed."""
    return hashlib.blake2b(data, digest_size=8).digest()


def is_held_out(digest: bytes, fraction: float) -> bool:
    """Whether a document belongs to the held-out share: a property of its content alone."""
    return int.from_bytes(digest, "big") < fraction * 2.0**64


def read_whole(file: InputFile, start: Cursor) -> Iterator[Record]:
    """The file as one document; in pieces cut at line ends if it is longer than PIECE_BYTES."""
    carried, digest = b"", bytes.fromhex(start.document)
    offset = start.offset
    while True:
        data = carried + file.read(PIECE_BYTES + 1 - len(carried))
        is_end = len(data) <= PIECE_BYTES
        cut = len(data) if is_end else _piece_end(data)
        piece, carried = data[:cut], data[cut:]
        if is_end and not piece:
            return
        is_start, digest = not digest, digest or content_digest(piece)
        try:
            text = piece.decode("utf-8")
        except UnicodeDecodeError as error:
            where = f"byte {offset + error.start}"
            yield BadRecord(_not_utf8(file.path, where, error), Cursor(start.file + 1))
            return
        offset += cut
        after = Cursor(start.file + 1)
        if not is_end:
            after = Cursor(start.file, offset, 0, digest.hex())
        yield Document(text, digest, is_end, after, file.path, is_start)
        if is_end:
            return


def _piece_end(data: bytes) -> int:
    """The end of a piece: after its last line end, else between two characters."""
    line_end = data.rfind(b"\n", 0, PIECE_BYTES) + 1
    if line_end:
        return line_end
    cut = PIECE_BYTES
    while cut > PIECE_BYTES - 4 and data[cut] & 0xC0 == 0x80:  # a continuation byte
        cut -= 1
    return cut


def read_lines(file: InputFile, start: Cursor) -> Iterator[Record]:
    """One document per line, without its line end; empty lines are skipped."""
    for line, after in _numbered_lines(file, start):
        if isinstance(line, BadRecord):
            yield line
            continue
        content = line.rstrip(b"\r\n")
        if content:
            yield _decoded(content, file.path, after)


def jsonl_reader(text_key: str, rows: RowFilter | None = None) -> ReadFile:
    """A reader of JSON objects, one per line, whose `text_key` holds the document.

    `rows` selects some of them, None: all.
    """

    def read(file: InputFile, start: Cursor) -> Iterator[Record]:
        for line, after in _numbered_lines(file, start):
            if isinstance(line, BadRecord):
                yield line
            elif not line.isspace():
                record = _parsed(line, file.path, after, text_key, rows)
                if isinstance(record, BadRecord) or (record is not None and record.text):
                    yield record

    return read


def table_reader(text_key: str, rows: RowFilter | None = None) -> ReadFile:
    """A reader of Parquet and Arrow files whose column `text_key` holds the documents.

    `line` of a cursor counts rows. `rows` selects some of them, None: all.
    """
    columns = (text_key,) if rows is None else (text_key, rows.field)

    def read(file: InputFile, start: Cursor) -> Iterator[Record]:
        for first, batch in record_batches(file.path, required=columns, first_row=start.line):
            names = None if rows is None else batch.column(rows.field).to_pylist()
            for place, text in enumerate(batch.column(text_key).to_pylist()):
                if rows is not None and names is not None and names[place] != rows.value:
                    continue
                after = Cursor(start.file, 0, first + place + 1)
                record = _text_record(text, file.path, after, text_key)
                if isinstance(record, BadRecord) or record.text:
                    yield record

    return read


def _numbered_lines(file: InputFile, start: Cursor) -> Iterator[tuple[bytes | BadRecord, Cursor]]:
    number = start.line
    while line := file.read_line(LINE_BYTES):
        number += 1
        is_too_long = len(line) == LINE_BYTES and not line.endswith(b"\n")
        while is_too_long and (rest := file.read_line(LINE_BYTES)) and not rest.endswith(b"\n"):
            pass
        after = Cursor(start.file, file.offset, number)
        if is_too_long:
            message = f"{file.path}:{number}: the line is longer than {LINE_BYTES} bytes; split it"
            yield BadRecord(message, after), after
        else:
            yield line, after


def _decoded(content: bytes, path: Path, after: Cursor) -> Record:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRecord(_not_utf8(path, f"line {after.line}", error), after)
    return Document(text, content_digest(content), True, after, path)


def _parsed(
    line: bytes, path: Path, after: Cursor, text_key: str, rows: RowFilter | None
) -> Record | None:
    """The document of a line; None if the row is not selected."""
    where = f"{path}:{after.line}"
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRecord(_not_utf8(path, f"line {after.line}", error), after)
    except (ValueError, RecursionError) as error:
        return BadRecord(f"{where}: not a JSON object ({error}); correct the line", after)
    if not isinstance(value, dict):
        return BadRecord(
            f"{where}: not a JSON object but {kind_of(value)}; write one object on each line", after
        )
    if rows is not None and not rows.selects(value):
        return None
    if text_key not in value:
        keys = ", ".join(sorted(value)[:10]) or "none"
        return BadRecord(
            f"{where}: the object has no key {text_key!r} (its keys: {keys}); set text_key of the "
            "data source",
            after,
        )
    return _text_record(value[text_key], path, after, text_key)


def _text_record(text: object, path: Path, after: Cursor, text_key: str) -> Record:
    where = f"{path}:{after.line}"
    if not isinstance(text, str):
        return BadRecord(
            f"{where}: the value of {text_key!r} is not text but {kind_of(text)}; correct it, or "
            "set text_key of the data source",
            after,
        )
    try:
        content = text.encode("utf-8")
    except UnicodeEncodeError:
        return BadRecord(f"{where}: {text_key!r} contains an unpaired surrogate; correct it", after)
    return Document(text, content_digest(content), True, after, path)


def _not_utf8(path: Path, where: str, error: UnicodeDecodeError) -> str:
    return f"{path}: not valid UTF-8 at {where} ({error.reason}); convert the file to UTF-8"


class DocumentReader:
    """Reads the documents of a list of files, in any order of the files, from any cursor on.

    A bad record or a damaged file raises DataError; with `skip_bad` it is counted in `skipped`,
    logged, and skipped. Memory: one piece or one line.
    """

    def __init__(self, files: Sequence[Path], *, read: ReadFile, skip_bad: bool) -> None:
        self.files = tuple(files)
        self.skipped = 0
        self._read = read
        self._skip_bad = skip_bad

    def documents(self, order: Sequence[int], start: Cursor) -> Iterator[Document]:
        """The documents of `files[order[0]]`, `files[order[1]]`, ... from `start` on."""
        for position in range(start.file, len(order)):
            cursor = start if position == start.file else Cursor(position)
            yield from self._of_file(self.files[order[position]], cursor)

    def _of_file(self, path: Path, cursor: Cursor) -> Iterator[Document]:
        file: InputFile | None = None
        try:
            file = InputFile(path, offset=cursor.offset)
            for record in self._read(file, cursor):
                if isinstance(record, Document):
                    yield record
                else:
                    self._reject(record.message)
        except DamagedFileError as error:
            self._reject(str(error))
        finally:
            if file is not None:
                file.close()

    def _reject(self, message: str) -> None:
        if not self._skip_bad:
            raise DataError(f"{message} (data.on_error=skip passes over such records)")
        self.skipped += 1
        if self.skipped <= _REPORTED_RECORDS:
            _LOG.warning("skipped: %s", message)
        elif self.skipped.bit_count() == 1:  # 16, 32, 64, ...
            _LOG.warning("skipped %d records so far, the last: %s", self.skipped, message)
