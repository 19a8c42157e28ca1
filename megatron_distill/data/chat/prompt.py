"""A prompt for a chat model: one user message in the tokenizer's chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_distill.data.chat.conversations import (
    ASSISTANT,
    BadConversationError,
    ConversationSpec,
)
from megatron_distill.data.chat.spans import ResponseFinder
from megatron_distill.data.chat.template import ChatTemplate, chat_template, encode_rendered
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.errors import ConfigError

__all__ = ["Prompt", "chat_prompt", "plain_prompt"]


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, and the ids that end the continuation."""

    ids: tuple[int, ...]
    stop_ids: tuple[int, ...]


def plain_prompt(tokenizer: Tokenizer, text: str) -> Prompt:
    """Return a text as it is; the end-of-document token stops. Raises ConfigError if empty."""
    ids = tokenizer.encode_batch([text])[0].tolist()
    if not ids:
        raise ConfigError("--prompt is empty: give at least one character")
    return Prompt(tuple(ids), (tokenizer.eos_id,))


def chat_prompt(tokenizer: Tokenizer, text: str, *, system: str | None = None) -> Prompt:
    """Return a user message up to the response; the template's end of a turn stops.

    Raises ConfigError: the tokenizer has no chat template, or the template refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"--chat: the tokenizer {tokenizer.name} has no chat template; add a "
            "chat_template.jinja to its folder, or leave --chat out"
        )
    template = chat_template(ConversationSpec(), tokenizer)
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": text})
    try:
        rendered = template.render(messages, None, add_generation_prompt=True)
    except BadConversationError as error:
        raise ConfigError(f"--chat: {tokenizer.name}: {error}") from error
    ids = encode_rendered(tokenizer, [rendered])[0].ids_n.tolist()
    ends = {tokenizer.eos_id, *_ends_of_turn(template, tokenizer, messages)}
    return Prompt(tuple(ids), tuple(sorted(ends)))


def _ends_of_turn(
    template: ChatTemplate, tokenizer: Tokenizer, messages: list[dict[str, Any]]
) -> set[int]:
    """Return the special token that follows a response in a longer conversation, if one does."""
    answer = {"role": ASSISTANT, "content": "yes"}
    following = {"role": "user", "content": "why"}
    try:
        found = ResponseFinder(template).find([*messages, answer, following])
    except BadConversationError:
        return set()
    response = found.text[slice(*found.spans[len(messages)])].rstrip()
    ending = next((marker for marker in template.markers if response.endswith(marker)), None)
    return set() if ending is None else {tokenizer.special_ids[ending]}
