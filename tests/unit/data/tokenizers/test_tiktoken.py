"""Tokenizers of tiktoken's ranks and of SentencePiece's models."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import tiktoken
import tiktoken_ext.openai_public

from megatron_distill.config.schema.data import EncodingName
from megatron_distill.data.tokenizers import tiktoken_encodings
from megatron_distill.data.tokenizers.open import (
    END_OF_TEXT,
    HuggingFaceTokenizer,
    holds_tokenizer,
    load_tokenizer,
)
from megatron_distill.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from megatron_distill.data.tokenizers.tiktoken_bpe import TiktokenTokenizer, open_named_encoding
from megatron_distill.data.tokenizers.tiktoken_encodings import (
    NAMED_ENCODINGS,
    NamedEncoding,
    byte_characters,
    written_ranks,
)
from megatron_distill.errors import DataError
from tests.support.tokenizer_kinds import (
    HARD_TEXTS,
    byte_level,
    ranks_of,
    sentencepiece_model,
    small_rules,
    tokenizer_of,
    train_sentencepiece,
    write_tiktoken,
)

RULES: dict[str, Any] = {"pattern": "gpt2", "special_tokens": {END_OF_TEXT: 500, "<|x|>": 501}}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def small_ranks() -> dict[bytes, int]:
    return ranks_of(byte_level())


def test_ranks_of_a_byte_level_bpe_give_its_tokens() -> None:
    # The same merges and GPT-2's pattern in both; its special token comes first there.
    expected = byte_level().encode_batch(HARD_TEXTS)
    for text, ours, other in zip(
        HARD_TEXTS, tokenizer_of("tiktoken").encode_batch(HARD_TEXTS), expected, strict=True
    ):
        assert ours.tolist() == [number - 1 for number in other.tolist()], text


def test_special_tokens_in_a_text_are_those_tokens() -> None:
    tokenizer = tokenizer_of("tiktoken")
    text = f"one{END_OF_TEXT}two<|pad|>"
    (found,) = tokenizer.encode_with_offsets([text])
    assert [number for number in found.ids_n.tolist() if number >= 500] == [500, 510]
    place = found.ids_n.tolist().index(500)
    assert (found.starts_n[place], found.stops_n[place]) == (3, 3 + len(END_OF_TEXT))
    assert tokenizer.decode(found.ids_n.tolist()) == text
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (511, 500, 510)
    assert tokenizer.bos_id is None
    # No token has this id.
    assert tokenizer.decode([505]) == "\ufffd"


@pytest.mark.parametrize("name", ["gpt2", "cl100k_base", "o200k_base"])
def test_white_space_longer_than_the_stack_of_a_pattern_is_encoded(name: str) -> None:
    rules = replace(small_rules(), pattern=NAMED_ENCODINGS[name].pattern)
    tokenizer = TiktokenTokenizer(small_ranks(), rules, name=name)
    text = "a" + " " * 1_500_000 + "b" + "\t" * 10
    with pytest.raises(ValueError, match="[Mm]ax stack size"):
        tokenizer._encoding.encode(text)
    (found,) = tokenizer.encode_with_offsets([text])
    assert tokenizer.decode(found.ids_n.tolist()) == text
    assert (found.stops_n[:-1] == found.starts_n[1:]).all()
    assert found.stops_n[-1] == len(text)


def test_a_changed_rank_pattern_or_special_token_is_another_tokenizer() -> None:
    ranks, rules = small_ranks(), small_rules()
    last, before = sorted(ranks, key=ranks.__getitem__)[-2:]
    swapped = ranks | {last: ranks[before], before: ranks[last]}
    fewer = {token: rank for token, rank in ranks.items() if token != last}
    variants = [
        (ranks, rules),
        (swapped, rules),
        (fewer, rules),
        (ranks, replace(rules, pattern=NAMED_ENCODINGS["cl100k_base"].pattern)),
        (ranks, replace(rules, special_tokens={END_OF_TEXT: 501, "<|pad|>": 510})),
        (ranks, replace(rules, special_tokens={END_OF_TEXT: 500, "<|gap|>": 510}, pad=None)),
        (ranks, replace(rules, eos="<|pad|>")),
    ]
    found = {TiktokenTokenizer(*variant, name="x").identity for variant in variants}
    assert len(found) == len(variants)
    backwards = dict(reversed(ranks.items()))
    assert TiktokenTokenizer(backwards, rules, name="y").identity in found


def test_a_rank_file_its_folder_and_its_copy_are_one_tokenizer(tmp_path: Path) -> None:
    path = write_tiktoken(tmp_path / "my.tiktoken", written_ranks(small_ranks()), RULES)
    found = load_tokenizer(path)
    assert found.identity == load_tokenizer(tmp_path).identity
    found.save(tmp_path / "kept")
    assert load_tokenizer(tmp_path / "kept").identity == found.identity
    assert found.special_ids == {END_OF_TEXT: 500, "<|x|>": 501}
    own = RULES | {"pattern": NAMED_ENCODINGS["gpt2"].pattern}
    write_tiktoken(path, written_ranks(small_ranks()), own)
    assert load_tokenizer(path).identity == found.identity


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (None, "lacks the pattern and the special tokens; write them to"),
        ("{", "not a JSON file"),
        ("[]", "not a JSON object"),
        ({"special_tokens": {}}, "pattern is None; give a regular expression, or the name"),
        (RULES | {"special_tokens": {END_OF_TEXT: "7"}}, "give a table of text and id"),
        (RULES | {"eos_token": "x"}, "unknown key 'eos_token'; use pattern"),
        (RULES | {"eos": None}, "eos is None; give the text of a special token"),
        (RULES | {"special_tokens": {}}, "eos is '<|endoftext|>', not a special token"),
        (RULES | {"pad": "<|y|>"}, "pad is '<|y|>', not a special token"),
        (RULES | {"special_tokens": {END_OF_TEXT: 7}}, "has id 7, which is taken"),
        (
            RULES | {"special_tokens": {END_OF_TEXT: 500, END_OF_TEXT + ">": 501}},
            "begins with '<|endoftext|>', which makes the encoding ambiguous",
        ),
        (RULES | {"pattern": "("}, "pattern '(' is not a regular expression"),
    ],
)
def test_wrong_rules_are_named(tmp_path: Path, rules: Any, message: str) -> None:
    path = write_tiktoken(tmp_path / "my.tiktoken", written_ranks(small_ranks()), None)
    if rules is not None:
        text = rules if isinstance(rules, str) else json.dumps(rules)
        (tmp_path / "my.tiktoken.json").write_text(text)
    assert holds_tokenizer(tmp_path) == (rules is not None)
    with pytest.raises(DataError) as caught:
        load_tokenizer(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:5], b"###"], "line 6 is not a token in base64 and its rank"),
        (lambda lines: [*lines, lines[0]], "repeats a token or has none"),
        (lambda lines: [], "has no token for byte 0x00 (256 bytes missing)"),
        (
            lambda lines: [*lines, base64.b64encode(b"zzzz") + b" 7"],
            "two tokens have the same rank",
        ),
        (lambda lines: [*lines, base64.b64encode(b"zzzz") + b" -7"], "or a rank is negative"),
    ],
)
def test_wrong_ranks_are_named(tmp_path: Path, change: Any, message: str) -> None:
    lines = change(written_ranks(small_ranks()).splitlines())
    path = write_tiktoken(tmp_path / "my.tiktoken", b"\n".join(lines), RULES)
    with pytest.raises(DataError) as caught:
        load_tokenizer(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_pattern_that_leaves_characters_out_is_an_error_not_a_loss(tmp_path: Path) -> None:
    rules = RULES | {"pattern": r"\w+"}
    path = write_tiktoken(tmp_path / "my.tiktoken", written_ranks(small_ranks()), rules)
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode_batch(["words"])[0].tolist()) == "words"
    for call in (tokenizer.encode_batch, tokenizer.encode_with_offsets):
        with pytest.raises(DataError, match="leaves out characters of the text 'two words'"):
            call(["words", "two words"])


def test_named_encodings_are_those_of_the_installed_tiktoken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str]] = []

    def ranks(address: str, expected_hash: str) -> dict[bytes, int]:
        asked.append((address, expected_hash))
        return {}

    def gpt2_ranks(encoder_json_file: str, encoder_json_hash: str, **_: str) -> dict[bytes, int]:
        return ranks(encoder_json_file, encoder_json_hash)

    public = tiktoken_ext.openai_public
    monkeypatch.setattr(public, "load_tiktoken_bpe", ranks)
    monkeypatch.setattr(public, "data_gym_to_mergeable_bpe_ranks", gpt2_ranks)
    assert set(NAMED_ENCODINGS) == set(public.ENCODING_CONSTRUCTORS) == set(get_args(EncodingName))
    for name, ours in NAMED_ENCODINGS.items():
        other = public.ENCODING_CONSTRUCTORS[name]()
        assert asked[-1] == (ours.address, ours.sha256)
        assert (other["pat_str"], other["special_tokens"]) == (ours.pattern, ours.special_tokens)


def made_up(content: bytes, *, address: str = "https://nowhere.test/x.tiktoken") -> NamedEncoding:
    digest = hashlib.sha256(content).hexdigest()
    return NamedEncoding(address, digest, NAMED_ENCODINGS["gpt2"].pattern, {END_OF_TEXT: 500})


def cached(folder: Path, address: str) -> Path:
    return folder / hashlib.sha1(address.encode()).hexdigest()


@pytest.mark.parametrize("variable", ["TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR", None])
def test_a_named_encoding_is_read_from_the_cache_of_tiktoken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None, variable: str | None
) -> None:
    for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tiktoken_encodings.tempfile, "gettempdir", lambda: str(tmp_path))
    if variable is not None:
        monkeypatch.setenv(variable, str(tmp_path / "data-gym-cache"))
    content = written_ranks(small_ranks())
    encoding = made_up(content)
    path = cached(tmp_path / "data-gym-cache", encoding.address)
    path.parent.mkdir()
    path.write_bytes(content)
    found = open_named_encoding("small", encodings={"small": encoding})
    # tiktoken itself, from the same file and rules.
    library = tiktoken.Encoding(
        "small", pat_str=encoding.pattern, special_tokens={END_OF_TEXT: 500},
        mergeable_ranks=tiktoken.load.load_tiktoken_bpe(encoding.address, encoding.sha256),
    )  # fmt: skip
    for text, ids_n in zip(HARD_TEXTS, found.encode_batch(HARD_TEXTS), strict=True):
        assert ids_n.tolist() == library.encode_ordinary(text)
    found.save(tmp_path / "kept")
    assert load_tokenizer(tmp_path / "kept").identity == found.identity


def test_gpt2_is_read_from_its_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spelled = byte_characters()
    ranks = small_ranks()
    vocabulary = {"".join(spelled[b] for b in token): rank for token, rank in ranks.items()}
    content = json.dumps(vocabulary | {END_OF_TEXT: 500}).encode()
    encoding = made_up(content, address="https://nowhere.test/encoder.json")
    cached(tmp_path, encoding.address).write_bytes(content)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    found = open_named_encoding("old", encodings={"old": encoding})
    same = TiktokenTokenizer(ranks, replace(small_rules(), special_tokens={END_OF_TEXT: 500},
                                            pad=None), name="same")  # fmt: skip
    assert found.identity == same.identity


@pytest.mark.parametrize("name", ["gpt2", "o200k_base"])
def test_ranks_that_are_not_there_are_named_and_never_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None, name: str
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    path = cached(tmp_path, NAMED_ENCODINGS[name].address)
    with pytest.raises(DataError) as caught:
        open_named_encoding(name)
    assert f"data.tokenizer.encoding = {name!r}" in str(caught.value)
    assert str(path) in str(caught.value)
    path.write_bytes(b"something else")
    with pytest.raises(DataError, match="its sha256 differs"):
        open_named_encoding(name)
    assert path.read_bytes() == b"something else"


def test_an_unknown_encoding_is_named() -> None:
    with pytest.raises(DataError, match="'p60k' is not a tiktoken encoding; use one of gpt2"):
        open_named_encoding("p60k")


def test_a_fetched_rank_file_is_known_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = written_ranks(small_ranks())
    monkeypatch.setattr(tiktoken_encodings, "NAMED_ENCODINGS", {"small": made_up(content)})
    path = write_tiktoken(tmp_path / "any name.tiktoken", content, None)
    assert holds_tokenizer(tmp_path)
    assert load_tokenizer(path).special_ids == {END_OF_TEXT: 500}


def changed(model: bytes, piece: int, *, score: float | None = None) -> bytes:
    """The model with another spelling, or another score, of one piece."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    if score is None:
        proto.pieces[piece].piece += "q"
    else:
        proto.pieces[piece].score = score
    return bytes(proto.SerializeToString())


