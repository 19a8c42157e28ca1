"""Tokenizers by path: a Hugging Face folder, a SentencePiece model, or tiktoken ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from megatron_distill.data.tokenizers.hugging_face import (
    SMALLEST_BPE,
    HuggingFaceTokenizer,
    open_hugging_face,
    train_bpe,
)
from megatron_distill.data.tokenizers.protocol import END_OF_TEXT, Encoding, Tokenizer
from megatron_distill.data.tokenizers.sentencepiece_model import MODEL_FILE, open_sentencepiece
from megatron_distill.data.tokenizers.tiktoken_bpe import (
    has_rules,
    open_named_encoding,
    open_tiktoken_file,
)
from megatron_distill.errors import DataError

__all__ = [
    "END_OF_TEXT",
    "OTHER_KINDS_FOLDER",
    "SMALLEST_BPE",
    "Encoding",
    "HuggingFaceTokenizer",
    "Tokenizer",
    "holds_tokenizer",
    "is_hugging_face",
    "load_tokenizer",
    "open_named_encoding",
    "train_bpe",
]

# Folder inside a model's folder for a tokenizer that `transformers` cannot read.
OTHER_KINDS_FOLDER: Final = "tokenizer"
_HUGGING_FACE_FILES: Final = ("tokenizer.json", "vocab.json", "vocab.txt")


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
    subfolder `tokenizer`. Raises DataError if there is no tokenizer or more than one, a file is
    malformed, or there is no end-of-document token.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return _open_file(path, named)
    if not path.is_dir():
        train = ", or data.tokenizer.train_vocab_size to train one" if "." in named else ""
        raise DataError(
            f"{path}: no such folder; set {named} to a folder with a tokenizer.json, a .model or a "
            f".tiktoken file{train}"
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
        return load_tokenizer(path / OTHER_KINDS_FOLDER, named=named)
    raise DataError(
        f"{path}: contains none of {', '.join(_HUGGING_FACE_FILES)}, no .model and no .tiktoken "
        f"file; set {named} to the folder or file of a tokenizer"
    )


def _open_file(path: Path, named: str) -> Tokenizer:
    if path.suffix == ".model":
        return open_sentencepiece(path)
    if path.suffix == ".tiktoken":
        return open_tiktoken_file(path)
    raise DataError(
        f"{path}: is a file, not a folder, and neither .model nor .tiktoken; set {named} to a "
        "tokenizer's folder or to such a file"
    )
