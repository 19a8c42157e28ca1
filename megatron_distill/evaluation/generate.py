"""Text that `transformers` writes with the model of a folder, to compare with."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_distill.data.chat.encode import chat_prompt, plain_prompt
from megatron_distill.data.tokenizers.open import Tokenizer, load_tokenizer
from megatron_distill.errors import CheckpointError, ConfigError
from megatron_distill.models.generation import Sampling

__all__ = ["write_text"]


@torch.no_grad()
def write_text(
    folder: Path,
    prompt: str,
    sampling: Sampling,
    *,
    tokens: int,
    chat: bool = False,
    system: str | None = None,
    stops: tuple[str, ...] = (),
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> str:
    """Return the prompt and at most `tokens` more by the model and the tokenizer of a folder.

    With `chat` the prompt is a user message in the tokenizer's chat template, after a `system`
    message if there is one. Only the response is returned then.

    The text ends at the model's maximum positions at the latest. The tokenizer's `end_ids`
    end it, for `chat` also the end-of-turn token, or the first of `stops`. Raises CheckpointError,
    DataError or ConfigError if the folder is unusable or the prompt is empty.
    """
    tokenizer, model = _open_folder(folder, dtype)
    opened = (
        chat_prompt(tokenizer, prompt, system=system) if chat else plain_prompt(tokenizer, prompt)
    )
    ids = list(opened.ids)
    if tokens == 0:
        return "" if chat else prompt
    torch.manual_seed(sampling.seed)
    how: dict[str, Any] = {"do_sample": False, "eos_token_id": list(opened.stop_ids)}
    if sampling.temperature > 0:
        how |= {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": sampling.min_p or None,
        }
    # Rows beyond the tokenizer's ids are padding: never chosen.
    padding = range(tokenizer.vocab_size, model.config.vocab_size)
    if padding:
        how["suppress_tokens"] = list(padding)
    room = model.config.max_position_embeddings - len(ids)
    if room <= 0:
        raise ConfigError(f"--prompt has {len(ids)} tokens, the model's positions; shorten it")
    given = torch.tensor([ids], device=device)
    try:
        model = model.to(device).eval()
        (written,) = model.generate(given, max_new_tokens=min(tokens, room), **how)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--transformers writes on one GPU, which {folder} does not fit; set "
            "CUDA_VISIBLE_DEVICES= (empty) to write on the CPU"
        ) from error
    response = written.tolist()[len(ids) :]
    if response[-1] in opened.stop_ids:
        response.pop()
    # A decoder may drop a space before the first id: the prompt's ids come before it.
    before = "" if chat else tokenizer.decode(opened.text_ids)
    text = tokenizer.decode(response if chat else [*opened.text_ids, *response])
    ends = [place for stop in stops if (place := text.find(stop, len(before))) >= 0]
    return text[: min(ends, default=len(text))]


def _open_folder(folder: Path, dtype: torch.dtype) -> tuple[Tokenizer, Any]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"--hf {folder}: no config.json is there; give a Hugging Face folder, such as "
            "`megatron-distill convert export` writes"
        )
    with _load_errors(folder):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    tokenizer = load_tokenizer(folder, named="--hf")
    with _load_errors(folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, local_files_only=True
        )
    return tokenizer, model


@contextmanager
def _load_errors(folder: Path) -> Iterator[None]:
    """Raise what `transformers` raises for a damaged or unknown folder as CheckpointError."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        pickle.UnpicklingError,
        SafetensorError,
        StrictDataclassError,
    ) as error:
        # The first sentence says what is wrong; further ones propose changes to a program.
        reason = " ".join(str(error).split()).partition(". ")[0].removesuffix(".")
        raise CheckpointError(
            f"{folder}: transformers cannot load it ({reason}); download or export it again"
        ) from error