def test_control_symbols_never_come_from_text_and_user_symbols_do() -> None:
    tokenizer = tokenizer_of("sp_bpe")
    assert set(tokenizer.special_ids) == {"<unk>", "<s>", "</s>", "<start>"}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, None)
    assert tokenizer_of("sp_suffix").pad_id == 3
    (ids_n,) = tokenizer.encode_batch(["<s>x</s><start><unk>"])
    assert not set(tokenizer.special_ids.values()) & set(ids_n.tolist())
    symbol = tokenizer.vocabulary()["<tool>"]
    (found,) = tokenizer.encode_with_offsets(["x<tool>y"])
    place = found.ids_n.tolist().index(symbol)
    assert (found.starts_n[place], found.stops_n[place]) == (1, 7)


def test_documents_after_each_other_decode_as_themselves() -> None:
    tokenizer = tokenizer_of("sp_bpe")
    first, second = tokenizer.encode_batch(["one two", " three"])
    ids = [1, *first.tolist(), 2, *second.tolist(), 2]
    assert tokenizer.decode(ids) == "<s>one two</s> three</s>"


def test_a_changed_piece_score_or_symbol_is_another_tokenizer() -> None:
    model = sentencepiece_model("bpe")
    others = [
        changed(model, 300),
        changed(model, 300, score=-1e4),
        train_sentencepiece(model_type="bpe", vocab_size=500),
        train_sentencepiece(model_type="bpe", vocab_size=500, eos_id=1, bos_id=2),
    ]
    identities = {SentencePieceTokenizer(each, name="x").identity for each in [model, *others]}
    assert len(identities) == 5
    assert SentencePieceTokenizer(bytes(model), name="y").identity in identities


