"""Documents of files: reading from any place, encodings, damage."""

import gzip
import json
import logging
from pathlib import Path

import pytest
import zstandard

from megatron_distill.data.text import documents
from megatron_distill.data.text.documents import (
    Cursor,
    Document,
    DocumentReader,
    ReadFile,
    jsonl_reader,
    read_lines,
    read_whole,
)
from megatron_distill.data.text.files import DamagedFileError, InputFile, expand_paths
from megatron_distill.errors import DataError
from tests.support.data_fixtures import story, write_jsonl


def reader_of(*files: Path, read: ReadFile, skip_bad: bool = False) -> DocumentReader:
    return DocumentReader(files, read=read, skip_bad=skip_bad)


def read_all(reader: DocumentReader, start: Cursor | None = None) -> list[Document]:
    return list(reader.documents(range(len(reader.files)), start or Cursor()))


def texts_of(*files: Path, read: ReadFile) -> list[str]:
    return [document.text for document in read_all(reader_of(*files, read=read))]


def test_lines_lose_their_ends_and_empty_ones_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("one\r\n\n  two\nthrée".encode())
    assert texts_of(path, read=read_lines) == ["one", "  two", "thrée"]


def test_a_file_is_one_document_with_its_content_untouched(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b" x\r\n\ty\n")
    assert texts_of(path, read=read_whole) == [" x\r\n\ty\n"]


def test_empty_files_and_records_are_not_documents(tmp_path: Path) -> None:
    empty, blank = tmp_path / "empty", tmp_path / "blank"
    empty.write_bytes(b"")
    blank.write_bytes(b'\n \n{"text": ""}\n')
    assert texts_of(empty, read=read_whole) == []
    assert texts_of(empty, read=read_lines) == []
    assert texts_of(empty, blank, read=jsonl_reader("text")) == []


@pytest.mark.parametrize(
    ("line", "piece"),
    [
        ("abc\n", 16), ("a-long-line-without-an-end", 16), ("a-long-line-without-an-end", 64),
        ("é", 16), ("é", 17), ("ab漢字\n", 17), ("ab漢字\n", 64),
    ],
)  # fmt: skip
def test_pieces_of_a_long_file_join_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, piece: int
) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", piece)
    path = tmp_path / "long.txt"
    for repeats in range(1, 40):
        content = line * repeats
        path.write_text(content)
        pieces = read_all(reader_of(path, read=read_whole))
        assert "".join(part.text for part in pieces) == content
        assert [part.is_end for part in pieces] == [False] * (len(pieces) - 1) + [True]
        assert len({part.digest for part in pieces}) == 1
        assert all(len(part.text.encode()) <= piece for part in pieces)


@pytest.mark.parametrize(
    ("kind", "suffix"), [("whole", ""), ("lines", ""), ("jsonl", ""), ("jsonl", ".gz")]
)
def test_reading_restarts_at_every_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, suffix: str
) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)
    read = {"whole": read_whole, "lines": read_lines, "jsonl": jsonl_reader("text")}[kind]
    files = []
    for index in range(3):
        path = write_jsonl(
            tmp_path / f"{index}.jsonl", map(story, range(20 * index, 20 * index + 9))
        )
        if suffix:
            path = path.rename(f"{path}{suffix}")
            path.write_bytes(gzip.compress(path.read_bytes()))
        files.append(path)
    reader = reader_of(*files, read=read)
    found = read_all(reader)
    assert len(found) > 15
    for index, document in enumerate(found):
        assert read_all(reader, document.after) == found[index + 1 :]


