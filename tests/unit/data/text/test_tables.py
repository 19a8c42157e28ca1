"""Corpora: tables, the standard library, descriptions and fingerprints."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_distill.data.chat.conversations import (
    ConversationSpec,
    conversation_of,
    read_blocks,
    rows_of,
)
from megatron_distill.data.formats import FORMATS, SourceSpec, source_files
from megatron_distill.data.sources import DataOptions, open_training, sample_texts
from megatron_distill.data.text.documents import Cursor, DocumentReader, content_digest, is_held_out
from megatron_distill.data.text.files import (
    DamagedFileError,
    fingerprint,
    record_batches,
    stdlib_files,
)
from megatron_distill.errors import DataError
from tests.support.chat_fixtures import tool_dialogue, turns, write_rows
from tests.support.data_fixtures import ByteTokenizer, story, write_files, write_jsonl

TEXTS = [f"text {index}" for index in range(700)]


def written(folder: Path, kind: str, table: dict[str, list[Any]]) -> tuple[str, str]:
    """Write a table in some way; returns the source's format and path."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        pq.write_table(pa.table(table), folder / "a.parquet", row_group_size=300)
        return "parquet", str(folder / "a.parquet")
    if kind == "arrow file":
        data = pa.table(table)
        with pa.ipc.new_file(folder / "a.arrow", data.schema) as writer:
            writer.write_table(data, max_chunksize=400)
        return "arrow", str(folder / "a.arrow")
    datasets.Dataset.from_dict(table).save_to_disk(folder / "saved", num_shards=2)
    return "arrow", str(folder / "saved")


KINDS = ("parquet", "arrow file", "saved dataset")


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_is_read_as_documents_from_any_place_on(tmp_path: Path, kind: str) -> None:
    format, path = written(tmp_path, kind, {"body": TEXTS, "number": list(range(700))})
    spec = SourceSpec(format, (path,), text_key="body")
    files = source_files(spec)
    reader = DocumentReader(files, read=spec.kind.reader(spec), skip_bad=False)
    documents = list(reader.documents(range(len(files)), Cursor()))
    assert [document.text for document in documents] == TEXTS
    for number in (0, 255, 256, 299, 300, 511, 699):
        rest = reader.documents(range(len(files)), documents[number].after)
        assert [document.text for document in rest] == TEXTS[number + 1 :]


@pytest.mark.parametrize("kind", [*KINDS, "jsonl"])
def test_rows_are_conversations_with_their_numbers(tmp_path: Path, kind: str) -> None:
    table = {"messages": [turns("a", "b"), tool_dialogue(), turns("c", "d")], "other": [1, 2, 3]}
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    if kind == "jsonl":
        format, path = "jsonl", str(write_rows(tmp_path / "a.jsonl", rows))
    else:
        format, path = written(tmp_path, kind, table)
    spec = ConversationSpec()
    required, optional = spec.columns
    files = source_files(SourceSpec(format, (path,)))
    blocks = list(
        read_blocks(files, read=FORMATS[format].rows, required=required, optional=optional)
    )
    found = [(block.file, row, one) for block in blocks for row, one in rows_of(block)]
    conversations = [conversation_of(one, spec).messages for _, _, one in found]
    assert conversations == [conversation_of(row, spec).messages for row in rows]
    numbers = [(file, row) for file, row, _ in found]
    # Two shards of a saved dataset hold two rows and one.
    assert numbers == ([(0, 1), (0, 2), (1, 1)] if "saved" in kind else [(0, 1), (0, 2), (0, 3)])


def test_lines_in_blocks_keep_their_numbers_over_empty_and_long_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    long = '{"a": "' + "x" * (3 << 20) + '"}'
    path.write_text('{"a": 1}\n\n' + long + '\n{"a": 2}\nnot json\n[1]\n{"a": 3}')
    blocks = read_blocks([path], read=FORMATS["jsonl"].rows, required=(), optional=())
    found = [(row, one) for block in blocks for row, one in rows_of(block)]
    assert [row for row, _ in found] == [1, 3, 4, 5, 6, 7]
    assert [one["a"] for _, one in found if isinstance(one, dict) and one["a"] in (1, 2, 3)] == [
        1,
        2,
        3,
    ]
    assert found[3][1].startswith("not a JSON object (")
    assert found[4][1] == "not a JSON object but a list"


