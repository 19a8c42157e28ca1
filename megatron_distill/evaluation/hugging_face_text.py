"""Text from a Hugging Face folder, written by `transformers` alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_distill.data.tokenizer import load_tokenizer
from megatron_distill.errors import CheckpointError, ConfigError
from megatron_distill.evaluation.generate import Sampling

__all__ = ["write_text"]


@torch.no_grad()
def write_text(folder: Path, prompt: str, sampling: Sampling) -> str:
    """Return prompt and continuation by the model and the tokenizer of a folder.

    The text ends with the model's positions at the latest; the folder says which token ends it,
    and `sampling.eos_id` is not read. Raises CheckpointError, DataError or ConfigError where the
    folder cannot be used or the prompt is empty.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"--hf {folder}: no config.json is there; give a Hugging Face folder, such as "
            "`tools/convert_checkpoint.py export` writes"
        )
    tokenizer = load_tokenizer(folder, named="--hf")
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: transformers cannot load it ({error})") from error
    ids = tokenizer.encode_batch([prompt])[0].tolist()
    if not ids:
        raise ConfigError("--prompt is empty: give at least one character")
    if sampling.max_new_tokens == 0:
        return prompt
    torch.manual_seed(sampling.seed)
    how: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        how = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0,
        }
    room = model.config.max_position_embeddings - len(ids)
    if room <= 0:
        raise ConfigError(f"--prompt has {len(ids)} tokens, the model's positions; shorten it")
    (written,) = model.eval().generate(
        torch.tensor([ids]), max_new_tokens=min(sampling.max_new_tokens, room), **how
    )
    return tokenizer.decode(written.tolist())