def test_the_order_of_the_files_is_the_callers(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b", "c")]
    for path in files:
        path.write_text(path.name)
    reader = reader_of(*files, read=read_whole)
    assert [document.text for document in reader.documents([2, 0, 1], Cursor())] == ["c", "a", "b"]


BAD_JSON = [
    (b'{"text": "cut off', "bad.jsonl:2: not a JSON object"),
    (b'["text"]', "bad.jsonl:2: not a JSON object but a list; write one object on each line"),
    (b'{"body": "x", "id": 1}', "bad.jsonl:2: the object has no key 'text' (its keys: body, id)"),
    (
        b'{"text": 7}',
        "bad.jsonl:2: the value of 'text' is not text but a number; correct it, or set text_key",
    ),
    (b'{"text": null}', "bad.jsonl:2: the value of 'text' is not text but null"),
    (b'{"text": "\xff"}', "bad.jsonl: not valid UTF-8 at line 2"),
    (b'{"text": "\\ud800"}', "bad.jsonl:2: 'text' contains an unpaired surrogate"),
    (b"[" * 200_000, "bad.jsonl:2: not a JSON object"),
]


@pytest.mark.parametrize(("line", "message"), BAD_JSON)
def test_a_bad_json_line_is_named_or_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: bytes, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "first"}\n' + line + b'\n{"text": "third"}\n')
    read = jsonl_reader("text")
    with pytest.raises(DataError) as caught:
        read_all(reader_of(path, read=read))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    lenient = reader_of(path, read=read, skip_bad=True)
    with caplog.at_level(logging.WARNING, logger="megatron_distill"):
        assert [document.text for document in read_all(lenient)] == ["first", "third"]
    assert lenient.skipped == 1
    assert message in caplog.text


@pytest.mark.parametrize("before", [0, 3, 100])
def test_bytes_that_are_not_utf8_are_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 32)
    path, good = tmp_path / "bad.txt", tmp_path / "good.txt"
    path.write_bytes(b"x" * before + b"\xe9t\xe9")
    good.write_text("fine")
    with pytest.raises(DataError, match=rf"bad\.txt: not valid UTF-8 at byte {before} "):
        read_all(reader_of(path, good, read=read_whole))
    lenient = reader_of(path, good, read=read_whole, skip_bad=True)
    assert read_all(lenient)[-1].text == "fine"
    assert lenient.skipped == 1


def test_a_line_that_is_not_utf8_is_located(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"good\n\xff\xfe\nalso good\n")
    with pytest.raises(DataError, match=r"bad\.txt: not valid UTF-8 at line 2 "):
        read_all(reader_of(path, read=read_lines))
    lenient = reader_of(path, read=read_lines, skip_bad=True)
    assert [document.text for document in read_all(lenient)] == ["good", "also good"]


def test_a_cut_off_archive_is_named_or_its_rest_skipped(tmp_path: Path) -> None:
    path, good = tmp_path / "cut.jsonl.gz", write_jsonl(tmp_path / "good.jsonl", ["fine"])
    lines = "".join(json.dumps({"text": f"{i * 7919}"}) + "\n" for i in range(9000))
    path.write_bytes(gzip.compress(lines.encode())[:-30])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz: damaged or cut off after \d+ bytes"):
        read_all(reader_of(path, good, read=jsonl_reader("text")))
    lenient = reader_of(path, good, read=jsonl_reader("text"), skip_bad=True)
    found = read_all(lenient)
    assert found[0].text == "0"
    assert found[-1].text == "fine"
    assert lenient.skipped == 1


def test_a_line_without_end_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "LINE_BYTES", 32)
    path = tmp_path / "long.txt"
    path.write_bytes(b"short\n" + b"x" * 200 + b"\n" + b"y" * 31 + b"\nlast")
    with pytest.raises(DataError, match=r"long\.txt:2: the line is longer than 32 bytes"):
        read_all(reader_of(path, read=read_lines))
    lenient = reader_of(path, read=read_lines, skip_bad=True)
    assert [document.text for document in read_all(lenient)] == ["short", "y" * 31, "last"]


