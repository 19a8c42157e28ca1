"""The format of docs/extending/adding_a_data_format.md: documents, resuming in a file, errors."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_distill.data.formats import FORMATS, SourceSpec, source_files
from megatron_distill.data.text.documents import Cursor, Document, DocumentReader
from megatron_distill.errors import DataError
from tests.guards.source_tree import ROOT

PAGE = ROOT / "docs" / "extending" / "adding_a_data_format.md"
# The first is longer than a block of the reader.
PAGES = ["a" * (3 << 19), "zweite Seite: ä\n", "", "last"]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The format, added as the page shows."""
    names: dict[str, Any] = {}
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    exec(compile(block, str(PAGE), "exec"), names)
    monkeypatch.setitem(FORMATS, "pages", names["PAGES"])  # type: ignore[arg-type]


def reader_of(folder: Path, *, skip_bad: bool = False) -> DocumentReader:
    spec = SourceSpec("pages", paths=(f"{folder}/*",))
    return DocumentReader(source_files(spec), read=spec.kind.reader(spec), skip_bad=skip_bad)


def documents(reader: DocumentReader, start: Cursor) -> list[Document]:
    return list(reader.documents(range(len(reader.files)), start))


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("end", ["", "\f"])
def test_it_goes_on_after_every_document(tmp_path: Path, end: str) -> None:
    text = ("\f".join(PAGES) + end).encode()
    (tmp_path / "a.pages").write_bytes(text)
    (tmp_path / "b.pages.gz").write_bytes(gzip.compress(text))
    reader = reader_of(tmp_path)
    found = documents(reader, Cursor())
    assert [one.text for one in found] == [page for page in PAGES if page] * 2
    for number, one in enumerate(found, start=1):
        assert documents(reader, one.after) == found[number:]


@pytest.mark.usefixtures("pages")
def test_a_page_that_is_not_text_is_named_or_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.pages").write_bytes(b"one\f\xfftwo\fthree")
    with pytest.raises(DataError, match=r"a\.pages: byte 4: not UTF-8"):
        documents(reader_of(tmp_path), Cursor())
    reader = reader_of(tmp_path, skip_bad=True)
    assert [one.text for one in documents(reader, Cursor())] == ["one", "three"]
    assert reader.skipped == 1
