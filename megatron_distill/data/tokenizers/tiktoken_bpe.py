"""Tokenizers of the tiktoken library, from a `.tiktoken` rank file or an encoding's name."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import tiktoken
from numpy.typing import NDArray

from megatron_distill.data.tokenizers.protocol import (
    CHAT_TEMPLATE_FILE,
    END_OF_TEXT,
    NO_TOKEN,
    Encoding,
    check_texts,
    read_chat_template,
    read_json_object,
)
from megatron_distill.data.tokenizers.tiktoken_encodings import (
    NAMED_ENCODINGS,
    NamedEncoding,
    Ranks,
    byte_characters,
    fetched_ranks,
    parse_ranks,
    recognised,
    written_ranks,
)
from megatron_distill.errors import DataError
from megatron_distill.runtime.atomic_files import whole_folder

RANK_FILE: Final = "tokenizer.tiktoken"
_LONG_SPACE: Final = re.compile(r"\s{100000}")
_KEYS: Final = ("pattern", "special_tokens", "eos", "bos", "pad")


@dataclass(frozen=True)
class TiktokenRules:
    """Rules that a rank file does not contain: the split pattern and the special tokens.

    pattern: a regular expression in the dialect of tiktoken. eos, bos, pad are names of special
    tokens.
    """

    pattern: str
    special_tokens: Mapping[str, int]
    eos: str = END_OF_TEXT
    bos: str | None = None
    pad: str | None = None


class TiktokenTokenizer:
    """A byte-level BPE of tiktoken; lossless. A special token spelled out in a text is that token.

    Raises DataError: the rules do not fit the ranks, or the pattern is not a regular expression.
    """

    reads_special_tokens = True
    adds_bos = False  # the rules do not tell
    unknown_id: int | None = None

    def __init__(
        self, ranks: Ranks, rules: TiktokenRules, *, name: str, chat_template: str | None = None
    ) -> None:
        _check_special_tokens(ranks, rules, name)
        self.name = name
        self.chat_template = chat_template
        self._ranks = ranks
        self._rules = rules
        self.special_ids = dict(rules.special_tokens)
        try:
            self._encoding = tiktoken.Encoding(
                name,
                pat_str=rules.pattern,
                mergeable_ranks=ranks,
                special_tokens=self.special_ids,
            )
        except ValueError as error:
            raise DataError(
                f"{name}: pattern {rules.pattern!r} is not a regular expression that tiktoken "
                f"accepts ({error})"
            ) from error
        self._bytes = {rank: token for token, rank in ranks.items()}
        for text, number in self.special_ids.items():
            self._bytes.setdefault(number, text.encode())  # the first of several names
        self.vocab_size = max(self._bytes) + 1
        self._lengths_V = np.zeros(self.vocab_size, np.int64)
        self._lengths_V[list(self._bytes)] = [len(token) for token in self._bytes.values()]
        self.eos_id = self.special_ids[rules.eos]
        self.end_ids: tuple[int, ...] = (self.eos_id,)
        self.bos_id = None if rules.bos is None else self.special_ids[rules.bos]
        self.pad_id = None if rules.pad is None else self.special_ids[rules.pad]
        self.identity = self._digest()

    def _digest(self) -> str:
        rules = [self._rules.pattern, sorted(self.special_ids.items()), self.eos_id]
        digest = hashlib.sha256(b"tiktoken" + json.dumps(rules).encode())
        digest.update(written_ranks(self._ranks))
        return digest.hexdigest()[:16]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids of each text, int32, without special tokens before or after.

        Raises DataError for a text with half a surrogate pair, or with characters that the
        pattern leaves out.
        """
        pieces = [_pieces(text) for text in check_texts(texts, self.name)]
        try:
            rows = iter(
                self._encoding.encode_batch(
                    [piece for of_text in pieces for piece in of_text],
                    num_threads=os.cpu_count() or 1,
                    allowed_special="all",
                    disallowed_special=(),
                )
            )
        except ValueError as error:
            raise DataError(f"{self.name}: its pattern fails on a text ({error})") from error
        encoded = [
            np.array([number for _ in of_text for number in next(rows)], dtype=np.int32)
            for of_text in pieces
        ]
        for text, ids_n in zip(texts, encoded, strict=True):
            if self._lengths_V[ids_n].sum() != len(text.encode()):
                raise DataError(
                    f"{self.name}: its pattern {self._rules.pattern!r} leaves out characters of "
                    rf"the text {text[:40]!r}; let it match every text, as with a last |\s|."
                )
        return encoded

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoding]:
        """Token ids of each text as from `encode_batch`, with the character span of each token.

        Raises DataError as `encode_batch` does.
        """
        rows = self.encode_batch(texts)
        return [self._with_offsets(text, ids_n) for text, ids_n in zip(texts, rows, strict=True)]

    def _with_offsets(self, text: str, ids_n: NDArray[np.int32]) -> Encoding:
        leads_b = (np.frombuffer(text.encode(), np.uint8) & 0xC0) != 0x80
        character_b = (np.cumsum(leads_b) - 1).astype(np.int32)
        lengths_n = self._lengths_V[ids_n]
        stops_byte_n = np.cumsum(lengths_n)
        starts_n = character_b[stops_byte_n - lengths_n]
        return Encoding(ids_n, starts_n, character_b[stops_byte_n - 1] + 1)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens spelled out, U+FFFD for ids without text."""
        unknown = NO_TOKEN.encode()
        found = b"".join(self._bytes.get(number, unknown) for number in ids)
        return found.decode("utf-8", errors="replace")

    def vocabulary(self) -> dict[str, int]:
        """Spelling and id of every token, with the byte characters of byte-level vocabularies."""
        spelled = byte_characters()
        ordinary = {
            "".join(spelled[byte] for byte in token): rank for token, rank in self._ranks.items()
        }
        return ordinary | self.special_ids

    def token_bytes(self) -> list[bytes | None]:
        """The bytes that each id stands for inside a running text; None for special tokens."""
        found: list[bytes | None] = [None] * self.vocab_size
        for token, rank in self._ranks.items():
            found[rank] = token
        return found

    def save(self, folder: Path) -> None:
        """Write ranks and rules; the folder appears under its name only when complete."""
        rules = {
            "pattern": self._rules.pattern,
            "special_tokens": self.special_ids,
            "eos": self._rules.eos,
            "bos": self._rules.bos,
            "pad": self._rules.pad,
        }
        with whole_folder(folder, replaces=True) as partial:
            (partial / RANK_FILE).write_bytes(written_ranks(self._ranks))
            text = json.dumps(rules, indent=2, ensure_ascii=False) + "\n"
            rules_file(partial / RANK_FILE).write_text(text, encoding="utf-8")
            if self.chat_template is not None:
                (partial / CHAT_TEMPLATE_FILE).write_text(self.chat_template, encoding="utf-8")


def _pieces(text: str) -> list[str]:
    """Cut a text inside long white space, which overflows the stack of tiktoken's patterns."""
    cuts = [0, *(match.end() for match in _LONG_SPACE.finditer(text)), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(cuts)]


