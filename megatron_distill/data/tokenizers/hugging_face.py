"""Tokenizers of `transformers`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megatron_distill.data.tokenizers.hugging_face_bytes import token_bytes_of
from megatron_distill.data.tokenizers.protocol import (
    END_OF_TEXT,
    NO_TOKEN,
    Encoding,
    check_texts,
    decode_around,
    read_json_object,
)
from megatron_distill.errors import DataError
from megatron_distill.log import get_logger
from megatron_distill.runtime.atomic_files import whole_folder

_LOG = get_logger(__name__)
_FILE: Final = "tokenizer.json"
_TABLES: Final = ("vocab", "merges")  # of a model, beside its rules
# Line ends, runs of spaces, digits, accents of two forms: tokenizers differ in splitting these.
_PROBE: Final = "A\n\n\n  b\t\tc \n\r\n it's  12345, \u00e9e\u0301 \u6f22\U0001f600 x\n"


class HuggingFaceTokenizer:
    """A tokenizer of `transformers` behind the `Tokenizer` protocol.

    `folder` holds its files; None for a tokenizer made in memory.
    """

    def __init__(self, hugging_face: Any, *, name: str, folder: Path | None = None) -> None:
        self.hugging_face = hugging_face
        self.name = name
        self.folder = folder
        vocabulary: dict[str, int] = hugging_face.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos_id = _end_of_document(hugging_face, vocabulary, name)
        self.end_ids: tuple[int, ...] = (self.eos_id,)
        self.bos_id: int | None = hugging_face.bos_token_id
        self.pad_id: int | None = hugging_face.pad_token_id
        self.adds_bos = _adds_bos(hugging_face)
        self.special_ids = _special_ids(hugging_face, vocabulary)
        self.chat_template = _chat_template(hugging_face)
        self._known = frozenset(vocabulary.values())
        self._fast: tokenizers.Tokenizer | None = (
            hugging_face.backend_tokenizer if hugging_face.is_fast else None
        )
        self._with_offsets: tokenizers.Tokenizer | None = None
        # split_special_tokens of its tokenizer_config.json
        self.reads_special_tokens = self._fast is None or not self._fast.encode_special_tokens
        rules: dict[str, Any] = {}
        if self._fast is not None:
            # A file keeps the truncation and padding of its last use, as after fine-tuning.
            self._fast.no_truncation()
            self._fast.no_padding()
            written = json.loads(self._fast.to_str())
            rules = {key: written.get(key) for key in ("model", "normalizer", "pre_tokenizer")}
        unknown = _unknown_id(rules, vocabulary, hugging_face.unk_token_id)
        # A vocabulary of bytes, which lacks nothing, may name its end-of-document token.
        self.unknown_id = None if unknown == self.eos_id else unknown
        self.identity = self._digest(vocabulary, rules)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._with_offsets = None
        if self._fast is not None:  # the library's pickles lack it
            self._fast.encode_special_tokens = not self.reads_special_tokens

    def _digest(self, vocabulary: dict[str, int], rules: dict[str, Any]) -> str:
        content = json.dumps([sorted(vocabulary.items()), self.eos_id, rules], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids of each text, int32, without special tokens before or after.

        Raises DataError for a text with half a surrogate pair.
        """
        texts = check_texts(texts, self.name)
        if self._fast is not None:
            encodings = self._fast.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
        if not texts:
            return []
        rows = self.hugging_face(texts, add_special_tokens=False)["input_ids"]
        return [np.array(row, dtype=np.int32) for row in rows]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoding]:
        """Token ids of each text as from `encode_batch`, with the character span of each token.

        Raises DataError if the tokenizer has no offsets, and as `encode_batch` does.
        """
        if self._fast is None:
            raise DataError(
                f"{self.name}: has no tokenizer.json, so the characters of a token are unknown; "
                "save it as a fast tokenizer with save_pretrained of transformers"
            )
        if self._with_offsets is None:
            # Post-processors may trim spaces off the offsets; they add nothing else here.
            self._with_offsets = tokenizers.Tokenizer.from_str(self._fast.to_str())
            self._with_offsets.post_processor = None
            self._with_offsets.encode_special_tokens = not self.reads_special_tokens
        encodings = self._with_offsets.encode_batch(
            check_texts(texts, self.name), add_special_tokens=False
        )
        return [
            Encoding(np.array(encoding.ids, np.int32), offsets_n2[:, 0], offsets_n2[:, 1])
            for encoding in encodings
            for offsets_n2 in (np.array(encoding.offsets, np.int32).reshape(-1, 2),)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens spelled out, U+FFFD for ids without text."""
        return decode_around(
            ids,
            decode_run=self._decode_run,
            spelled=lambda number: None if number in self._known else NO_TOKEN,
        )

    def _decode_run(self, ids: list[int]) -> str:
        text: str = self.hugging_face.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def vocabulary(self) -> dict[str, int]:
        """Spelling and id of every token."""
        found: dict[str, int] = self.hugging_face.get_vocab()
        return found

    def token_bytes(self) -> list[bytes | None]:
        """The bytes that each id stands for inside a running text; None for special tokens.

        Raises DataError if the tokenizer has no `tokenizer.json`.
        """
        if self._fast is None:
            raise DataError(
                f"{self.name}: has no tokenizer.json, so the bytes of a token are unknown; save it "
                "as a fast tokenizer with save_pretrained of transformers"
            )
        special = frozenset(self.special_ids.values())
        return token_bytes_of(json.loads(self._fast.to_str()), self.vocabulary(), special)

    def save(self, folder: Path) -> None:
        """Write a Hugging Face tokenizer folder, under its name only when complete."""
        with whole_folder(folder, replaces=True) as partial:
            self.hugging_face.save_pretrained(partial)


def _end_of_document(hugging_face: Any, vocabulary: dict[str, int], name: str) -> int:
    if hugging_face.eos_token_id is not None:
        return int(hugging_face.eos_token_id)
    if END_OF_TEXT in vocabulary:
        return vocabulary[END_OF_TEXT]
    raise DataError(
        f"{name}: the tokenizer has no end-of-document token; set eos_token in its "
        "tokenizer_config.json"
    )


def _adds_bos(hugging_face: Any) -> bool:
    """Whether a text with special tokens begins with the begin-of-text token."""
    if hugging_face.bos_token_id is None:
        return False
    ids: list[int] = hugging_face("", add_special_tokens=True)["input_ids"]
    return ids[:1] == [hugging_face.bos_token_id]


def _unknown_id(rules: dict[str, Any], vocabulary: dict[str, int], named: int | None) -> int | None:
    """The model's token for text that it lacks, or else the named one."""
    model = rules.get("model", {})
    number: int | None = model.get("unk_id")
    return vocabulary.get(model.get("unk_token") or "", named) if number is None else number


def _special_ids(hugging_face: Any, vocabulary: dict[str, int]) -> dict[str, int]:
    added = hugging_face.added_tokens_decoder.items()
    found = {str(token): int(number) for number, token in added if token.special}
    named = {str(token) for token in hugging_face.all_special_tokens}
    return found | {token: vocabulary[token] for token in named & vocabulary.keys()}


def _chat_template(hugging_face: Any) -> str | None:
    """The chat template; of several, the default of `transformers`."""
    template = hugging_face.chat_template
    return template.get("default") if isinstance(template, dict) else template


def open_hugging_face(folder: Path) -> HuggingFaceTokenizer:
    """The tokenizer of a local Hugging Face folder; nothing is downloaded.

    A `tokenizer.json` decides how texts are split, whatever class `transformers` has for the model.
    Raises DataError if its files are malformed or it has no end-of-document token.
    """
    from transformers import AutoTokenizer  # takes seconds, and only the reading rank needs it

    # The tokenizers library raises a bare Exception for malformed files, so check them first.
    for name in (_FILE, "tokenizer_config.json"):
        if (folder / name).exists():
            content = read_json_object(folder / name, advice="copy the tokenizer again")
            if name == _FILE and "model" not in content:
                raise DataError(
                    f"{folder / name}: not a tokenizer description; copy the tokenizer again"
                )
    try:
        hugging_face = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise DataError(f"{folder}: not a usable Hugging Face tokenizer ({reason})") from error
    if (folder / _FILE).is_file() and hugging_face.is_fast:
        hugging_face = _with_rules_of_file(hugging_face, folder)
    return HuggingFaceTokenizer(hugging_face, name=str(folder), folder=folder)


def _with_rules_of_file(found: Any, folder: Path) -> Any:
    """`found`, or the tokenizer that `tokenizer.json` describes where `found` has other rules.

    For many models, chosen by `model_type` in config.json, `transformers` takes only vocabulary and
    merges from the file. Normalizer and pre-tokenizer are those of a class. A model was trained on
    the file's tokens: other libraries, and `transformers` before version 5, use the file as it is.
    """
    from transformers import PreTrainedTokenizerFast

    if type(found) is PreTrainedTokenizerFast:
        return found  # it reads the file as it is
    own = tokenizers.Tokenizer.from_file(str(folder / _FILE))
    if _rules(own) == _rules(found.backend_tokenizer):
        return found
    if _splits_otherwise(own, found.backend_tokenizer):
        _LOG.warning(
            "%s: the class %s of transformers splits texts otherwise than %s; the file is used. "
            "AutoTokenizer gives other tokens for this folder",
            *(folder, type(found).__name__, _FILE),
        )
    known = own.get_vocab(with_added_tokens=True)
    roles = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {role: token for role in roles if (token := getattr(found, role)) in known}
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, **tokens)


