"""Text generation with a language model, token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distill.data.chat.encode import chat_prompt, plain_prompt
from megatron_distill.data.tokenizers.open import Tokenizer, load_tokenizer
from megatron_distill.errors import CheckpointError, ConfigError

__all__ = ["NextLogits", "Sampling", "generate", "sample_next", "write_text"]


NextLogits = Callable[[Tensor], Tensor]
"""`tokens_bs` (int64) -> `logits_bV` (fp32) of the token that follows, over the full vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of the next token.

    `temperature` 0 selects the token with the largest logit (the lowest id among equals). Otherwise
    the token is drawn from softmax(logits / temperature), cut to the smallest set of likeliest
    tokens with a total probability of `top_p`. This is nucleus sampling, arXiv 1904.09751, section
    3.1. `eos_id` and `stop_ids` end the text.

    Raises ConfigError on a value out of range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    eos_id: int | None = None
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens={self.max_new_tokens}: must be 0 or more")
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature}: must be 0 (greedy) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p}: must be above 0 and at most 1")


@torch.no_grad()
def generate(
    next_logits: NextLogits, prompt_bs: Tensor, *, sampling: Sampling, max_context: int
) -> list[list[int]]:
    """Continue each row of `prompt_bs` (int64) and return its new tokens, without the prompt.

    A row ends before `eos_id` or one of `stop_ids`, or after `max_new_tokens`. The model's input is
    the last `max_context` tokens. Rows share one generator, so that a seed gives the same text for
    the same batch.

    Raises CheckpointError if the model's logits are not numbers.
    """
    assert prompt_bs.dim() == 2, prompt_bs.shape
    assert prompt_bs.shape[1] > 0, "a prompt has at least one token"
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens_bs = prompt_bs
    ends = {sampling.eos_id, *sampling.stop_ids}
    written: list[list[int]] = [[] for _ in range(prompt_bs.shape[0])]
    running = [True] * len(written)
    for _ in range(sampling.max_new_tokens):
        logits_bV = next_logits(tokens_bs[:, -max_context:])
        next_b = sample_next(logits_bV, sampling=sampling, generator=generator)
        for row, token in enumerate(next_b.tolist()):
            running[row] = running[row] and token not in ends
            if running[row]:
                written[row].append(token)
        if not any(running):
            break
        tokens_bs = torch.cat([tokens_bs, next_b.to(tokens_bs.device)[:, None]], dim=1)
    return written


def sample_next(logits_bV: Tensor, *, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Choose one token per row of `logits_bV`; returns int64 `[b]` on the CPU.

    A column at minus infinity is never chosen. `generator` is a CPU generator.

    Raises CheckpointError if a row has a NaN or plus infinity, or no finite logit.
    """
    logits_bV = logits_bV.detach().to("cpu", torch.float64)
    peak_b1 = logits_bV.max(dim=-1, keepdim=True).values
    if not bool(torch.isfinite(peak_b1).all()):
        raise CheckpointError(
            "the model's next-token logits are not numbers; its weights are damaged or its"
            " training diverged: choose an earlier checkpoint"
        )
    if sampling.temperature == 0.0:
        return logits_bV.argmax(dim=-1)
    probability_bV = torch.softmax((logits_bV - peak_b1) / sampling.temperature, dim=-1)
    sorted_bV, order_bV = probability_bV.sort(dim=-1, descending=True, stable=True)
    before_bV = sorted_bV.cumsum(dim=-1) - sorted_bV
    sorted_bV = sorted_bV.masked_fill(before_bV >= sampling.top_p, 0.0)
    drawn_b1 = torch.multinomial(sorted_bV, 1, generator=generator)
    return order_bV.gather(-1, drawn_b1)[:, 0]


@torch.no_grad()
def write_text(
    folder: Path,
    prompt: str,
    sampling: Sampling,
    *,
    chat: bool = False,
    system: str | None = None,
) -> str:
    """Return the prompt and its continuation by the model and the tokenizer of a folder.

    With `chat` the prompt is a user message in the tokenizer's chat template, after a `system`
    message if there is one. Only the response is returned then.

    The text ends at the model's maximum positions at the latest. The folder's end-of-document token
    ends it, for `chat` also the end-of-turn token; `sampling.eos_id` is not read. Raises
    CheckpointError, DataError or ConfigError if the folder is unusable or the prompt is empty.
    """
    tokenizer, model = _open_folder(folder)
    opened = chat_prompt(tokenizer, prompt, system=system) if chat else None
    ids = list((opened or plain_prompt(tokenizer, prompt)).ids)
    if sampling.max_new_tokens == 0:
        return "" if chat else prompt
    torch.manual_seed(sampling.seed)
    how: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        how = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0,
        }
    # Rows beyond the tokenizer's ids are padding: never chosen.
    padding = range(tokenizer.vocab_size, model.config.vocab_size)
    if padding:
        how["suppress_tokens"] = list(padding)
    if opened is not None:
        how["eos_token_id"] = list(opened.stop_ids)
    room = model.config.max_position_embeddings - len(ids)
    if room <= 0:
        raise ConfigError(f"--prompt has {len(ids)} tokens, the model's positions; shorten it")
    (written,) = model.eval().generate(
        torch.tensor([ids]), max_new_tokens=min(sampling.max_new_tokens, room), **how
    )
    if opened is None:
        return tokenizer.decode(written.tolist())
    response = written.tolist()[len(ids) :]
    return tokenizer.decode(response[:-1] if response[-1] in opened.stop_ids else response)


def _open_folder(folder: Path) -> tuple[Tokenizer, Any]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"--hf {folder}: no config.json is there; give a Hugging Face folder, such as "
            "`tools/convert_checkpoint.py export` writes"
        )
    tokenizer = load_tokenizer(folder, named="--hf")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: transformers cannot load it ({error})") from error
    return tokenizer, model