def test_a_model_file_its_folder_and_a_copy_of_it_are_one_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    path = tmp_path / "own" / "spiece.model"
    path.write_bytes(sentencepiece_model("nfkc"))
    assert load_tokenizer(path).identity == load_tokenizer(path.parent).identity
    load_tokenizer(path).save(tmp_path / "kept")
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["tokenizer.model"]
    assert load_tokenizer(tmp_path / "kept").identity == load_tokenizer(path).identity


def test_a_folder_that_transformers_knows_stays_with_transformers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model("bpe"))
    alone = load_tokenizer(tmp_path)
    assert isinstance(alone, SentencePieceTokenizer)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    known = load_tokenizer(tmp_path)
    assert isinstance(known, HuggingFaceTokenizer)
    assert isinstance(load_tokenizer(tmp_path / "tokenizer.model"), SentencePieceTokenizer)
    assert known.identity != alone.identity
    # One vocabulary, so that a model of the one may be trained with the other.
    assert known.vocabulary().items() >= alone.vocabulary().items()


def model_file(folder: Path, kind: str) -> Path:
    path = folder / "broken.model"
    model = sentencepiece_model("bpe")
    path.write_bytes(
        {
            "empty": b"",
            "no model": b"no model at all",
            "cut off": model[: len(model) // 2],
            "ranks": base64.b64encode(b"a") + b" 0\n" + base64.b64encode(b"b") + b" 1\n",
            "no end": train_sentencepiece(model_type="bpe", vocab_size=500, eos_id=-1),
        }.get(kind, model)
    )
    if kind == "two":
        (folder / "another.model").write_bytes(model)
        return folder
    if kind == "other ending":
        return path.rename(folder / "broken.bin")
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty", "the file is empty"),
        ("no model", "not a SentencePiece model"),
        ("cut off", "not a SentencePiece model"),
        ("ranks", "contains tiktoken ranks, not a SentencePiece model; name it .tiktoken"),
        ("no end", "no end-of-document token; train it with an eos_id that is not negative"),
        ("two", "contains another.model, broken.model; set data.tokenizer.path to one"),
        ("other ending", "neither .model nor .tiktoken"),
    ],
)
def test_a_wrong_model_is_named(tmp_path: Path, kind: str, message: str) -> None:
    path = model_file(tmp_path, kind)
    with pytest.raises(DataError) as caught:
        load_tokenizer(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
