"""The named encodings of tiktoken, and their ranks in tiktoken's download cache.

tiktoken itself downloads missing files; this module reads the same files and never downloads.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron_distill.data.tokenizers.protocol import END_OF_TEXT, read_json_object
from megatron_distill.errors import DataError, counted

# From tiktoken_ext/openai_public.py, tiktoken 0.14.0 (MIT licence).
_R50K: Final = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
_CL100K: Final = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"""
    r"""| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
_O200K_WORD: Final = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
_O200K: Final = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"""
        + _O200K_WORD,
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"""
        + _O200K_WORD,
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
_FILL_IN: Final = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_PLACE: Final = "https://openaipublic.blob.core.windows.net"


@dataclass(frozen=True)
class NamedEncoding:
    """A named encoding of tiktoken: the address and sha256 of its ranks, and its rules."""

    address: str
    sha256: str
    pattern: str
    special_tokens: Mapping[str, int]


def _harmony() -> dict[str, int]:
    named = {
        "<|startoftext|>": 199998,
        END_OF_TEXT: 199999,
        "<|return|>": 200002,
        "<|constrain|>": 200003,
        "<|channel|>": 200005,
        "<|start|>": 200006,
        "<|end|>": 200007,
        "<|message|>": 200008,
        "<|call|>": 200012,
    }
    reserved = sorted(set(range(200000, 201088)) - set(named.values()))
    # 200018 has two names.
    named["<|endofprompt|>"] = 200018
    return named | {f"<|reserved_{number}|>": number for number in reserved}


_P50K_RANKS: Final = (
    f"{_PLACE}/encodings/p50k_base.tiktoken",
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069",
)
_O200K_RANKS: Final = (
    f"{_PLACE}/encodings/o200k_base.tiktoken",
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
)
NAMED_ENCODINGS: Final[Mapping[str, NamedEncoding]] = {
    "gpt2": NamedEncoding(
        f"{_PLACE}/gpt-2/encodings/main/encoder.json",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
        _R50K,
        {END_OF_TEXT: 50256},
    ),
    "r50k_base": NamedEncoding(
        f"{_PLACE}/encodings/r50k_base.tiktoken",
        "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
        _R50K,
        {END_OF_TEXT: 50256},
    ),
    "p50k_base": NamedEncoding(*_P50K_RANKS, _R50K, {END_OF_TEXT: 50256}),
    "p50k_edit": NamedEncoding(
        *_P50K_RANKS,
        _R50K,
        {END_OF_TEXT: 50256} | {name: 50281 + place for place, name in enumerate(_FILL_IN)},
    ),
    "cl100k_base": NamedEncoding(
        f"{_PLACE}/encodings/cl100k_base.tiktoken",
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        _CL100K,
        {END_OF_TEXT: 100257, "<|endofprompt|>": 100276}
        | {name: 100258 + place for place, name in enumerate(_FILL_IN)},
    ),
    "o200k_base": NamedEncoding(
        *_O200K_RANKS, _O200K, {END_OF_TEXT: 199999, "<|endofprompt|>": 200018}
    ),
    "o200k_harmony": NamedEncoding(*_O200K_RANKS, _O200K, _harmony()),
}


def download_folder() -> Path:
    """The folder of tiktoken's download cache."""
    for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if variable in os.environ:
            return Path(os.environ[variable])
    return Path(tempfile.gettempdir()) / "data-gym-cache"


def fetched_ranks(name: str, encoding: NamedEncoding) -> Ranks:
    """Ranks of a named encoding from tiktoken's cache; nothing is downloaded.

    Raises DataError that names the file if it is missing or has another digest.
    """
    path = download_folder() / hashlib.sha1(encoding.address.encode()).hexdigest()
    fix = (
        f"fetch it where there is a network with python -c 'import tiktoken; "
        f'tiktoken.get_encoding("{name}")\' and copy it there, or name its folder in '
        "TIKTOKEN_CACHE_DIR"
    )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"data.tokenizer.encoding = {name!r}: its rank file, {encoding.address}, is expected "
            f"at {path}, which cannot be read ({error.strerror}); it is not downloaded at run "
            f"time: {fix}"
        ) from error
    if hashlib.sha256(content).hexdigest() != encoding.sha256:
        raise DataError(
            f"data.tokenizer.encoding = {name!r}: {path} is not {encoding.address} (its sha256 "
            f"differs); remove it and {fix}"
        )
    if encoding.address.endswith(".json"):
        return parse_gpt2_vocabulary(path)
    return parse_ranks(content, name=str(path))


def recognised(content: bytes) -> NamedEncoding | None:
    """The named encoding of a rank file by digest; of several, that with fewest special tokens."""
    digest = hashlib.sha256(content).hexdigest()
    of_file = [known for known in NAMED_ENCODINGS.values() if known.sha256 == digest]
    return min(of_file, key=lambda known: len(known.special_tokens), default=None)


Ranks = dict[bytes, int]


def byte_characters() -> list[str]:
    """The character of each byte in byte-level vocabularies, as in GPT-2.

    Printable bytes map to themselves, all remaining bytes to the characters from U+0100 on.
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

    Raises DataError that names the line: it is malformed, or repeats a token or a rank.
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
    """Raise DataError for ranks with which tiktoken would abort the process while encoding."""
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f"{name}: has no token for byte 0x{missing[0]:02x} ({counted(len(missing), 'byte')} "
            "missing); a byte-level vocabulary needs all 256"
        )
    if len(set(ranks.values())) < len(ranks) or min(ranks.values()) < 0:
        raise DataError(
            f"{name}: two tokens have the same rank, or a rank is negative; copy it again"
        )
    return ranks


def written_ranks(ranks: Mapping[bytes, int]) -> bytes:
    """The content of a `.tiktoken` file with these ranks, the lowest first."""
    rows = sorted(ranks.items(), key=lambda row: row[1])
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in rows)
