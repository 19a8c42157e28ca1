"""The prompts of a file: beginnings of documents, or conversations that wait for a response."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from megatron_distill.data.chat.conversations import (
    ASSISTANT,
    SYSTEM_ROLES,
    BadConversationError,
    ConversationSpec,
    Row,
    conversation_of,
    rows_of,
)
from megatron_distill.data.chat.encode import chat_prompt, response_prompts
from megatron_distill.data.formats import FORMATS
from megatron_distill.data.text.files import kind_of, table_columns
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.data.tokenizers.protocol import begin_token, encoded_or_refused
from megatron_distill.errors import ConfigError, DataError

__all__ = ["Prompt", "PromptFile", "PromptTokens"]

_MESSAGES: Final = "messages"
_TOOLS: Final = "tools"
# Formats of rows, by the end of a file's name.
_FORMATS: Final = {".jsonl": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}


@dataclass(frozen=True)
class Prompt:
    """A row's prompt: `messages` up to a response, with their tools, or else a `text`.

    row: its number in the file, from 1. weights: of the messages in a loss, which their training
    data keep; none: all are 1.
    """

    row: int
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Any, ...] = ()
    weights: tuple[float, ...] = ()

    def answered(self, response: str) -> dict[str, Any]:
        """Return the row of training data: a document, or a conversation with its response."""
        if self.text is not None:
            return {"text": self.text + response}
        tools = {_TOOLS: list(self.tools)} if self.tools else {}
        weights = self.weights or (1.0,) * len(self.messages)
        messages = [
            dict(message) if weight == 1 else {**message, "weight": weight}
            for message, weight in zip(self.messages, weights, strict=True)
        ]
        return {_MESSAGES: [*messages, {"role": ASSISTANT, "content": response}], **tools}


@dataclass(frozen=True)
class PromptFile:
    """A JSON Lines, Parquet or Arrow file, each row a prompt.

    A row with `messages` is a conversation, whose last responses are left out. Otherwise the text
    at `key` begins a document or, with `is_chat`, is a user message, after `system` if there is
    one. All rows are of the first row's kind.

    Raises ConfigError where the file is missing or of no such format; reading raises DataError,
    with the row, where it is not a prompt.
    """

    path: Path
    key: str = "prompt"
    is_chat: bool = False
    system: str | None = None

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise ConfigError(
                f"--prompts {self.path}: there is no such file; name one of {', '.join(_FORMATS)}"
            )
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
        return map(self.prompt, self.rows())

    def rows(self) -> Iterator[Row]:
        """Yield the rows in their order, as they are."""
        columns = (self.key, _MESSAGES, _TOOLS)
        read = FORMATS[_FORMATS[self.path.suffix]].rows
        assert read is not None, "these formats have rows"
        for block in read(0, self.path, (), columns):
            yield from rows_of(block)

    def first(self) -> Prompt:
        """Return the first prompt. Raises ConfigError where there is none; DataError."""
        found = next(iter(self), None)
        if found is None:
            raise ConfigError(f"--prompts {self.path}: it has no row; name another file")
        return found

    def count(self, limit: int | None) -> int:
        """Return the number of rows, at most `limit`. Raises DataError for a row without a prompt.

        Reads all of them.
        """
        count, is_conversation = 0, self.first().text is None
        for found in islice(iter(self), limit):
            count += 1
            if is_conversation != (found.text is None):
                kinds = ("a text", "a conversation")
                raise self._bad(
                    found.row,
                    f"is {kinds[not is_conversation]}, and the first row {kinds[is_conversation]}; "
                    "divide them over two files",
                )
        return count

    def prompt(self, row: Row) -> Prompt:
        """Return what a row asks for. Raises DataError with the row."""
        number, content = row
        if isinstance(content, str):
            raise self._bad(number, content)
        if content.get(_MESSAGES) is not None:
            return self._conversation(number, content)
        text = content.get(self.key)
        if text is None and self.key in content:
            raise self._bad(number, f"{self.key!r} is null; correct or remove the row")
        if text is None:
            is_table = _FORMATS[self.path.suffix] in ("parquet", "arrow")
            known = table_columns(self.path) if is_table else content
            keys = ", ".join(sorted(known)[:10]) or "nothing"
            raise self._bad(
                number,
                f"has no {_MESSAGES!r} and no {self.key!r} (it has: {keys}); name the column of "
                f"the text by --key, or rename that of the messages to {_MESSAGES!r}",
            )
        if not isinstance(text, str):
            raise self._bad(number, f"{self.key!r} is {kind_of(text)}, not text; correct it")
        if self.is_chat:
            return Prompt(number, messages=(*self._system(), {"role": "user", "content": text}))
        if self.system is not None:
            raise self._bad(number, "is a text, and --system a message of a chat; add --chat")
        return Prompt(number, text)

    def _system(self) -> list[dict[str, Any]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _conversation(self, row: int, content: Mapping[str, Any]) -> Prompt:
        # Messages before the first prompt stay: nothing is trained here.
        spec = ConversationSpec(leading_assistant="keep")
        try:
            found = conversation_of(content, spec)
            json.dumps([found.messages, found.tools], ensure_ascii=False).encode()
        except BadConversationError as error:
            # Its remedy is a key of a data source.
            reason = str(error).partition(";")[0]
            raise self._bad(row, f"{reason}; give messages with `role` and `content`") from None
        except (TypeError, UnicodeEncodeError) as error:
            raise self._bad(row, f"its messages are not JSON ({error}); correct them") from None
        messages, weights = list(found.messages), list(found.weights)
        while messages and messages[-1]["role"] == ASSISTANT:
            messages.pop()
            weights.pop()
        if all(one["role"] in (ASSISTANT, *SYSTEM_ROLES) for one in messages):
            raise self._bad(row, "asks nothing: it has no message of a user or a tool; add one")
        if messages[0]["role"] not in SYSTEM_ROLES:
            before = self._system()
            messages, weights = [*before, *messages], [1.0] * len(before) + weights
        tools = tuple(found.tools or ())
        if set(weights) == {1.0}:
            weights = []
        return Prompt(row, messages=tuple(messages), tools=tools, weights=tuple(weights))

    def _bad(self, row: int, reason: str) -> DataError:
        return DataError(f"--prompts {self.path}: row {row}: {reason}")


@dataclass(frozen=True)
class PromptTokens:
    """Turns prompts of one kind into token ids to continue.

    stop_ids: that end a response or a document. begin: the id before a document, None: none.
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
        if first.text is not None:
            return cls(tokenizer, tokenizer.end_ids, False, begin_token(tokenizer, add_bos))
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"--prompts has conversations, and the tokenizer {tokenizer.name} has no chat "
                "template; add a chat_template.jinja to its folder, or give rows with a text"
            )
        return cls(tokenizer, chat_prompt(tokenizer, "a").stop_ids, True, None)

    @property
    def identity(self) -> dict[str, Any]:
        """All that determines the ids of a prompt and the end of its text."""
        template = self.tokenizer.chat_template if self.is_conversation else None
        digest = None if template is None else hashlib.sha256(str(template).encode()).hexdigest()
        stops = list(self.stop_ids)
        tokenizer = self.tokenizer.identity
        return {
            "tokenizer": tokenizer, "chat_template": digest, "begin": self.begin, "stop_ids": stops,
        }  # fmt: skip

    def __call__(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...] | str]:
        """Return the ids of each prompt, or why it has none."""
        if self.is_conversation:
            conversations = [([*map(dict, one.messages)], list(one.tools)) for one in prompts]
            return response_prompts(
                self.tokenizer, [(messages, tools or None) for messages, tools in conversations]
            )
        begin = () if self.begin is None else (self.begin,)
        found: list[tuple[int, ...] | str] = []
        for ids in encoded_or_refused(self.tokenizer, [one.text or "" for one in prompts]):
            if isinstance(ids, DataError):
                found.append(str(ids))
            else:
                found.append((*begin, *ids.tolist()) or "it has no token")
        return found