def test_log_lines_of_skipped_records_are_few(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("no\n" * 1000)
    reader = reader_of(path, read=jsonl_reader("text"), skip_bad=True)
    with caplog.at_level(logging.WARNING, logger="megatron_distill"):
        assert read_all(reader) == []
    assert reader.skipped == 1000
    assert len(caplog.records) < 20
    assert "skipped 512 records so far" in caplog.text


CONTENT = b"".join(b"line %d of the corpus\n" % index for index in range(4000))


def write_as(folder: Path, suffix: str, content: bytes = CONTENT) -> Path:
    path = folder / f"corpus.txt{suffix}"
    if suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif suffix == ".zst":
        half = len(content) // 2
        frames = [zstandard.compress(part) for part in (content[:half], content[half:])]
        path.write_bytes(b"".join(frames))
    else:
        path.write_bytes(content)
    return path


def test_globs_and_names_are_merged_sorted_and_listed_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt", "d.md"):
        (tmp_path / name).write_text("x")
    patterns = [f"{tmp_path}/**/*.txt", f"{tmp_path}/d.md", f"{tmp_path}/a.txt"]
    names = [str(path.relative_to(tmp_path)) for path in expand_paths(patterns)]
    assert names == ["a.txt", "b.txt", "d.md", "deep/c.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_found(tmp_path: Path) -> None:
    path = tmp_path / "part[1].txt"
    path.write_text("x")
    assert expand_paths([str(path)]) == [path]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("absent.txt", "absent.txt: no such file"),
        ("*.parquet", "the glob matches no file"),
        ("folder", "folder: is a folder; give its files as a glob"),
        ("fold*", "the glob matches no file"),
        ("folder/inner.txt/x.txt", "no such file"),
    ],
)
def test_wrong_paths_are_named(tmp_path: Path, pattern: str, expected: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inner.txt").write_text("x")
    with pytest.raises(DataError, match="data|glob") as caught:
        expand_paths([str(tmp_path / pattern)])
    assert expected in str(caught.value)
    assert str(tmp_path / pattern) in str(caught.value)


@pytest.mark.parametrize("patterns", [[], [""], ["  "]])
def test_an_empty_path_is_an_error(patterns: list[str]) -> None:
    with pytest.raises(DataError, match=r"data\.sources\.paths"):
        expand_paths(patterns)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    # Not by permissions, which do not bind root: a link that leads back to itself.
    link = tmp_path / "loop.txt"
    link.symlink_to(link)
    with pytest.raises(DataError, match=r"loop\.txt"):
        expand_paths([str(link)])
    unreadable = Path("/proc/self/mem")  # exists and opens; reading its first page fails
    if unreadable.exists():
        with pytest.raises(DataError, match=r"/proc/self/mem: cannot be read"):
            expand_paths([str(unreadable)])


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_reading_from_any_offset_equals_the_slice(tmp_path: Path, suffix: str) -> None:
    path = write_as(tmp_path, suffix)
    for offset in (0, 1, 41_000, len(CONTENT) // 2, len(CONTENT) - 1, len(CONTENT)):
        file = InputFile(path, offset=offset)
        line = file.read_line(1 << 20)
        rest = file.read(1 << 20)
        assert line + rest == CONTENT[offset:]
        assert file.offset == len(CONTENT)
        file.close()


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_byte_order_mark_is_passed_over_and_counted(tmp_path: Path, suffix: str) -> None:
    path = write_as(tmp_path, suffix, b"\xef\xbb\xbfone\ntwo\n")
    file = InputFile(path)
    assert file.read_line(100) == b"one\n"
    resumed = InputFile(path, offset=file.offset)
    assert resumed.read_line(100) == b"two\n"


def read_to_the_end(path: Path) -> None:
    file = InputFile(path)
    while file.read(1 << 16):
        pass


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "cut in header", "flipped", "not compressed at all"])
def test_damaged_compression_is_an_error(tmp_path: Path, suffix: str, damage: str) -> None:
    path = write_as(tmp_path, suffix)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-20:]
    elif damage == "cut in header":
        del data[3:]
    elif damage == "flipped":
        for index in range(len(data) // 2, len(data) // 2 + 40):
            data[index] ^= 0xFF
    else:
        data = bytearray(CONTENT)
    path.write_bytes(data)
    with pytest.raises(DamagedFileError, match=rf"corpus\.txt\{suffix}: damaged or cut off after"):
        read_to_the_end(path)


def test_a_file_that_is_removed_while_reading_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: cannot be read at byte 0"):
        InputFile(tmp_path / "gone.txt")
