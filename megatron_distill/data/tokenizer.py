"""Tokenizers: a Hugging Face folder, or a byte-level BPE trained on the corpus itself."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megatron_distill.errors import DataError

END_OF_TEXT: Final = "<|endoftext|>"
SMALLEST_BPE: Final = 257  # every byte and the end-of-document token
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Encoding:
    """The tokens of a text and the characters each stands for.

    Token i covers text[starts_n[i]:stops_n[i]]. Tokens that share a character (bytes of one emoji)
    all cover it; a token that stands for nothing in the text covers an empty span.
    """

    ids_n: NDArray[np.int32]
    starts_n: NDArray[np.int32]
    stops_n: NDArray[np.int32]


class Tokenizer:
    """A Hugging Face tokenizer, reduced to what training and text samples need.

    vocab_size: ids are in [0, vocab_size), added tokens included, model padding not.
    eos_id: the token that ends every document. identity: digest of the vocabulary and its rules;
    equal for teacher and student if they agree on every id.
    """

    def __init__(self, hugging_face: Any, *, name: str) -> None:
        self.hugging_face = hugging_face
        self.name = name
        vocabulary: dict[str, int] = hugging_face.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos_id = _end_of_document(hugging_face, vocabulary, name)
        self._fast: tokenizers.Tokenizer | None = (
            hugging_face.backend_tokenizer if hugging_face.is_fast else None
        )
        self.identity = self._digest(vocabulary)

    def _digest(self, vocabulary: dict[str, int]) -> str:
        rules: dict[str, Any] = {}
        if self._fast is not None:
            written = json.loads(self._fast.to_str())
            rules = {key: written.get(key) for key in ("model", "normalizer", "pre_tokenizer")}
        content = json.dumps([sorted(vocabulary.items()), self.eos_id, rules], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids of each text, int32, without special tokens before or after."""
        if self._fast is not None:
            encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
        rows = self.hugging_face(list(texts), add_special_tokens=False)["input_ids"]
        return [np.array(row, dtype=np.int32) for row in rows]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoding]:
        """Tokens of each text as `encode_batch` gives them, and where in the text each lies.

        Raises DataError if the tokenizer does not know its offsets.
        """
        if self._fast is None:
            raise DataError(
                f"{self.name}: a tokenizer without a tokenizer.json does not say which characters "
                "a token stands for; convert it with transformers' save_pretrained of a fast one"
            )
        encodings = self._fast.encode_batch(list(texts), add_special_tokens=False)
        return [
            Encoding(np.array(encoding.ids, np.int32), offsets_n2[:, 0], offsets_n2[:, 1])
            for encoding in encodings
            for offsets_n2 in (np.array(encoding.offsets, np.int32).reshape(-1, 2),)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens spelled out."""
        text: str = self.hugging_face.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def save(self, folder: Path) -> None:
        """Write a Hugging Face tokenizer folder; it appears under its name only when complete."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
        self.hugging_face.save_pretrained(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)


def _end_of_document(hugging_face: Any, vocabulary: dict[str, int], name: str) -> int:
    if hugging_face.eos_token_id is not None:
        return int(hugging_face.eos_token_id)
    if END_OF_TEXT in vocabulary:
        return vocabulary[END_OF_TEXT]
    raise DataError(
        f"{name}: the tokenizer has no end-of-document token; set eos_token in its "
        "tokenizer_config.json"
    )


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder has a file that a tokenizer can be made of."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a local Hugging Face folder; nothing is downloaded.

    Raises DataError if the folder or its tokenizer files are missing or malformed, or if it has no
    end-of-document token.
    """
    from transformers import AutoTokenizer  # takes seconds, and only the reading rank needs it

    path = Path(folder).expanduser()
    _check_folder(path)
    try:
        hugging_face = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise DataError(f"{path}: not a usable Hugging Face tokenizer ({reason})") from error
    return Tokenizer(hugging_face, name=str(path))


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        state = "is a file, not a folder" if path.exists() else "no such folder"
        raise DataError(
            f"{path}: {state}; set data.tokenizer.path to a folder with a tokenizer.json, or "
            "data.tokenizer.train_vocab_size to train one"
        )
    if not holds_tokenizer(path):
        raise DataError(
            f"{path}: holds none of {', '.join(_TOKENIZER_FILES)}; set data.tokenizer.path to a "
            "Hugging Face tokenizer folder"
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (path / name).exists():
            _check_json(path / name)


def _check_json(path: Path) -> None:
    """The tokenizers library raises a bare Exception for such files, so this looks first."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a JSON file ({error}); copy the tokenizer again") from error
    if not isinstance(content, dict) or (path.name == "tokenizer.json" and "model" not in content):
        raise DataError(f"{path}: not a tokenizer description; copy the tokenizer again")


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` tokens; the same texts give the same tokenizer.

    It ends documents with <|endoftext|> (id 0). Fewer tokens come out where the texts hold no more
    repeated pairs. Raises DataError for fewer than 257 tokens or no text.
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
        raise DataError("data.tokenizer.train_vocab_size: data.sources hold no text to train on")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    return Tokenizer(wrapped, name=f"byte-level BPE of {model.get_vocab_size()} tokens")


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
