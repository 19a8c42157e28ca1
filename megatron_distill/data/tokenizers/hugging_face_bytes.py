"""The bytes of every token of a `tokenizer.json`, from its own description."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from megatron_distill.data.tokenizers.tiktoken_encodings import byte_characters

_BYTE: Final = re.compile("<0x([0-9A-Fa-f]{2})>")
_BYTE_OF: Final = {character: byte for byte, character in enumerate(byte_characters())}
_ONE_BYTE: Final = tuple(bytes([byte]) for byte in range(256))


def token_bytes_of(
    description: Mapping[str, Any], vocabulary: Mapping[str, int], special: frozenset[int]
) -> list[bytes | None]:
    """The bytes of each id in running text, from the content of `tokenizer.json`.

    A byte-level vocabulary spells bytes as characters. With byte fallback `<0x0A>` is one byte.
    The characters that replace spaces are spaces again, and marks of parts of words are removed.
    Added tokens are literal, unless the model's own vocabulary has them. None for `special` ids and
    for ids without a token.
    """
    found: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    spelling = _Spelling(description)
    listed = description["model"]["vocab"]  # of a unigram model: pieces with their scores
    of_model = frozenset(listed if isinstance(listed, dict) else (piece for piece, _ in listed))
    for token, number in vocabulary.items():
        found[number] = spelling.bytes_of(token)
    for added in description.get("added_tokens") or ():
        content = added["content"]
        # A normalised added token is searched for in the text whose spaces are replaced. Gemma adds
        # its runs of spaces, which the model gives for such a text as well.
        has_marks = added.get("normalized") or content in of_model
        literal = spelling.with_spaces(content) if has_marks else content
        found[added["id"]] = literal.encode()
    for number in special:
        found[number] = None
    return found


class _Spelling:
    """How one tokenizer writes the bytes of a text in its vocabulary."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        model = description["model"]
        parts = [*_parts(description.get("normalizer")), *_parts(description.get("pre_tokenizer"))]
        self._is_byte_level = any(part["type"] == "ByteLevel" for part in parts)
        self._falls_back = bool(model.get("byte_fallback"))
        self._marks = [mark for part in parts for mark in _space_marks(part)]
        self._before = model.get("continuing_subword_prefix") or ""
        self._behind = model.get("end_of_word_suffix") or ""

    def bytes_of(self, token: str) -> bytes | None:
        if self._falls_back:
            byte = _BYTE.fullmatch(token)
            if byte is not None:
                return _ONE_BYTE[int(byte[1], 16)]
        plain = token.removeprefix(self._before).removesuffix(self._behind) or token
        if not self._is_byte_level:
            return self.with_spaces(plain).encode() or None
        try:
            return bytes(map(_BYTE_OF.__getitem__, plain)) or None
        except KeyError:
            return None  # no text gives this token

    def with_spaces(self, token: str) -> str:
        for mark in self._marks:
            token = token.replace(mark, " ")
        return token


def _parts(component: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The components of a sequence of normalisers or pre-tokenizers, however deep."""
    if component is None:
        return
    if component["type"] != "Sequence":
        yield component
        return
    for part in component.get("normalizers") or component.get("pretokenizers") or ():
        yield from _parts(part)


def _space_marks(part: Mapping[str, Any]) -> Iterator[str]:
    """The texts that a component writes for a space."""
    if part["type"] == "Metaspace":
        yield part["replacement"]
    elif part["type"] == "Replace" and part["pattern"].get("String") == " " and part["content"]:
        yield part["content"]
