"""SentencePiece models: special symbols, identity, and every wrong file named."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from megatron_distill.data.tokenizers.open import HuggingFaceTokenizer, load_tokenizer
from megatron_distill.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from megatron_distill.errors import DataError
from tests.support.tokenizer_kinds import sentencepiece_model, tokenizer_of, train_sentencepiece


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
