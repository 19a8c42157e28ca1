"""The files of a tokenizer and of a later export, written where a run or a store needs them."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_distill.data.tokenizers.open import (
    OTHER_KINDS_FOLDER,
    HuggingFaceTokenizer,
    Tokenizer,
    holds_tokenizer,
    is_hugging_face,
    load_tokenizer,
)
from megatron_distill.errors import ConfigError
from megatron_distill.models.hugging_face.assets import (
    ASSETS_FOLDER,
    CONFIG_FILE,
    TOKENIZER_FILES,
    copy_assets,
    copy_tokenizer,
)
from megatron_distill.runtime.atomic_files import whole_folder

__all__ = [
    "copy_model_tokenizer",
    "keep_assets",
    "keep_with_model",
    "tokenizer_bytes",
    "write_tokenizer",
]


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


def keep_assets(output: str, source: Path | None, tokenizer: Tokenizer) -> None:
    """Write what an export of a run's student needs into the run's folder `output`; on one rank.

    These are the tokenizer, and configuration and generation settings from `source`, the Hugging
    Face folder of the student's initial weights. An earlier start's copy is not replaced. Raises
    ConfigError where they cannot be written.
    """
    folder = Path(output) / ASSETS_FOLDER
    if folder.is_dir():
        return
    try:
        with whole_folder(folder) as partial:
            if source is not None and source.is_dir():
                copy_assets(source, partial)
            keep_with_model(tokenizer, partial)
            if not (partial / CONFIG_FILE).is_file():
                (partial / CONFIG_FILE).write_text(json.dumps(_special_tokens(tokenizer)) + "\n")
    except OSError as error:
        raise ConfigError(
            f"output={output}: cannot keep the tokenizer there ({error.strerror}); free "
            "disk space or change `output`"
        ) from error


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int | None]:
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
