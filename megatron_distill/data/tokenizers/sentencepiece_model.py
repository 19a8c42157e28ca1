"""Tokenizers of the sentencepiece library, from a `.model` file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from megatron_distill.data.tokenizers.protocol import (
    CHAT_TEMPLATE_FILE,
    NO_TOKEN,
    Encoding,
    check_texts,
    decode_around,
    read_chat_template,
)
from megatron_distill.errors import DataError
from megatron_distill.runtime.atomic_files import whole_folder

MODEL_FILE: Final = "tokenizer.model"
_SPACES: Final = ("\N{LOWER ONE EIGHTH BLOCK}", " ")  # spellings of a space in normalised text


class SentencePieceTokenizer:
    """A SentencePiece model: BPE, unigram, word or character.

    Control symbols are never encoded from a text, user-defined symbols are. Lossless if the model
    normalises nothing and falls back to bytes, except that U+2581 in a text decodes as a space.
    """

    reads_special_tokens = False
    adds_bos = False  # the file does not tell

    def __init__(self, model: bytes, *, name: str, chat_template: str | None = None) -> None:
        self.name = name
        self.chat_template = chat_template
        self._model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError) as error:
            raise DataError(f"{name}: not a SentencePiece model; copy it again") from error
        self.vocab_size = self._processor.get_piece_size()
        numbers = range(self.vocab_size)
        self._pieces: list[str] = [self._processor.id_to_piece(number) for number in numbers]
        is_control = [self._processor.is_control(number) for number in numbers]
        self._is_byte_V = np.array([self._processor.is_byte(number) for number in numbers])
        self._control = {number: self._pieces[number] for number in numbers if is_control[number]}
        self.special_ids = {
            self._pieces[number]: number
            for number in numbers
            if is_control[number] or self._processor.is_unknown(number)
        }
        unknown = self._processor.unk_id()
        self.unknown_id = None if unknown < 0 or self._is_byte_V.any() else unknown
        if self._processor.eos_id() < 0:
            raise DataError(
                f"{name}: the SentencePiece model has no end-of-document token; train it with an "
                "eos_id that is not negative"
            )
        self.eos_id = self._processor.eos_id()
        self.end_ids: tuple[int, ...] = (self.eos_id,)
        self.bos_id = _id_or_none(self._processor.bos_id())
        self.pad_id = _id_or_none(self._processor.pad_id())
        self._puts_space_first = self._processor.normalize("a").startswith(_SPACES)
        self.identity = hashlib.sha256(b"sentencepiece" + model).hexdigest()[:16]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids of each text, int32, without special tokens before or after.

        Raises DataError for a text with half a surrogate pair.
        """
        rows = self._processor.encode(
            check_texts(texts, self.name), out_type=int, num_threads=os.cpu_count() or 1
        )
        return [np.array(row, dtype=np.int32) for row in rows]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoding]:
        """Token ids of each text as from `encode_batch`, with the character span of each token.

        The space that the model adds before or after a text covers no character. Characters that
        the normalisation removes belong to no token, or to the neighbour that it assigns them to.
        """
        texts = check_texts(texts, self.name)
        rows = self.encode_batch(texts)
        pieces = self._processor.encode(texts, out_type=str, num_threads=os.cpu_count() or 1)
        normalised = self._processor.normalize(texts, with_offsets=True)
        return [
            self._encoding(ids_n, spelled, *found)
            for ids_n, spelled, found in zip(rows, pieces, normalised, strict=True)
        ]

    def _encoding(
        self, ids_n: NDArray[np.int32], pieces: Sequence[str], text: str, origins: Sequence[int]
    ) -> Encoding:
        """Character spans of tokens; character i of the normalised `text` begins at origins[i].

        Characters with the same origin come from the same characters of the input (`fi` from its
        ligature), which end at the next origin.
        """
        starts_c = np.array(origins, np.int32)
        after_c = np.searchsorted(starts_c, starts_c, side="right").clip(max=len(text))
        stops_c = starts_c[after_c]
        if self._puts_space_first and text:
            stops_c[0] = starts_c[1]
        lengths_n = np.array([len(piece.encode()) for piece in pieces], np.int64)
        lengths_n[self._is_byte_V[ids_n]] = 1
        stops_byte_n = np.cumsum(lengths_n)
        leads_b = (np.frombuffer(text.encode(), np.uint8) & 0xC0) != 0x80
        assert len(leads_b) == lengths_n.sum(), "the tokens spell the normalised text"
        character_b = np.cumsum(leads_b) - 1
        first_n = character_b[stops_byte_n - lengths_n]
        last_n = character_b[stops_byte_n - 1]
        return Encoding(ids_n, starts_c[first_n], stops_c[last_n])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, control symbols spelled out, U+FFFD for ids without text."""

        def spelled(number: int) -> str | None:
            if 0 <= number < self.vocab_size:
                return self._control.get(number)
            return NO_TOKEN

        return decode_around(ids, decode_run=self._decode_run, spelled=spelled)

    def _decode_run(self, ids: list[int]) -> str:
        text: str = self._processor.decode(ids)
        return text

    def vocabulary(self) -> dict[str, int]:
        """Piece and id of every token."""
        return {piece: number for number, piece in enumerate(self._pieces)}

    def token_bytes(self) -> list[bytes | None]:
        """The bytes that each id stands for inside a running text; None for special tokens.

        U+2581 in a piece is a space. An unused piece is in no text.
        """
        special = frozenset(self.special_ids.values())
        found: list[bytes | None] = []
        for number, piece in enumerate(self._pieces):
            if number in special or self._processor.is_unused(number):
                found.append(None)
            elif self._is_byte_V[number]:
                found.append(bytes([int(piece[3:5], 16)]))  # <0x0A>
            else:
                found.append(piece.replace(_SPACES[0], _SPACES[1]).encode())
        return found

    def save(self, folder: Path) -> None:
        """Write the unchanged model; the folder appears under its name only when complete."""
        with whole_folder(folder, replaces=True) as partial:
            (partial / MODEL_FILE).write_bytes(self._model)
            if self.chat_template is not None:
                (partial / CHAT_TEMPLATE_FILE).write_text(self.chat_template, encoding="utf-8")


def _id_or_none(number: int) -> int | None:
    return number if number >= 0 else None


def open_sentencepiece(path: Path) -> SentencePieceTokenizer:
    """The tokenizer of a `.model` file, with the chat template beside it.

    Raises DataError if the file is not a SentencePiece model or has no end-of-document token.
    """
    try:
        model = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not model:
        raise DataError(f"{path}: the file is empty; copy the SentencePiece model again")
    first = model.partition(b"\n")[0].split()
    if len(first) == 2 and first[1].isdigit():
        raise DataError(
            f"{path}: contains tiktoken ranks, not a SentencePiece model; name it .tiktoken, with "
            f"{path.stem}.tiktoken.json next to it"
        )
    return SentencePieceTokenizer(
        model, name=str(path), chat_template=read_chat_template(path.parent)
    )
