"""The formats of data sources: one table row each, with functions that find and read files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron_distill.data.chat.conversations import (
    ConversationSpec,
    RowBlockReader,
    line_blocks,
    table_blocks,
)
from megatron_distill.data.text.documents import (
    ReadFile,
    RowFilter,
    jsonl_reader,
    read_lines,
    read_whole,
    table_reader,
)
from megatron_distill.data.text.files import expand_paths, expand_saved, stdlib_files
from megatron_distill.errors import DataError

__all__ = ["FORMATS", "Format", "SourceSpec", "source_files"]


@dataclass(frozen=True)
class SourceSpec:
    """One source of documents and its share of the samples."""

    format: str  # one of FORMATS
    paths: tuple[str, ...] = ()  # files and globs; prefixes for megatron; empty for python_stdlib
    weight: float = 1.0
    text_key: str = "text"  # jsonl, parquet, arrow
    documents: str = "file"  # text: "file" or "line"
    conversation: ConversationSpec | None = None  # jsonl, parquet, arrow: rows of instruction data
    teacher: str | None = None  # of all its samples, where there are several teachers
    teacher_field: str | None = None  # jsonl, parquet, arrow: field with the teacher of a row
    rows: RowFilter | None = None  # the rows that are read; None: all
    given_name: str | None = None  # `name` in data.sources, for messages

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise DataError(
                f"data.sources: format {self.format!r} is not one of {', '.join(FORMATS)}"
            )
        if self.documents not in ("file", "line"):
            raise DataError(f"data.sources: documents {self.documents!r} is not 'file' or 'line'")
        if not 0.0 < self.weight < float("inf"):
            raise DataError(f"data.sources: weight {self.weight} must be a positive number")

    @property
    def name(self) -> str:
        """The name of this source in messages: the one given, with its format and paths."""
        files = f"{self.format} {' '.join(self.paths)}".strip()
        named = files if self.given_name is None else f"{self.given_name} ({files})"
        rows = "" if self.rows is None else f" ({self.rows.field} = {self.rows.value})"
        return named + rows

    @property
    def kind(self) -> Format:
        """The row of this source's format."""
        return FORMATS[self.format]


@dataclass(frozen=True)
class Format:
    """Functions that find and read the files of a format.

    Attributes:
        find: the files of a source's paths; raises DataError if one is missing.
        reader: returns the function that reads the documents of a file; None: files hold tokens.
        rows: reads blocks of rows that are conversations; None: the format has no conversations.
        identity: the fields of a source that determine its documents, besides its files.
        has_paths: whether a source gives paths.
    """

    find: Callable[[Sequence[str]], list[Path]]
    reader: Callable[[SourceSpec], ReadFile] | None
    rows: RowBlockReader | None = None
    identity: tuple[str, ...] = ()
    has_paths: bool = True

    @property
    def is_text(self) -> bool:
        """Whether its documents are text instead of token ids."""
        return self.reader is not None


def source_files(spec: SourceSpec) -> list[Path]:
    """The files of a source, sorted. Raises DataError, see `expand_paths`."""
    return spec.kind.find(spec.paths)


def _saved(paths: Sequence[str]) -> list[Path]:
    return expand_paths(expand_saved(paths))


def _pairs(prefixes: Sequence[str]) -> list[Path]:
    paths = []
    for prefix in prefixes:
        for end in (".bin", ".idx"):
            path = Path(f"{prefix}{end}")
            if not path.is_file():
                shared = prefix.removesuffix(".bin").removesuffix(".idx")
                remedy = f"name the pair {shared}, without its ending, in"
                remedy = "correct" if shared == prefix else remedy
                raise DataError(f"{path}: no such file; {remedy} data.sources.paths")
            paths.append(path)
    return paths


def _stdlib(paths: Sequence[str]) -> list[Path]:  # noqa: ARG001
    return stdlib_files()


def _text(spec: SourceSpec) -> ReadFile:
    return read_lines if spec.documents == "line" else read_whole


def _jsonl(spec: SourceSpec) -> ReadFile:
    return jsonl_reader(spec.text_key, spec.rows)


def _table(spec: SourceSpec) -> ReadFile:
    return table_reader(spec.text_key, spec.rows)


def _whole(spec: SourceSpec) -> ReadFile:  # noqa: ARG001
    return read_whole


FORMATS: Final[Mapping[str, Format]] = {
    "text": Format(expand_paths, _text, identity=("documents",)),
    "jsonl": Format(expand_paths, _jsonl, line_blocks, identity=("text_key",)),
    "parquet": Format(expand_paths, _table, table_blocks, identity=("text_key",)),
    "arrow": Format(_saved, _table, table_blocks, identity=("text_key",)),
    "megatron": Format(_pairs, None),
    "python_stdlib": Format(_stdlib, _whole, has_paths=False),
}