def _rules(backend: tokenizers.Tokenizer) -> tuple[object, ...]:
    """The parts that decide a text's tokens, without the vocabulary."""
    written = json.loads(backend.to_str())
    model = {key: value for key, value in written["model"].items() if key not in _TABLES}
    return model, written["normalizer"], _without_offsets(written["pre_tokenizer"])


def _without_offsets(part: Any) -> Any:
    """A pre-tokenizer without the options that change offsets alone."""
    if isinstance(part, list):
        return [_without_offsets(one) for one in part]
    if isinstance(part, dict):
        return {key: _without_offsets(one) for key, one in part.items() if key != "trim_offsets"}
    return part


def _splits_otherwise(own: tokenizers.Tokenizer, other: tokenizers.Tokenizer) -> bool:
    unknown = getattr(other.model, "unk_token", None)
    if unknown is not None and other.model.token_to_id(unknown) is None:
        return True  # it cannot encode every text
    first, second = (one.encode(_PROBE, add_special_tokens=False).tokens for one in (own, other))
    return bool(first != second)


SMALLEST_BPE: Final = 257  # every byte and the end-of-document token


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> HuggingFaceTokenizer:
    """A byte-level BPE of at most `vocab_size` tokens; the same texts give the same tokenizer.

    It ends documents with <|endoftext|> (id 0). The vocabulary is smaller if the texts have too
    few repeated pairs. Raises DataError for fewer than 257 tokens or no text.
    """
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < SMALLEST_BPE:
        raise DataError(
            f"data.tokenizer.train_vocab_size is {vocab_size}: a byte-level vocabulary needs at "
            f"least {SMALLEST_BPE} tokens"
        )
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    counted = _CountedTexts(texts)
    model.train_from_iterator(counted, trainer=trainer)
    if counted.characters == 0:
        raise DataError("data.tokenizer.train_vocab_size: data.sources contain no text to train on")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    return HuggingFaceTokenizer(wrapped, name=f"byte-level BPE of {model.get_vocab_size()} tokens")


class _CountedTexts:
    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = iter(texts)
        self.characters = 0

    def __iter__(self) -> _CountedTexts:
        return self

    def __next__(self) -> str:
        text = next(self._texts)
        self.characters += len(text)
        return text
