"""The table of formats: complete, equal to the configuration's, and read by every command."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from megatron_distill.config import SourceConfig
from megatron_distill.config.schema.data import (
    ConversationFormat,
    PathlessFormat,
    SourceFormat,
    TokenizedFormat,
)
from megatron_distill.data.formats import FORMATS, SourceSpec, source_files
from megatron_distill.data.text.documents import Cursor, DocumentReader
from megatron_distill.errors import DataError
from megatron_distill.train.assemble.sources import source_specs


def test_the_configuration_and_the_table_name_the_same_formats() -> None:
    assert get_args(SourceFormat) == tuple(FORMATS)
    for names, holds in (
        (ConversationFormat, lambda row: row.rows is not None),
        (TokenizedFormat, lambda row: not row.is_text),
        (PathlessFormat, lambda row: not row.has_paths),
    ):
        assert get_args(names) == tuple(name for name, row in FORMATS.items() if holds(row))


def test_an_identity_names_fields_of_a_source() -> None:
    known = {field.name for field in fields(SourceSpec)}
    for name, row in FORMATS.items():
        assert set(row.identity) <= known, name
        # A conversation takes the place of a text.
        assert ("text_key" in row.identity) == (row.rows is not None), name


def test_messages_name_a_source_by_its_name_if_it_has_one() -> None:
    source = SourceConfig(format="jsonl", paths=("a.jsonl", "b.jsonl"), name="wiki")
    (spec,) = source_specs([source])
    assert spec.name == "wiki (jsonl a.jsonl b.jsonl)"
    (spec,) = source_specs([source.model_copy(update={"name": None})])
    assert spec.name == "jsonl a.jsonl b.jsonl"


@pytest.mark.parametrize(("documents", "count"), [("file", 1), ("line", 2)])
def test_a_text_source_is_read_by_files_or_by_lines(
    documents: str, count: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    spec = SourceSpec("text", (str(path),), documents=documents)
    reader = DocumentReader(source_files(spec), read=spec.kind.reader(spec), skip_bad=False)
    assert len(list(reader.documents([0], Cursor()))) == count


def test_a_pair_is_found_whole_or_not_at_all(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    (tmp_path / "corpus.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"corpus\.idx: no such file"):
        source_files(SourceSpec("megatron", (str(prefix),)))
    (tmp_path / "corpus.idx").write_bytes(b"")
    for end in (".bin", ".idx"):
        with pytest.raises(DataError, match=rf"name the pair {prefix}, without its ending, in da"):
            source_files(SourceSpec("megatron", (f"{prefix}{end}",)))
    assert [path.suffix for path in source_files(SourceSpec("megatron", (str(prefix),)))] == [
        ".bin",
        ".idx",
    ]
