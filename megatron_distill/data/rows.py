"""Rows of instruction data in blocks: raw bytes while they travel, objects where they are used."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatron_distill.data.conversations import without_nulls
from megatron_distill.data.documents import LINE_BYTES
from megatron_distill.data.files import DamagedFileError, InputFile
from megatron_distill.data.tables import TABLE_FORMATS, record_batches

BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive rows of one file, the first of them with the number `first_row`, from 1.

    data: whole lines of JSON; of a table, Arrow's stream format; where `problem` says what is wrong
    with the file from here on, nothing.
    """

    file: int
    path: str
    first_row: int
    data: bytes
    is_table: bool = False
    problem: str | None = None


Row = tuple[int, dict[str, Any] | str]
"""A row's number and what it holds, or as text what is wrong with it."""


def read_blocks(
    files: Sequence[Path], *, format: str, required: Sequence[str], optional: Sequence[str]
) -> Iterator[RowBlock]:
    """Yield the rows of all files in blocks of about BLOCK_BYTES.

    Raises DataError where a file cannot be opened, or a table has no column of a required name.
    """
    for number, path in enumerate(files):
        if format in TABLE_FORMATS:
            yield from _table_blocks(number, path, required, optional)
        else:
            yield from _line_blocks(number, path)


def _line_blocks(number: int, path: Path) -> Iterator[RowBlock]:
    row, carried = 1, b""
    file: InputFile | None = None
    try:
        file = InputFile(path)
        while data := file.read(BLOCK_BYTES):
            cut = data.rfind(b"\n") + 1
            if not cut:
                carried += data
                if len(carried) > LINE_BYTES:
                    raise DamagedFileError(f"the line is longer than {LINE_BYTES} bytes; split it")
                continue
            lines, carried = carried + data[:cut], data[cut:]
            yield RowBlock(number, str(path), row, lines)
            row += lines.count(b"\n")
        if carried:
            yield RowBlock(number, str(path), row, carried)
    except DamagedFileError as error:
        yield RowBlock(number, str(path), row, b"", problem=str(error))
    finally:
        if file is not None:
            file.close()


def _table_blocks(
    number: int, path: Path, required: Sequence[str], optional: Sequence[str]
) -> Iterator[RowBlock]:
    import pyarrow as pa

    row = 0
    try:
        for row, batch in record_batches(path, required=required, optional=optional):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            data = sink.getvalue().to_pybytes()
            yield RowBlock(number, str(path), row + 1, data, is_table=True)
            row += batch.num_rows
    except DamagedFileError as error:
        yield RowBlock(number, str(path), row + 1, b"", problem=str(error))


def rows_of(block: RowBlock) -> Iterator[Row]:
    """The rows of a block; empty lines are passed over."""
    if block.problem is not None:
        yield block.first_row, block.problem
    elif block.is_table:
        yield from _table_rows(block)
    else:
        for place, line in enumerate(block.data.split(b"\n")):
            if line and not line.isspace():
                yield block.first_row + place, _json_row(line)


def _json_row(line: bytes) -> dict[str, Any] | str:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"not valid UTF-8 ({error.reason}); convert the file to UTF-8"
    except (ValueError, RecursionError) as error:
        return f"not a JSON object ({error}); correct the line"
    return value if isinstance(value, dict) else f"not a JSON object but {type(value).__name__}"


def _table_rows(block: RowBlock) -> Iterator[Row]:
    import pyarrow as pa

    with pa.ipc.open_stream(block.data) as reader:
        rows = reader.read_all().to_pylist()
    for place, row in enumerate(rows):
        yield block.first_row + place, without_nulls(row)
