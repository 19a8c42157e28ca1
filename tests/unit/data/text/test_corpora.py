"""Corpora: what counts as the standard library, source descriptions, fingerprints."""

import sysconfig
from pathlib import Path

import pytest

from megatron_distill.data.formats import SourceSpec, source_files
from megatron_distill.data.sources import DataOptions, open_training, sample_texts
from megatron_distill.data.text.documents import content_digest, is_held_out
from megatron_distill.data.text.files import fingerprint, stdlib_files
from megatron_distill.errors import DataError
from tests.support.data_fixtures import ByteTokenizer, story, write_files, write_jsonl


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