def test_saved_datasets_are_found_by_their_folders(tmp_path: Path) -> None:
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})})
    splits.save_to_disk(tmp_path / "d")
    assert len(source_files(SourceSpec("arrow", (str(tmp_path / "d" / "train"),)))) == 1
    with pytest.raises(DataError, match="contains the splits of a dataset; name one of .*d/train"):
        source_files(SourceSpec("arrow", (str(tmp_path / "d"),)))
    with pytest.raises(DataError, match=r"not a saved dataset \(no state.json\)"):
        source_files(SourceSpec("arrow", (str(tmp_path),)))
    glob = str(tmp_path / "d" / "*" / "*.arrow")
    assert source_files(SourceSpec("arrow", (glob,))) == source_files(
        SourceSpec("arrow", (str(tmp_path / "d" / "train"),))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_damage_and_missing_columns_name_the_file(tmp_path: Path, kind: str) -> None:
    format, path = written(tmp_path, kind, {"body": TEXTS})
    (file, *_) = source_files(SourceSpec(format, (path,)))
    with pytest.raises(DataError, match=f"{file}: has no column 'text' .its columns: body"):
        list(record_batches(file, required=("text",)))
    cut = tmp_path / "cut"
    shutil.copy(file, cut)
    with cut.open("r+b") as stream:
        stream.truncate(cut.stat().st_size * 2 // 3)
    with pytest.raises(DamagedFileError, match=f"{cut}: damaged or cut off"):
        list(record_batches(cut, required=("body",)))


def test_the_standard_library_is_a_corpus_of_modules_without_tests_and_packages() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    files = stdlib_files()
    names = {path.relative_to(root).as_posix() for path in files}
    assert {"argparse.py", "json/decoder.py", "email/message.py"} <= names
    assert not [n for n in names if n.startswith(("test/", "site-packages/", "idlelib/idle_test/"))]
    assert files == source_files(SourceSpec("python_stdlib"))
    assert sum(path.stat().st_size for path in files) > 5_000_000
    for path in files:
        path.read_bytes().decode("utf-8")


def test_files_that_the_standard_library_corpus_leaves_out(tmp_path: Path) -> None:
    kept = ["a.py", "pkg/__init__.py", "pkg/testing.py"]
    dropped = ["test/a.py", "pkg/tests/b.py", "site-packages/c.py", "pkg/__pycache__/d.py", "e.txt"]
    for name in [*kept, *dropped]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    found = [path.relative_to(tmp_path).as_posix() for path in stdlib_files(tmp_path)]
    assert found == kept
    with pytest.raises(DataError, match="contains no Python source"):
        stdlib_files(tmp_path / "absent")


def test_the_stream_reads_the_standard_library() -> None:
    options = DataOptions(sequence_length=64, validation_fraction=0.1, shuffle_samples=1)
    source = open_training(
        [SourceSpec("python_stdlib")], tokenizer=ByteTokenizer(), options=options, seed=3
    )
    text = "".join(
        ByteTokenizer().decode(token for token in source.next_sample().tokens_S1[1:] if token)
        for _ in range(40)
    )
    corpus = "".join(path.read_text("utf-8") for path in stdlib_files())
    assert text[: text.index("\n", 1000)] in corpus


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "csv"}, "format 'csv' is not one of text, jsonl, parquet, arrow, megatron"),
        ({"documents": "page"}, "documents 'page' is not 'file' or 'line'"),
        ({"weight": 0.0}, "weight 0.0 must be a positive number"),
        ({"weight": float("nan")}, "weight nan must be a positive number"),
    ],
)
def test_a_wrong_description_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError) as caught:
        SourceSpec(**{"format": "text", **changes})  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_the_fingerprint_sees_names_and_sizes_but_not_the_folder(tmp_path: Path) -> None:
    prints = []
    for folder, texts in (("a", ["x", "yy"]), ("b", ["z", "ww"]), ("c", ["x", "yyy"])):
        write_files(tmp_path / folder, texts)
        prints.append(fingerprint(sorted((tmp_path / folder).iterdir())))
    assert prints[0] == prints[1] != prints[2]
    assert prints[0] != fingerprint(sorted((tmp_path / "a").iterdir())[:1])


def test_texts_for_a_tokenizer_are_shared_by_weight_and_never_held_out(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "first.jsonl", ["A" + story(index) for index in range(900)])
    second = write_jsonl(tmp_path / "second.jsonl", ["B" + story(index) for index in range(900)])
    specs = [
        SourceSpec("jsonl", (str(first),), weight=3.0),
        SourceSpec("jsonl", (str(second),), weight=1.0),
        SourceSpec("megatron", ("elsewhere",), weight=5.0),
    ]
    options = DataOptions(sequence_length=8, validation_fraction=0.3)
    texts = list(sample_texts(specs, options=options, characters=4000))
    sizes = {name: sum(len(t) for t in texts if t.startswith(name)) for name in "AB"}
    assert abs(sizes["A"] - 3000) <= 3
    assert abs(sizes["B"] - 1000) <= 3
    allowed = {
        name + story(index)
        for name in "AB"
        for index in range(900)
        if not is_held_out(content_digest((name + story(index)).encode()), 0.3)
    }
    cut_short = set(texts) - allowed
    assert len(cut_short) <= 2
    assert all(any(text.startswith(part) for text in allowed) for part in cut_short)
    with pytest.raises(DataError, match="train_vocab_size needs a source of text"):
        list(sample_texts(specs[2:], options=options, characters=10))


def test_no_source_at_all_is_an_error() -> None:
    with pytest.raises(DataError, match=r"data\.sources is empty"):
        open_training([], tokenizer=ByteTokenizer(), options=DataOptions(sequence_length=8), seed=0)
