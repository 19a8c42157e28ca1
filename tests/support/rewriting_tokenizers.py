"""Small tokenizers of the `tokenizers` library that add to a text or rewrite it.

Trained on the texts of `tokenizer_kinds`, like the kinds there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from megatron_distill.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_distill.data.tokenizers.open import Tokenizer
from tests.support.tokenizer_kinds import tokenizer_of, training_texts


def _wrapped(backend: tokenizers.Tokenizer, name: str, **tokens: Any) -> HuggingFaceTokenizer:
    from transformers import PreTrainedTokenizerFast

    return HuggingFaceTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", **tokens), name=name
    )


def fallback_bpe() -> HuggingFaceTokenizer:
    """A BPE with byte fallback and a space put first, as Llama 2 has."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        limit_alphabet=90,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator(training_texts(), trainer)
    # Byte tokens are ordinary ones in Llama's files; the trainer has added them as special ones.
    written = json.loads(backend.to_str())
    written["added_tokens"] = written["added_tokens"][:3]
    backend = tokenizers.Tokenizer.from_str(json.dumps(written))
    return _wrapped(backend, "BPE with byte fallback", bos_token="<s>", unk_token="<unk>")


def bpe_with_runs_of_spaces() -> HuggingFaceTokenizer:
    """A BPE with byte fallback and no space put first, whose runs of spaces are in its vocabulary
    and among its added tokens, as Gemma's."""
    written = json.loads(fallback_bpe().hugging_face.backend_tokenizer.to_str())
    written["normalizer"] = written["normalizer"]["normalizers"][1]
    written["decoder"]["decoders"].pop()
    vocabulary = written["model"]["vocab"]
    for power, run in enumerate(("\u2581\u2581", "\u2581" * 4)):
        number = vocabulary.setdefault(run, len(vocabulary))
        half = run[: len(run) // 2]
        written["model"]["merges"].insert(power, [half, half])
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        written["added_tokens"].append({"id": number, "content": run, **flags})
    written["added_tokens"].sort(key=lambda token: token["id"])
    backend = tokenizers.Tokenizer.from_str(json.dumps(written))
    return _wrapped(backend, "BPE with runs of spaces", bos_token="<s>", unk_token="<unk>")


def lowercase_wordpiece() -> HuggingFaceTokenizer:
    """A WordPiece that removes accents and case, as BERT's."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=["[UNK]", "</s>", "[PAD]"], show_progress=False
    )
    backend.train_from_iterator(training_texts(), trainer)
    return _wrapped(backend, "WordPiece", unk_token="[UNK]", pad_token="[PAD]")


def _byte_level(normalizer: Any, *, space_first: bool, name: str) -> HuggingFaceTokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space_first)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=["</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(training_texts(), trainer)
    backend.add_tokens(["<tool>"])
    return _wrapped(backend, name)


REWRITING: dict[str, Callable[[], HuggingFaceTokenizer]] = {
    "hf_fallback": fallback_bpe,
    "hf_runs": bpe_with_runs_of_spaces,
    "hf_wordpiece": lowercase_wordpiece,
    "hf_nfc": lambda: _byte_level(
        normalizers.NFC(), space_first=False, name="byte-level BPE after NFC"
    ),
    "hf_nfkc": lambda: _byte_level(
        normalizers.NFKC(), space_first=False, name="byte-level BPE after NFKC"
    ),
    "hf_lower": lambda: _byte_level(
        normalizers.Lowercase(), space_first=True, name="byte-level BPE of lower case"
    ),
}


@cache
def rewriting_tokenizer(kind: str) -> HuggingFaceTokenizer:
    return REWRITING[kind]()


def kind_of(kind: str) -> Tokenizer:
    """A tokenizer of one of these kinds, or of those of `tokenizer_kinds`."""
    return rewriting_tokenizer(kind) if kind in REWRITING else tokenizer_of(kind)
