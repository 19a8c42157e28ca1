"""Tokenizers: training is deterministic, folders round-trip, every wrong folder is named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_distill.data.tokenizers.open import (
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)
from megatron_distill.errors import DataError

TEXTS = [
    f"def f{i}(x):\n\treturn x ** {i}  # {'power ' * (i % 7)}\r\n\n    \u00e9\u6f22\U0001f600"
    for i in range(300)
]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_bpe(TEXTS, vocab_size=400)


def test_training_twice_and_in_another_process_gives_the_same(
    trained: Tokenizer, tmp_path: Path
) -> None:
    assert trained.vocab_size == 400
    assert train_bpe(iter(TEXTS), vocab_size=400).identity == trained.identity
    assert train_bpe(["other words"] * 99, vocab_size=400).identity != trained.identity
    (tmp_path / "texts.json").write_text(json.dumps(TEXTS))
    program = (
        "import json, sys; from megatron_distill.data.tokenizers.open import train_bpe;"
        "texts = json.load(open(sys.argv[1]));"
        "sys.stdout.write(train_bpe(texts, vocab_size=400).identity)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "texts.json")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == trained.identity


def test_the_vocabulary_is_the_largest_id_s_and_added_tokens_count(trained: Tokenizer) -> None:
    larger = train_bpe(TEXTS, vocab_size=400).hugging_face
    larger.add_special_tokens({"additional_special_tokens": ["<|a|>", "<|b|>"]})
    tokenizer = HuggingFaceTokenizer(larger, name="larger")
    assert tokenizer.vocab_size == 402
    assert tokenizer.identity != trained.identity


def test_a_small_corpus_gives_a_smaller_vocabulary() -> None:
    assert 257 < train_bpe(["aaaa bbbb aaaa bbbb"], vocab_size=5000).vocab_size < 300


@pytest.mark.parametrize("size", [0, 256])
def test_a_vocabulary_below_the_bytes_is_refused(size: int) -> None:
    with pytest.raises(DataError, match=rf"train_vocab_size is {size}: .* at least 257"):
        train_bpe(TEXTS, vocab_size=size)


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_training_without_text_is_refused(texts: list[str]) -> None:
    with pytest.raises(DataError, match="contain no text to train on"):
        train_bpe(texts, vocab_size=300)


def broken_folder(folder: Path, trained: Tokenizer, kind: str) -> Path:
    if kind == "missing":
        return folder / "absent"
    if kind == "file":
        (folder / "file").write_text("x")
        return folder / "file"
    path = folder / "tokenizer"
    if kind == "empty":
        path.mkdir()
        return path
    trained.save(path)
    if kind == "cut off":
        content = (path / "tokenizer.json").read_text()
        (path / "tokenizer.json").write_text(content[: len(content) // 2])
    elif kind == "not a tokenizer":
        (path / "tokenizer.json").write_text("[1, 2]")
    elif kind == "broken settings":
        (path / "tokenizer_config.json").write_text("{")
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "no such folder; set data.tokenizer.path"),
        ("file", "is a file, not a folder"),
        ("empty", "contains none of tokenizer.json"),
        ("cut off", "tokenizer.json: not a JSON file"),
        ("not a tokenizer", "tokenizer.json: not a JSON object"),
        ("broken settings", "tokenizer_config.json: not a JSON file"),
    ],
)
def test_a_wrong_folder_is_named(
    tmp_path: Path, trained: Tokenizer, kind: str, message: str
) -> None:
    folder = broken_folder(tmp_path, trained, kind)
    with pytest.raises(DataError) as caught:
        load_tokenizer(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "no-end")
    with pytest.raises(DataError, match="has no end-of-document token; set eos_token"):
        load_tokenizer(tmp_path / "no-end")
