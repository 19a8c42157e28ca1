"""The protocol of tokenizers, common to all libraries."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_distill.errors import DataError

END_OF_TEXT: Final = "<|endoftext|>"
NO_TOKEN: Final = "\N{REPLACEMENT CHARACTER}"  # text of an id without a token
CHAT_TEMPLATE_FILE: Final = "chat_template.jinja"


@dataclass(frozen=True)
class Encoding:
    """The token ids of a text and the character span of each token.

    Token i covers text[starts_n[i]:stops_n[i]]. Tokens that share a character (bytes of one emoji)
    all cover it. A token without text covers an empty span, except the space that a Hugging Face
    Metaspace puts first: it covers the first character. Starts and stops never decrease.
    """

    ids_n: NDArray[np.int32]
    starts_n: NDArray[np.int32]
    stops_n: NDArray[np.int32]


class Tokenizer(Protocol):
    """Text to token ids and back.

    name: its origin, for messages. vocab_size: ids are in [0, vocab_size), with added tokens,
    without the model's padding. eos_id: the end-of-document token. end_ids: it, and
    others that end a written text by the folder's generation settings. bos_id, pad_id: None if
    absent. adds_bos: whether the model's inputs begin with `bos_id` by the tokenizer's own files;
    `encode_batch` never adds it. unknown_id: the token of text without a token of its own; None if
    all text has some. special_ids: special tokens to their ids. identity: digest of the vocabulary
    and its rules; equal for teacher and student if they agree on every id. chat_template: Jinja
    source, None if absent. reads_special_tokens: whether a special token spelled out in a text
    becomes that token.
    """

    name: str
    vocab_size: int
    eos_id: int
    end_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int | None
    adds_bos: bool
    unknown_id: int | None
    special_ids: dict[str, int]
    identity: str
    chat_template: str | None
    reads_special_tokens: bool

    def __hash__(self) -> int:
        """Equal for equal tokenizers only."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids of each text, int32, without special tokens before or after.

        Raises DataError for a text with half a surrogate pair.
        """
        ...

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoding]:
        """Token ids of each text as from `encode_batch`, with the character span of each token.

        Raises DataError as `encode_batch` does.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens spelled out.

        Bytes that are no UTF-8 and ids without a token become U+FFFD.
        """
        ...

    def vocabulary(self) -> dict[str, int]:
        """Spelling and id of every token, spelled as a Hugging Face tokenizer of this kind does."""
        ...

    def token_bytes(self) -> list[bytes | None]:
        """The bytes that each id stands for inside a running text; `vocab_size` entries.

        A token may be a part of a character, or begin with the space before its word. None for
        special tokens and for ids without a token. The bytes of a text's tokens are the text's
        UTF-8, but for spaces that the tokenizer adds at an end and characters that it rewrites.
        Raises DataError if the tokenizer does not tell.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write a folder that `load_tokenizer` reads as an equal tokenizer; raises OSError.

        It appears under its name only when complete.
        """
        ...


class BeginsTexts(Protocol):
    """The part of the `Tokenizer` protocol that decides with which token documents begin."""

    bos_id: int | None
    adds_bos: bool


def begin_token(tokenizer: BeginsTexts, add_bos: bool | None) -> int | None:
    """The id before each document's text, None for none; `add_bos` is the key of `data`.

    Raises DataError: it is true and the tokenizer has no begin-of-text token.
    """
    if add_bos and tokenizer.bos_id is None:
        raise DataError(
            f"data.add_bos=true: {getattr(tokenizer, 'name', 'the tokenizer')} has no "
            "begin-of-text token; set it to null, or bos_token in its tokenizer_config.json"
        )
    return tokenizer.bos_id if (tokenizer.adds_bos if add_bos is None else add_bos) else None


class EncodesTexts(Protocol):
    """The part of the `Tokenizer` protocol that encodes texts."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """As `Tokenizer.encode_batch`."""
        ...


def encoded_or_refused(
    tokenizer: EncodesTexts, texts: Sequence[str]
) -> Sequence[NDArray[np.int32] | DataError]:
    """The token ids of each text, or why the tokenizer cannot encode it."""
    try:
        return tokenizer.encode_batch(texts)
    except DataError as error:
        if len(texts) == 1:
            return [error]
    return [encoded_or_refused(tokenizer, [text])[0] for text in texts]


def check_texts(texts: Sequence[str], name: str) -> list[str]:
    """The texts as a list. Raises DataError for a text that cannot be encoded in UTF-8."""
    for text in texts:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{name}: a text to encode contains an unpaired surrogate at character "
                    f"{error.start}; give valid UTF-8"
                ) from error
    return list(texts)


def decode_around(
    ids: Sequence[int],
    *,
    decode_run: Callable[[list[int]], str],
    spelled: Callable[[int], str | None],
) -> str:
    """Decode runs of ids together, except ids for which `spelled` returns the text."""
    parts: list[str] = []
    run: list[int] = []
    for number in ids:
        text = spelled(number)
        if text is None:
            run.append(number)
            continue
        if run:
            parts.append(decode_run(run))
            run = []
        parts.append(text)
    if run:
        parts.append(decode_run(run))
    return "".join(parts)


def read_chat_template(folder: Path) -> str | None:
    """The chat template in a folder, None if absent. Raises DataError if it cannot be read."""
    path = folder / CHAT_TEMPLATE_FILE
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); correct or remove it") from error


def read_json_object(path: Path, *, advice: str) -> dict[str, Any]:
    """The JSON object of a file. Raises DataError, which ends with the advice."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a JSON file ({error}); {advice}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a JSON object; {advice}")
    return content
