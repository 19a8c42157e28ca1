"""The rows of a task's files: Parquet, JSON lines, Arrow or CSV."""

from __future__ import annotations

import csv
import glob
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

from megatron_distill.data.chat.conversations import rows_of
from megatron_distill.data.formats import FORMATS
from megatron_distill.data.text.files import (
    DamagedFileError,
    InputFile,
    expand_saved,
    table_columns,
)
from megatron_distill.errors import ConfigError, DataError
from megatron_distill.evaluation.tasks.record import Task

__all__ = ["TaskRow", "columns_of", "in_its_layout", "read_items", "read_shots"]

_SUFFIXES: Final = {
    ".jsonl": "jsonl",
    ".json": "json",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
}
_FORMAT_NAMES: Final = ", ".join(dict.fromkeys(_SUFFIXES.values()))
_TABLES: Final = ("parquet", "arrow")
_COMPRESSED: Final = (".gz", ".zst", ".zstd")
_LONGEST_CELL: Final = 1 << 24
_LONGEST_JSON: Final = 1 << 30
_END: Final = "\ue000end\ue001"  # a line behind the last one, with private characters


class TaskRow(NamedTuple):
    """A row: its columns by name, its place for messages, and its file's name without endings.

    `table`: the Parquet or Arrow file that it is of, whose other columns are not read.
    """

    values: Mapping[str, Any]
    place: str
    file: str = ""
    table: Path | None = None


def columns_of(row: TaskRow) -> list[str]:
    """Return the names of all columns of a row, for messages; reads its file where it must."""
    return list(row.values) if row.table is None else table_columns(row.table)


def in_its_layout(task: Task) -> Task:
    """Return the task with the keys of the layout whose files are in its folder.

    Those of the task itself come first, and stand where no layout's files are there.
    """
    for layout in ({}, *task.layouts):
        found = replace(task, **layout)
        if found.files and all(_matches(found, pattern) for pattern in found.files):
            return found
    return task


