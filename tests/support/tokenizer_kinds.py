"""A small tokenizer of every kind, trained on the fly, and texts that are hard on them."""

from __future__ import annotations

import io
import json
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece

from megatron_distill.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_distill.data.tokenizers.open import END_OF_TEXT, Tokenizer, train_bpe
from megatron_distill.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from megatron_distill.data.tokenizers.tiktoken_bpe import TiktokenRules, TiktokenTokenizer
from megatron_distill.data.tokenizers.tiktoken_encodings import NAMED_ENCODINGS, byte_characters

COMPOSED = "Ångström \u00e9\u00ef\u1e69 한국어 \ufb01 \u00bd \u212b"
HARD_TEXTS = (
    "",
    " ",
    "plain words, twice: plain words",
    *(unicodedata.normalize(form, COMPOSED) for form in ("NFC", "NFD", "NFKC", "NFKD")),
    "family \U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 flag \U0001f1f3\U0001f1f1",
    "\U0001f44d\U0001f3fd\u2764\ufe0f1\ufe0f\u20e3",
    "漢字かな交じり文。全角　空白，ﾊﾝｶｸ",
    "\u202bשלום عربي\u064b\u202c אבג 123",
    "def f(x):\n\tif x:\r\n\t\treturn  {'a': [x ** 2]}  # \\n\n",
    "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "a" + " " * 300 + "\n" * 40 + "\t" * 30 + "b" + " " * 7,
    "   leading and trailing   ",
    "\ufeffbom\u0301\u200b\u2028\u2029\u00a0\U0010ffff\ufffd\u0378",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 20,
)


@cache
def training_texts() -> tuple[str, ...]:
    code = Path(json.decoder.__file__).read_text(encoding="utf-8").splitlines()
    return (*code, *(text for text in HARD_TEXTS if text.strip()), "漢字 and words " * 5)


def train_sentencepiece(**options: Any) -> bytes:
    written = io.BytesIO()
    lines = [line for text in training_texts() for line in text.splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, minloglevel=2, **options
    )
    return written.getvalue()


@cache
def byte_level() -> HuggingFaceTokenizer:
    return train_bpe(training_texts(), vocab_size=420)


def byte_level_that_trims() -> HuggingFaceTokenizer:
    """The same with GPT-2's post-processor, which takes spaces off the offsets."""
    import tokenizers
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    written = byte_level().hugging_face.backend_tokenizer.to_str()
    backend = tokenizers.Tokenizer.from_str(written)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT)
    return HuggingFaceTokenizer(wrapped, name="byte-level BPE that trims")


def unigram_with_metaspace() -> HuggingFaceTokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(training_texts(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    return HuggingFaceTokenizer(wrapped, name="unigram with metaspace")


def sentencepiece_model(kind: str) -> bytes:
    keeping: dict[str, Any] = {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
        "character_coverage": 0.98,
    }
    if kind == "bpe":
        return train_sentencepiece(
            model_type="bpe", vocab_size=500, user_defined_symbols=["<tool>"],
            control_symbols=["<start>"], **keeping,
        )  # fmt: skip
    if kind == "suffix":
        return train_sentencepiece(
            model_type="unigram", vocab_size=450, hard_vocab_limit=False, pad_id=3,
            treat_whitespace_as_suffix=True, **keeping,
        )  # fmt: skip
    assert kind == "nfkc"
    return train_sentencepiece(model_type="unigram", vocab_size=420, hard_vocab_limit=False)


def ranks_of(tokenizer: HuggingFaceTokenizer) -> dict[bytes, int]:
    """The ranks of a byte-level BPE whose token 0 is the end of a document."""
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    return {
        bytes(byte_of[character] for character in token): number - 1
        for token, number in tokenizer.vocabulary().items()
        if token != END_OF_TEXT
    }


def small_rules() -> TiktokenRules:
    return TiktokenRules(
        NAMED_ENCODINGS["gpt2"].pattern, {END_OF_TEXT: 500, "<|pad|>": 510}, pad="<|pad|>"
    )


def tiktoken_of_bpe() -> TiktokenTokenizer:
    return TiktokenTokenizer(ranks_of(byte_level()), small_rules(), name="small ranks")


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "hf_bytes": byte_level,
    "hf_bytes_trimmed": byte_level_that_trims,
    "hf_unigram": unigram_with_metaspace,
    "sp_bpe": lambda: SentencePieceTokenizer(sentencepiece_model("bpe"), name="sp_bpe"),
    "sp_suffix": lambda: SentencePieceTokenizer(sentencepiece_model("suffix"), name="sp_suffix"),
    "sp_nfkc": lambda: SentencePieceTokenizer(sentencepiece_model("nfkc"), name="sp_nfkc"),
    "tiktoken": tiktoken_of_bpe,
}
BYTE_LEVEL = ("hf_bytes", "hf_bytes_trimmed", "tiktoken")
LOSSLESS = (*BYTE_LEVEL, "sp_bpe")
KEEPS_CHARACTERS = (*LOSSLESS, "sp_suffix")  # of which the last puts a space after each text


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


def write_tiktoken(path: Path, ranks: bytes, rules: dict[str, Any] | None) -> Path:
    path.write_bytes(ranks)
    if rules is not None:
        path.with_name(f"{path.name}.json").write_text(json.dumps(rules))
    return path


def no_underscores(texts: Iterable[str]) -> list[str]:
    """Texts without the character that SentencePiece writes spaces as."""
    return [text.replace("\u2581", "_") for text in texts]
