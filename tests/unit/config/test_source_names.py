"""The name of a source in the log: its key `name`, or derived from its first path."""

from pathlib import Path

import pytest

from megatron_distill.config import SourceConfig, StoreSourceConfig
from tests.support.sample_configs import MINIMAL, TAUGHT, complaints, load_tree


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("wiki.jsonl", "wiki"),
        ("data/wiki.en.jsonl.zst", "wiki"),
        ("/corpora/wiki/*.jsonl.gz", "wiki"),
        ("/corpora/wiki/part-??/*.txt", "wiki"),
        ("C:\\corpora\\code\\all.txt", "all"),
        ("/corpora/M\u00fcnchen 2.txt", "M_nchen_2"),
        ("/corpora/.hidden/text_document", "text_document"),
        ("*.txt", "source"),
    ],
)
def test_a_path_without_a_pattern_gives_its_last_name(path: str, name: str) -> None:
    assert SourceConfig(format="text", paths=(path, "other.txt")).log_name == name
    assert StoreSourceConfig(path=path).log_name == name


def test_a_name_that_is_given_and_a_source_without_paths() -> None:
    assert SourceConfig(format="text", paths=("a.txt",), name="b").log_name == "b"
    assert SourceConfig(format="python_stdlib").log_name == "python_stdlib"


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a@b", "-a", "\u00fc"])
def test_a_name_that_would_confuse_the_log_is_refused(tmp_path: Path, name: str) -> None:
    (reported,) = complaints(load_tree, tmp_path, MINIMAL, f"data.sources.0.name='{name}'")
    pattern = r"`^[A-Za-z0-9][A-Za-z0-9_.-]*$`"
    assert reported == f"data.sources.0.name = {name!r}: must be text matching {pattern}, or null"


def test_names_repeat_between_lists_and_not_within_one(tmp_path: Path) -> None:
    same = "[{format: python_stdlib, name: code}, {format: jsonl, paths: wiki.jsonl}]"
    load_tree(tmp_path, TAUGHT, f"data.sources={same}", f"data.validation_sources={same}")
    twice = "teacher={architecture: null, store: [{path: a/stores}, {path: b/stores}]}"
    text = complaints(load_tree, tmp_path, TAUGHT, "data.sources=[]", twice)
    assert any(
        problem.startswith("teacher.store.1.name = 'stores': teacher.store.0 has the same name")
        for problem in text
    )