def read_items(task: Task, columns: Sequence[str]) -> tuple[list[TaskRow], int]:
    """Return the task's items and the number of rows: all, or `limit` at even distances.

    `columns` are read of tables, where they have them.

    Raises ConfigError or DataError: no file, an unreadable one, or one without rows.
    """
    found = list(_read(task, task.files, "files", columns))
    if not found:
        folder = task.folder or "the working folder"
        raise DataError(
            f"task {task.name} ({task.place}): files = {list(task.files)} in {folder} has no row; "
            "correct `files` or `folder`, or fill the file"
        )
    if task.limit is None or task.limit >= len(found):
        return found, len(found)
    chosen = [found[place * len(found) // task.limit] for place in range(task.limit)]
    return chosen, len(found)


def read_shots(task: Task, columns: Sequence[str]) -> list[TaskRow]:
    """Return the rows that examples are taken from; empty without shots.

    Raises ConfigError or DataError as `read_items`.
    """
    if not task.shots:
        return []
    if task.shot_rows:
        rows = enumerate(task.shot_rows, start=1)
        return [TaskRow(row, f"{task.place}: shot_rows: row {number}") for number, row in rows]
    return list(_read(task, task.shot_files or task.files, "shot_files", columns))


def _read(
    task: Task, patterns: Sequence[str], key: str, columns: Sequence[str]
) -> Iterator[TaskRow]:
    for path in _paths(task, patterns, key):
        file = path.name.partition(".")[0]
        table = path if _format(task, path) in _TABLES else None
        for place, values in _rows(task, path, columns):
            if isinstance(values, str):
                raise DataError(f"task {task.name}: {path}:{place}: {values}")
            yield TaskRow(values, f"{path}:{place}", file, table)


def _rows(
    task: Task, path: Path, columns: Sequence[str]
) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """Yield the number of each row with its columns, or with the reason why it has none."""
    name = _format(task, path)
    if name == "csv":
        yield from _csv_rows(task, path)
        return
    if name == "json":
        if (values := _whole_json(task, path)) is not None:
            yield from enumerate(values, start=1)
            return
        name = "jsonl"
    known = FORMATS.get(name)
    if known is None or known.rows is None:
        raise task.problem("format", name, f"one of {_FORMAT_NAMES}")
    for block in known.rows(0, path, (), columns):
        yield from rows_of(block)


def _matches(task: Task, pattern: str) -> list[str]:
    """Return the files or folders of a path or glob in the task's folder."""
    whole = str(Path(task.folder or "").expanduser() / pattern)
    if glob.has_magic(whole):
        return sorted(glob.glob(whole, recursive=True))  # noqa: PTH207
    return [whole] if Path(whole).exists() else []


def _paths(task: Task, patterns: Sequence[str], key: str) -> list[Path]:
    if not patterns:
        raise ConfigError(
            f"task {task.name}: {key} is empty. Give the paths of its {key.removesuffix('s')}s, or "
            "a folder with files under the names in which the data set is published"
        )
    found: list[Path] = []
    for pattern in patterns:
        matches = _matches(task, pattern)
        try:
            files = [Path(name) for one in matches for name in expand_saved([one])]
        except DataError as error:
            raise DataError(f"task {task.name} ({task.place}): {key}: {error}") from error
        missing = next((path for path in files if not path.is_file()), None)
        if missing is not None or not files:
            whole = missing or Path(task.folder or "").expanduser() / pattern
            raise ConfigError(
                f"task {task.name}: {key}: there is no file {whole}{_others(task, key)}; correct "
                f"{key} or `folder` (now {task.folder or 'the working folder'}; on the command "
                f"line {task.name}=FOLDER)"
            )
        found += files
    return found


def _others(task: Task, key: str) -> str:
    """Return the files of the task's further layouts, in words."""
    named = [" ".join(one["files"]) for one in task.layouts if "files" in one]
    return f", nor {' nor '.join(named)}" if named and key == "files" else ""


def _format(task: Task, path: Path) -> str:
    if task.format:
        return task.format
    name = path.name.lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    found = _SUFFIXES.get(Path(name).suffix)
    if found is None:
        raise ConfigError(
            f"task {task.name}: {path}: the format does not follow from the name; set `format` to "
            f"one of {_FORMAT_NAMES}"
        )
    return found


def _whole_json(task: Task, path: Path) -> list[Mapping[str, Any] | str] | None:
    """Return the rows of a file that is one JSON value: an object or a list of them.

    None for a file whose first line is a whole object: JSON lines. Raises DataError.
    """
    file: InputFile | None = None
    try:
        file = InputFile(path)
        first = file.read_line(_LONGEST_JSON)
        try:
            if isinstance(json.loads(first), dict):
                return None
        except ValueError:
            pass  # the value goes on in further lines, or is damaged
        content = first + b"".join(iter(lambda: file.read(1 << 20), b""))
        found = json.loads(content.decode("utf-8"))
    except DamagedFileError as error:
        raise DataError(f"task {task.name}: {error}") from error
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise DataError(
            f"task {task.name}: {path}: not JSON ({error}); correct or replace the file"
        ) from error
    finally:
        if file is not None:
            file.close()
    rows = found if isinstance(found, list) else [found]
    return [one if isinstance(one, dict) else f"not a JSON object: {one!r:.60}" for one in rows]


def _csv_rows(task: Task, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows of a CSV file, whose first line names the columns unless `column_names` does.

    As in pandas, text behind a quoted part belongs to the cell. A quote without end is an error.
    """
    csv.field_size_limit(_LONGEST_CELL)
    file: InputFile | None = None
    try:
        file = InputFile(path)
        content = b"".join(iter(lambda: file.read(1 << 20), b"")).decode("utf-8")
        lines = csv.reader(chain(io.StringIO(content, newline=""), [_END]))
        names = list(task.column_names) or next(lines, [])
        for cells in lines:
            if not cells or cells == [_END]:
                continue  # a blank line, or the end
            if cells[-1].endswith(_END):  # the last cell goes on
                raise csv.Error(f"line {lines.line_num - 1}: a quoted cell does not end")
            if len(cells) != len(names):
                raise DataError(
                    f"task {task.name}: {path}:{lines.line_num}: {len(cells)} cells for "
                    f"{len(names)} columns ({', '.join(names)}); correct the line, or name the "
                    "columns of a file without a header line under `column_names`"
                )
            yield lines.line_num, dict(zip(names, cells, strict=True))
    except DamagedFileError as error:
        raise DataError(f"task {task.name}: {error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"task {task.name}: {path}: {error}; correct or replace the file"
        ) from error
    finally:
        if file is not None:
            file.close()
