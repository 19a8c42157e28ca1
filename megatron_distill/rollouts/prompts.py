"""The prompts of a file: beginnings of documents, or conversations that wait for a response."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from megatron_distill.data.chat.conversations import (
    ASSISTANT,
    BadConversationError,
    ConversationSpec,
    conversation_of,
    rows_of,
)
from megatron_distill.data.chat.encode import chat_prompt, response_prompts
from megatron_distill.data.formats import FORMATS
from megatron_distill.data.text.files import kind_of
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.data.tokenizers.protocol import begin_token
from megatron_distill.errors import ConfigError, DataError

__all__ = ["MESSAGES", "Prompt", "PromptFile", "PromptTokens"]

MESSAGES: Final = "messages"
_TOOLS: Final = "tools"
# Formats of rows, by the end of a file's name.
_FORMATS: Final = {".jsonl": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}


@dataclass(frozen=True)
class Prompt:
    """What a row asks for: `messages` up to a response, with their tools, or else a `text`.

    row: its number in the file, from 1.
    """

    row: int
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Any, ...] = ()

    def answered(self, response: str) -> dict[str, Any]:
        """Return the row of training data: a document, or a conversation with its response."""
        if self.text is not None:
            return {"text": self.text + response}
        tools = {_TOOLS: list(self.tools)} if self.tools else {}
        return {MESSAGES: [*self.messages, {"role": ASSISTANT, "content": response}], **tools}


@dataclass(frozen=True)
class PromptFile:
    """A JSON Lines, Parquet or Arrow file, each row a prompt.

    A row with `messages` is a conversation, whose last responses are left out. Otherwise the text
    at `key` begins a document or, with `is_chat`, is a user message, after `system` if there is
    one. All rows are of the first row's kind.

    Raises ConfigError where the file is missing or of no such format; the iteration raises
    DataError, with the row, where a prompt cannot be read.
    """

    path: Path
    key: str = "prompt"
    is_chat: bool = False
    system: str | None = None

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise ConfigError(f"--prompts {self.path}: there is no such file; correct the path")
        if self.path.suffix not in _FORMATS:
            raise ConfigError(
                f"--prompts {self.path}: not one of {', '.join(_FORMATS)}; convert it to one"
            )

    def digest(self) -> str:
        """Return the digest of the file's bytes."""
        with self.path.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"

    def __iter__(self) -> Iterator[Prompt]:
        """Yield the prompts in their order."""
        columns = (self.key, MESSAGES, _TOOLS)
        read = FORMATS[_FORMATS[self.path.suffix]].rows
        assert read is not None, "these formats have rows"
        is_conversation: bool | None = None
        for block in read(0, self.path, (), columns):
            for number, content in rows_of(block):
                if isinstance(content, str):
                    raise self._bad(number, content)
                found = self._prompt(number, content)
                if is_conversation is None:
                    is_conversation = found.text is None
                if is_conversation != (found.text is None):
                    first, other = "a conversation", "a text"
                    if not is_conversation:
                        first, other = other, first
                    raise self._bad(number, f"is {other}, and the first row {first}; divide them")
                yield found

    def first(self) -> Prompt:
        """Return the first prompt. Raises ConfigError where there is none; DataError."""
        found = next(iter(self), None)
        if found is None:
            raise ConfigError(f"--prompts {self.path}: it has no row; name another file")
        return found

    def count(self, limit: int | None) -> int:
        """Return the number of prompts, at most `limit`; reads them all. Raises DataError."""
        return sum(1 for _ in islice(iter(self), limit))

    def _prompt(self, row: int, content: Mapping[str, Any]) -> Prompt:
        if content.get(MESSAGES) is not None:
            return self._conversation(row, content)
        text = content.get(self.key)
        if text is None:
            keys = ", ".join(sorted(content)[:10]) or "none"
            raise self._bad(
                row, f"has no {MESSAGES!r} and no {self.key!r} (its keys: {keys}); set --key"
            )
        if not isinstance(text, str):
            raise self._bad(row, f"{self.key!r} is {kind_of(text)}, not text; correct it")
        if not self.is_chat:
            return Prompt(row, text)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return Prompt(row, messages=(*system, {"role": "user", "content": text}))

    def _conversation(self, row: int, content: Mapping[str, Any]) -> Prompt:
        try:
            found = conversation_of(content, ConversationSpec())
        except BadConversationError as error:
            raise self._bad(row, str(error)) from None
        messages = list(found.messages)
        while messages and messages[-1]["role"] == ASSISTANT:
            messages.pop()
        if self.system is not None and messages and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        return Prompt(row, messages=tuple(messages), tools=tuple(found.tools or ()))

    def _bad(self, row: int, reason: str) -> DataError:
        return DataError(f"--prompts {self.path}: row {row}: {reason}")


@dataclass(frozen=True)
class PromptTokens:
    """Turns prompts of one kind into token ids to continue.

    stop_ids: that end a response or a document.
    """

    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    is_conversation: bool
    begin: int | None

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, first: Prompt, *, add_bos: bool | None = None
    ) -> PromptTokens:
        """Return it for the kind of the first prompt.

        Raises ConfigError: the tokenizer has no chat template; DataError: as `begin_token`.
        """
        if first.text is None:
            return cls(tokenizer, chat_prompt(tokenizer, "a").stop_ids, True, None)
        return cls(tokenizer, (tokenizer.eos_id,), False, begin_token(tokenizer, add_bos))

    def __call__(self, prompts: Sequence[Prompt], named: Path) -> list[tuple[int, ...]]:
        """Return the ids of each prompt. Raises DataError with the row of one without any."""
        if self.is_conversation:
            conversations = [(one.messages, one.tools or None) for one in prompts]
            found = response_prompts(
                self.tokenizer, conversations, fault=partial(_refused, prompts, named)
            )
        else:
            begin = () if self.begin is None else (self.begin,)
            texts = self.tokenizer.encode_batch([one.text or "" for one in prompts])
            found = [(*begin, *ids.tolist()) for ids in texts]
        for number, ids in enumerate(found):
            if not ids:
                raise _refused(prompts, named, number, "has no token; remove it")
        return found


def _refused(prompts: Sequence[Prompt], named: Path, number: int, reason: str) -> DataError:
    return DataError(f"--prompts {named}: row {prompts[number].row}: {reason}")
