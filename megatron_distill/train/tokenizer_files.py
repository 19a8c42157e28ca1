"""The files of a tokenizer, written where a run, a store or an export loads it from."""

from __future__ import annotations

from pathlib import Path

from megatron_distill.data.tokenizers.open import (
    OTHER_KINDS_FOLDER,
    HuggingFaceTokenizer,
    Tokenizer,
    holds_tokenizer,
    is_hugging_face,
    load_tokenizer,
)
from megatron_distill.models.hugging_face.assets import TOKENIZER_FILES, copy_tokenizer

__all__ = ["copy_model_tokenizer", "keep_with_model", "tokenizer_bytes", "write_tokenizer"]


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer, byte for byte where its files are known; raises OSError."""
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.folder is not None:
        copy_tokenizer(tokenizer.folder, folder)
    else:
        tokenizer.save(folder)


def keep_with_model(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer into a model's folder under construction; raises OSError.

    A tokenizer without files for `transformers` gets a subfolder, beside a tokenizer of the same
    ids that the model may have brought.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        if tokenizer.folder is None:
            tokenizer.hugging_face.save_pretrained(folder)
        else:
            copy_tokenizer(tokenizer.folder, folder)
    else:
        tokenizer.save(folder / OTHER_KINDS_FOLDER)


def copy_model_tokenizer(source: Path, destination: Path) -> None:
    """Copy the tokenizer of a model's folder, if it has one, into another model's folder.

    Raises OSError, and DataError for a damaged one without files for `transformers`.
    """
    if is_hugging_face(source):
        copy_tokenizer(source, destination)
    elif holds_tokenizer(source):
        keep_with_model(load_tokenizer(source), destination)


def tokenizer_bytes(folder: Path) -> int:
    """Upper bound on the bytes of the tokenizer of a model's folder."""
    own = {folder / name for name in TOKENIZER_FILES}
    for place in (folder, folder / OTHER_KINDS_FOLDER):
        own |= {*place.glob("*.model"), *place.glob("*.tiktoken*")}
    return sum(path.stat().st_size for path in own if path.is_file())
