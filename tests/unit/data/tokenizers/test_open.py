"""Tokenizers: training is deterministic, folders round-trip, every wrong folder is named."""

import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_distill.align import token_spans
from megatron_distill.data.chat.template import encode_rendered
from megatron_distill.data.tokenizers.open import (
    HuggingFaceTokenizer,
    Tokenizer,
    end_ids,
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


@pytest.mark.parametrize("has_settings", [True, False])
@pytest.mark.parametrize("kind", ["qwen2", "gemma"])
def test_the_file_decides_beside_a_config_whose_class_splits_otherwise(
    kind: str,
    has_settings: bool,
    trained: Tokenizer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained.save(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind}))
    if not has_settings:
        (tmp_path / "model" / "tokenizer_config.json").unlink()
    with caplog.at_level(logging.WARNING, logger="megatron_distill"):
        opened = load_tokenizer(tmp_path / "model")
    text = "def f():\n\n\n    return 1\n\n\nclass A:\n\tx = 12345\n"
    (ids,), (wanted,) = opened.encode_batch([text]), trained.encode_batch([text])
    assert ids.tolist() == wanted.tolist()
    assert opened.identity == trained.identity
    assert token_spans(opened, ids, text)[-1].tolist() == [len(text) - 1, len(text)]
    is_other_class = kind == "qwen2" or not has_settings
    warning = f"{tmp_path / 'model'}: the class {kind.capitalize()}Tokenizer of transformers splits"
    assert (warning in caplog.text) == is_other_class


def test_a_class_with_the_rules_of_the_file_gives_no_warning(
    trained: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import Qwen2Tokenizer

    model = json.loads(trained.hugging_face.backend_tokenizer.to_str())["model"]  # type: ignore[attr-defined]
    of_class = Qwen2Tokenizer(
        vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]]
    )
    of_class.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "tokenizer.json").read_text())
    written["pre_tokenizer"]["pretokenizers"][1]["trim_offsets"] = False  # as the published files
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with caplog.at_level(logging.WARNING, logger="megatron_distill"):
        opened = load_tokenizer(tmp_path)
    assert not caplog.records
    ids = opened.encode_batch(["a\n\n\n b"])[0].tolist()
    assert ids == of_class("a\n\n\n b", add_special_tokens=False)["input_ids"]


def test_truncation_and_padding_of_a_file_s_last_use_change_no_text(
    trained: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "tuned"
    trained.save(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        **{"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    }
    content["padding"] = {
        **{"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"},
    }
    path.write_text(json.dumps(content))
    found, texts = load_tokenizer(folder), ["a", "def longer than three tokens"]
    assert found.identity == trained.identity
    expected = [ids_n.tolist() for ids_n in trained.encode_batch(texts)]
    assert len(expected[1]) > 3
    assert [ids_n.tolist() for ids_n in found.encode_batch(texts)] == expected
    assert [one.ids_n.tolist() for one in found.encode_with_offsets(texts)] == expected


def test_special_tokens_that_a_text_may_not_spell_are_found_in_rendered_conversations_alone(
    trained: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "safe"
    trained.save(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "split_special_tokens": True}))
    found, text = load_tokenizer(folder), "a<|endoftext|>b"
    for one in (found, pickle.loads(pickle.dumps(found))):  # as in worker processes
        (ids_n,), (encoding,) = one.encode_batch([text]), one.encode_with_offsets([text])
        assert one.eos_id not in ids_n
        assert encoding.ids_n.tolist() == ids_n.tolist()
        (rendered,) = encode_rendered(one, [text])
        assert rendered.ids_n.tolist() == trained.encode_batch([text])[0].tolist()
        assert rendered.ids_n.tolist().count(one.eos_id) == 1


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


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, ()),
        ("{}", ()),
        ('{"eos_token_id": null}', ()),
        ('{"eos_token_id": 2}', (2,)),
        ('{"eos_token_id": [17, 9]}', (17, 9)),
        ('{"eos_token_id": [true, "a", null]}', ()),
    ],
)
def test_the_tokens_that_end_a_text_are_those_of_the_generation_settings(
    trained: Tokenizer, tmp_path: Path, content: str | None, found: tuple[int, ...]
) -> None:
    trained.save(tmp_path / "model")
    if content is not None:
        (tmp_path / "model" / "generation_config.json").write_text(content)
    assert end_ids(tmp_path / "model") == found
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer.end_ids == (trained.eos_id, *sorted({*found} - {trained.eos_id}))
    assert pickle.loads(pickle.dumps(tokenizer)).end_ids == tokenizer.end_ids
    assert tokenizer.identity == trained.identity


def test_ids_outside_the_vocabulary_end_no_text(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [-1, 7, 400]}')
    assert load_tokenizer(tmp_path / "model").end_ids == (trained.eos_id, 7)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_damaged_generation_settings_are_named(
    trained: Tokenizer, tmp_path: Path, content: str
) -> None:
    trained.save(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(content)
    with pytest.raises(DataError, match="generation_config.json: not a JSON .*; replace or remove"):
        load_tokenizer(tmp_path / "model")