def _check_special_tokens(ranks: Ranks, rules: TiktokenRules, name: str) -> None:
    special = rules.special_tokens
    for role, token in (("eos", rules.eos), ("bos", rules.bos), ("pad", rules.pad)):
        if token is not None and token not in special:
            known = ", ".join(list(special)[:5]) or "none"
            raise DataError(
                f"{name}: {role} is {token!r}, not a special token (these are {known}); set "
                f"{role} in its .tiktoken.json"
            )
    taken = set(ranks.values())
    for token, number in special.items():
        if not token or number in taken or number < 0:
            raise DataError(
                f"{name}: special token {token!r} has id {number}, which is taken; set an unused "
                f"id, from {max(ranks.values()) + 1} on"
            )
    ordered = sorted(special)
    for first, second in itertools.pairwise(ordered):
        if second.startswith(first):
            raise DataError(
                f"{name}: special token {second!r} begins with {first!r}, which makes the "
                "encoding ambiguous; remove one of the two"
            )


def rules_file(path: Path) -> Path:
    """The file with the rules of a rank file, in the same folder."""
    return path.with_name(f"{path.name}.json")


def has_rules(path: Path) -> bool:
    """Whether the rules of a rank file are known, from its rules file or from its digest."""
    return rules_file(path).is_file() or recognised(path.read_bytes()) is not None


def open_tiktoken_file(path: Path) -> TiktokenTokenizer:
    """The tokenizer of a rank file, with rules from its rules file or from a named encoding.

    Raises DataError if either file is malformed or the rules are unknown.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    beside = rules_file(path)
    named = recognised(content)
    if beside.is_file():
        rules = _read_rules(beside)
    elif named is not None:
        rules = _rules_of(named)
    else:
        raise DataError(
            f"{path}: a rank file lacks the pattern and the special tokens; write them to "
            f"{beside}: "
            f'{{"pattern": "cl100k_base", "special_tokens": {{"{END_OF_TEXT}": 100257}}}}'
        )
    ranks = parse_ranks(content, name=str(path))
    template = read_chat_template(path.parent)
    return TiktokenTokenizer(ranks, rules, name=str(path), chat_template=template)


def open_named_encoding(
    name: str, *, encodings: Mapping[str, NamedEncoding] = NAMED_ENCODINGS
) -> TiktokenTokenizer:
    """The tokenizer that tiktoken calls `name`, from ranks fetched earlier; nothing is downloaded.

    Raises DataError: no such encoding, or its ranks are not in tiktoken's cache.
    """
    if name not in encodings:
        raise DataError(f"{name!r} is not a tiktoken encoding; use one of {', '.join(encodings)}")
    encoding = encodings[name]
    return TiktokenTokenizer(fetched_ranks(name, encoding), _rules_of(encoding), name=name)


def _rules_of(encoding: NamedEncoding) -> TiktokenRules:
    bos = "<|startoftext|>" if "<|startoftext|>" in encoding.special_tokens else None
    return TiktokenRules(encoding.pattern, encoding.special_tokens, bos=bos)


def _read_rules(path: Path) -> TiktokenRules:
    content = read_json_object(path, advice="correct it")
    for key in content:
        if key not in _KEYS:
            raise DataError(f"{path}: unknown key {key!r}; use {', '.join(_KEYS)}")
    pattern, special = content.get("pattern"), content.get("special_tokens")
    if not isinstance(pattern, str) or not pattern:
        raise DataError(
            f"{path}: pattern is {pattern!r}; give a regular expression, or the name of an "
            f"encoding that has it: {', '.join(NAMED_ENCODINGS)}"
        )
    if not isinstance(special, dict) or not all(_is_id(number) for number in special.values()):
        raise DataError(f"{path}: special_tokens is {special!r}; give a table of text and id")
    roles: dict[str, Any] = {role: content[role] for role in _KEYS[2:] if role in content}
    for role, token in roles.items():
        if not isinstance(token, str) and (role == "eos" or token is not None):
            raise DataError(f"{path}: {role} is {token!r}; give the text of a special token")
    named = NAMED_ENCODINGS.get(pattern)
    return TiktokenRules(named.pattern if named is not None else pattern, special, **roles)


def _is_id(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number < 2**31
