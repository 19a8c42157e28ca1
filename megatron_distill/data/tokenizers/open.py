"""Tokenizers by path: a Hugging Face folder, a SentencePiece model, or tiktoken ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron_distill.data.tokenizers.hugging_face import (
    SMALLEST_BPE,
    HuggingFaceTokenizer,
    open_hugging_face,
    train_bpe,
)
from megatron_distill.data.tokenizers.protocol import (
    END_OF_TEXT,
    Encoding,
    Tokenizer,
    read_json_object,
)
from megatron_distill.data.tokenizers.sentencepiece_model import MODEL_FILE, open_sentencepiece
from megatron_distill.data.tokenizers.tiktoken_bpe import (
    has_rules,
    open_named_encoding,
    open_tiktoken_file,
)
from megatron_distill.errors import FROM_THE_HUB, ConfigError, DataError
from megatron_distill.log import get_logger

__all__ = [
    "END_OF_TEXT",
    "GENERATION_FILE",
    "OTHER_KINDS_FOLDER",
    "SMALLEST_BPE",
    "Encoding",
    "HuggingFaceTokenizer",
    "Tokenizer",
    "Vocabulary",
    "add_ends",
    "end_ids",
    "holds_tokenizer",
    "is_hugging_face",
    "load_tokenizer",
    "open_named_encoding",
    "require_same_ids",
    "train_bpe",
    "trained_in",
]

_LOGGER = get_logger(__name__)
_OTHER_TOKENIZER: Final = (
    ", or terms with `alignment` for a teacher with another one (docs/cross_tokenizer.md)"
)
GENERATION_FILE: Final = "generation_config.json"
# Folder inside a model's folder for a tokenizer that `transformers` cannot read.
OTHER_KINDS_FOLDER: Final = "tokenizer"
_HUGGING_FACE_FILES: Final = ("tokenizer.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's facts for every rank; only the first rank has the tokenizer itself."""

    size: int
    identity: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """The facts of a tokenizer."""
        return cls(tokenizer.vocab_size, tokenizer.identity)


def is_hugging_face(folder: Path) -> bool:
    """Whether `transformers` reads a folder's tokenizer.

    A bare tokenizer.model does not count: `transformers` would leave out its normalisation.
    """
    if any((folder / name).is_file() for name in _HUGGING_FACE_FILES):
        return True
    return (folder / MODEL_FILE).is_file() and (folder / "tokenizer_config.json").is_file()


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder holds files that `load_tokenizer` reads."""
    if is_hugging_face(folder) or any(folder.glob("*.model")):
        return True
    if any(has_rules(path) for path in folder.glob("*.tiktoken")):
        return True
    return (folder / OTHER_KINDS_FOLDER).is_dir() and holds_tokenizer(folder / OTHER_KINDS_FOLDER)


def load_tokenizer(path: str | Path, *, named: str = "data.tokenizer.path") -> Tokenizer:
    """The tokenizer of a folder, a `.model` or a `.tiktoken` file; nothing is downloaded.

    `named` is the configuration key or option that error messages name.

    In a folder Hugging Face files come first, then a single `.model` or `.tiktoken` file, then the
    subfolder `tokenizer`. Generation settings in the folder add to the tokens that end a text.
    Raises DataError if there is no tokenizer or more than one, a file is malformed, or there is no
    end-of-document token.
    """
    path = Path(path).expanduser()
    found = _open_file(path, named) if path.is_file() else _open_folder(path, named)
    add_ends(found, end_ids(path.parent if path.is_file() else path))
    return found


def add_ends(tokenizer: Tokenizer, ids: Iterable[int]) -> None:
    """Add ids of its vocabulary to a tokenizer's `end_ids`; `eos_id` stays the first."""
    more = {one for one in ids if 0 <= one < tokenizer.vocab_size} - {tokenizer.eos_id}
    own = set(tokenizer.end_ids) - {tokenizer.eos_id}
    tokenizer.end_ids = (tokenizer.eos_id, *sorted(own | more))


def end_ids(folder: Path) -> tuple[int, ...]:
    """Return the tokens that end a text by a folder's generation settings; none without them.

    Raises DataError: the file is damaged.
    """
    path = folder / GENERATION_FILE
    if not path.is_file():
        return ()
    found = read_json_object(path, advice="replace or remove the file").get("eos_token_id")
    numbers = found if isinstance(found, list) else [found]
    return tuple(one for one in numbers if isinstance(one, int) and not isinstance(one, bool))


def _open_folder(path: Path, named: str) -> Tokenizer:
    if not path.is_dir():
        train = ", or data.tokenizer.train_vocab_size to train one" if "." in named else ""
        raise DataError(
            f"{path}: no such folder; set {named} to a folder with a tokenizer.json, a .model or a "
            f".tiktoken file ({FROM_THE_HUB}){train}"
        )
    if is_hugging_face(path):
        return open_hugging_face(path)
    files = sorted([*path.glob("*.model"), *path.glob("*.tiktoken")])
    if len(files) > 1:
        found = ", ".join(file.name for file in files)
        raise DataError(f"{path}: contains {found}; set {named} to one of these files")
    if files:
        return _open_file(files[0], named)
    if (path / OTHER_KINDS_FOLDER).is_dir():
        return _open_folder(path / OTHER_KINDS_FOLDER, named)
    raise DataError(
        f"{path}: contains none of {', '.join(_HUGGING_FACE_FILES)}, no .model and no .tiktoken "
        f"file; set {named} to the folder or file of a tokenizer"
    )


def require_same_ids(tokenizer: Tokenizer, folder: str, *, named: str) -> None:
    """Raise ConfigError where the tokenizer in a model's folder has a different id for a token.

    `named` is the configuration key of the folder; it may have no tokenizer to compare.
    """
    if not holds_tokenizer(Path(folder).expanduser()):
        return
    ids = load_tokenizer(folder).vocabulary()
    for token, number in tokenizer.vocabulary().items():
        if ids.get(token) != number:
            other = f"id {ids[token]}" if token in ids else "no id"
            raise ConfigError(
                f"{named} = {folder!r}: its tokenizer encodes {token!r} as {other}, "
                f"data.tokenizer as {number}; use one tokenizer for data and models"
                + (_OTHER_TOKENIZER if named.startswith("teacher") else "")
            )


def trained_in(
    folder: Path, texts: Callable[[], Iterable[str]], *, vocab_size: int, output: str
) -> Tokenizer:
    """Return the tokenizer that an earlier start saved in a folder, or train and save one there.

    Raises DataError, or ConfigError where the folder, which is within `output`, cannot be written.
    """
    if (folder / "tokenizer.json").is_file():
        _LOGGER.info("using the tokenizer of an earlier start: %s", folder)
        return load_tokenizer(folder)
    tokenizer = train_bpe(texts(), vocab_size=vocab_size)
    try:
        for leftover in folder.parent.glob(f"{folder.name}.partial-*"):
            shutil.rmtree(leftover)
        tokenizer.save(folder)
    except OSError as error:
        raise ConfigError(
            f"{output}: cannot keep the tokenizer there ({error.strerror}); free disk space "
            "or name another folder"
        ) from error
    _LOGGER.info("trained a tokenizer of %d tokens: %s", tokenizer.vocab_size, folder)
    return tokenizer


def _open_file(path: Path, named: str) -> Tokenizer:
    if path.suffix == ".model":
        return open_sentencepiece(path)
    if path.suffix == ".tiktoken":
        return open_tiktoken_file(path)
    raise DataError(
        f"{path}: is a file, not a folder, and neither .model nor .tiktoken; set {named} to a "
        "tokenizer's folder or to such a file"
    )
