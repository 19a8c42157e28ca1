"""The files that a run copies for a later export of its student as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_distill.config import RunConfig
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.errors import ConfigError
from megatron_distill.models.hugging_face.assets import (
    ASSETS_FOLDER,
    CONFIG_FILE,
    copy_assets,
)
from megatron_distill.runtime.atomic_files import whole_folder
from megatron_distill.train.checkpoint.folder import assets_of, resolve_checkpoint
from megatron_distill.train.tokenizer_files import keep_with_model


def keep_assets(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Copy configuration, generation settings and tokenizer into the run's folder; on one rank.

    Raises ConfigError where they cannot be written. An earlier start's copy is not replaced.
    """
    folder = Path(config.output) / ASSETS_FOLDER
    if folder.is_dir():
        return
    try:
        with whole_folder(folder) as partial:
            source = _source(config)
            if source is not None and source.is_dir():
                copy_assets(source, partial)
            keep_with_model(tokenizer, partial)
            if not (partial / CONFIG_FILE).is_file():
                (partial / CONFIG_FILE).write_text(json.dumps(_special_tokens(tokenizer)) + "\n")
    except OSError as error:
        raise ConfigError(
            f"output={config.output}: cannot keep the tokenizer there ({error.strerror}); free "
            "disk space or change `output`"
        ) from error


def _source(config: RunConfig) -> Path | None:
    """Return the Hugging Face folder of the student's initial weights."""
    if config.student.hf is not None:
        return Path(config.student.hf).expanduser()
    if config.student.checkpoint is not None:
        return assets_of(resolve_checkpoint(config.student.checkpoint))
    return None


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int | None]:
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
