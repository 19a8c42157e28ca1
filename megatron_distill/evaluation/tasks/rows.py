"""The rows of a task's files: Parquet, JSON lines, Arrow or CSV."""

from __future__ import annotations

import csv
import glob
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from megatron_distill.data.chat.conversations import rows_of
from megatron_distill.data.formats import FORMATS
from megatron_distill.data.text.files import DamagedFileError, InputFile, expand_saved
from megatron_distill.errors import ConfigError, DataError
from megatron_distill.evaluation.tasks.record import Task

__all__ = ["TaskRow", "read_items", "read_shots"]

_SUFFIXES: Final = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
}
_COMPRESSED: Final = (".gz", ".zst", ".zstd")
_LONGEST_CELL: Final = 1 << 24


class TaskRow(NamedTuple):
    """A row: its columns by name, and its place for messages."""

    values: Mapping[str, Any]
    place: str


def read_items(task: Task, columns: Sequence[str]) -> list[TaskRow]:
    """Return the task's items: all rows, or `limit` of them at even distances.

    `columns` are read of tables, where they have them.

    Raises ConfigError or DataError: no file, an unreadable one, or one without rows.
    """
    found = list(_read(task, task.files, "files", columns))
    if not found:
        raise DataError(f"task {task.name}: {', '.join(task.files)} has no rows")
    if task.limit is None or task.limit >= len(found):
        return found
    return [found[place * len(found) // task.limit] for place in range(task.limit)]


def read_shots(task: Task, columns: Sequence[str]) -> list[TaskRow]:
    """Return the rows that examples are taken from; empty without shots.

    Raises ConfigError or DataError as `read_items`.
    """
    if not task.shots:
        return []
    if task.shot_rows:
        return [TaskRow(row, task.place) for row in task.shot_rows]
    return list(_read(task, task.shot_files or task.files, "shot_files", columns))


def _read(
    task: Task, patterns: Sequence[str], key: str, columns: Sequence[str]
) -> Iterator[TaskRow]:
    for path in _paths(task, patterns, key):
        name = task.format or _format_of(task, path)
        if name == "csv":
            yield from _csv_rows(task, path)
            continue
        reader = FORMATS[name].rows
        assert reader is not None, name
        for block in reader(0, path, (), columns):
            for number, values in rows_of(block):
                if isinstance(values, str):
                    raise DataError(f"task {task.name}: {path}:{number}: {values}")
                yield TaskRow(values, f"{path}:{number}")


def _paths(task: Task, patterns: Sequence[str], key: str) -> list[Path]:
    if not patterns:
        raise ConfigError(
            f"task {task.name}: {key} is empty; give the paths of its {key.removesuffix('s')}s, or "
            "a folder with files under the names in which the data set is published"
        )
    found: list[Path] = []
    for pattern in patterns:
        whole = str(Path(task.folder or "").expanduser() / pattern)
        matches = sorted(glob.glob(whole, recursive=True)) if glob.has_magic(whole) else [whole]  # noqa: PTH207
        files = [Path(name) for one in matches for name in expand_saved([one])]
        missing = next((path for path in files if not path.is_file()), None)
        if missing is not None or not files:
            raise ConfigError(
                f"task {task.name}: {key}: there is no file {missing or whole}; correct {key} or "
                f"`folder` (now {task.folder or 'the working folder'}; on the command line "
                f"{task.name}=FOLDER)"
            )
        found += files
    return found


def _format_of(task: Task, path: Path) -> str:
    name = path.name.lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    found = _SUFFIXES.get(Path(name).suffix)
    if found is None:
        raise ConfigError(
            f"task {task.name}: {path}: the format does not follow from the name; set `format` to "
            f"one of {', '.join(dict.fromkeys(_SUFFIXES.values()))}"
        )
    return found


def _csv_rows(task: Task, path: Path) -> Iterator[TaskRow]:
    """The rows of a CSV file, whose first line names the columns unless `column_names` does."""
    csv.field_size_limit(_LONGEST_CELL)
    file: InputFile | None = None
    try:
        file = InputFile(path)
        content = b"".join(iter(lambda: file.read(1 << 20), b"")).decode("utf-8")
        lines = csv.reader(io.StringIO(content, newline=""), strict=True)
        names = list(task.column_names) or next(lines, [])
        for cells in lines:
            place = f"{path}:{lines.line_num}"
            if len(cells) != len(names):
                raise DataError(
                    f"task {task.name}: {place}: {len(cells)} cells for {len(names)} columns "
                    f"({', '.join(names)}); correct the line, or name the columns of a file "
                    "without a header line under `column_names`"
                )
            yield TaskRow(dict(zip(names, cells, strict=True)), place)
    except (DamagedFileError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"task {task.name}: {path}: {error}; correct or replace the file"
        ) from error
    finally:
        if file is not None:
            file.close()
