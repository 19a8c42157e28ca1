"""The bytes and the rank of each token, as tiktoken's files hold them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

from megatron_distill.data.tokenizer_protocol import END_OF_TEXT, read_json_object
from megatron_distill.errors import DataError

Ranks = dict[bytes, int]


def byte_characters() -> list[str]:
    """The character that byte-level vocabularies write for each byte, as GPT-2 introduced them.

    Printable bytes stand for themselves, the others for the characters from U+0100 on.
    """
    found: list[str] = []
    others = 0
    for byte in range(256):
        is_printable = chr(byte).isprintable() and chr(byte) != " "
        found.append(chr(byte) if is_printable else chr(256 + others))
        others += not is_printable
    return found


def parse_ranks(content: bytes, *, name: str) -> Ranks:
    """Ranks from lines of base64 and a number.

    Raises DataError that names the line: no such line, or a token or rank that is there twice.
    """
    ranks: Ranks = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks_before, decoded = len(ranks), base64.b64decode(token, validate=True)
            ranks[decoded] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise DataError(
                f"{name}: line {number} is not a token in base64 and its rank; copy the file again"
            ) from error
        if len(ranks) == ranks_before or not decoded:
            raise DataError(f"{name}: line {number} repeats a token or has none; copy it again")
    return _checked(ranks, name=name)


def parse_gpt2_vocabulary(path: Path) -> Ranks:
    """Ranks from GPT-2's `encoder.json`, whose ids are the ranks; raises DataError."""
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    content = read_json_object(path, advice="fetch it again")
    try:
        ranks = {
            bytes(byte_of[character] for character in token): int(number)
            for token, number in content.items()
            if token != END_OF_TEXT
        }
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not GPT-2's vocabulary; fetch it again") from error
    return _checked(ranks, name=str(path))


def _checked(ranks: Ranks, *, name: str) -> Ranks:
    """Raise DataError where tiktoken would end the process on meeting a text."""
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f"{name}: has no token for byte 0x{missing[0]:02x} ({len(missing)} bytes are missing); "
            "a byte-level vocabulary holds all 256"
        )
    if len(set(ranks.values())) < len(ranks) or min(ranks.values()) < 0:
        raise DataError(f"{name}: two tokens have one rank, or a rank is negative; copy it again")
    return ranks


def written_ranks(ranks: Mapping[bytes, int]) -> bytes:
    """Ranks as a `.tiktoken` file holds them, the lowest first."""
    rows = sorted(ranks.items(), key=lambda row: row[1])
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in rows)
