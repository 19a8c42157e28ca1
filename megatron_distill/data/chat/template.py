"""Chat templates: messages to text, exactly as transformers renders them.

Templates differ on the form of messages: missing content, arguments of tool calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np

from megatron_distill.data.chat.conversations import (
    ASSISTANT,
    PLAIN_TEMPLATE,
    TOKENIZER_TEMPLATE,
    BadConversationError,
    ConversationSpec,
)
from megatron_distill.data.tokenizers.protocol import Encoding, Tokenizer
from megatron_distill.errors import DataError

_OPEN, _CLOSE = "\ue000", "\ue001"  # private-use characters around placeholders for contents
_FURTHER: Final = range(0xE004, 0xF900)  # beside texts that contain the first, as of icon fonts
_NULLS: Final = ("None", "null")  # the spellings of null in Jinja and JSON

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Any] | None


class UnwrittenError(BadConversationError):
    """The template leaves out a response's content or tool calls; `reason` lacks the advice."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}; set data.sources.conversation.chat_template to a Jinja file that does"
        )
        self.reason = reason


def mark_of(index: int, *, beside: str = "") -> str:
    """A placeholder for a message's content that does not occur in the text `beside` it."""
    further = (chr(code) for code in _FURTHER)
    opening = next((one for one in (_OPEN, *further) if one not in beside), _OPEN)
    return f"{opening}{index}{_CLOSE}"


def responses(messages: Messages) -> list[int]:
    """The messages that the assistant writes."""
    return [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]


def message_forms(messages: Messages) -> Iterator[Messages]:
    """Yield the messages unchanged, then with tool calls in the forms that some templates need.

    Missing content beside a tool call is null or "". Arguments are an object or its JSON text.
    """
    yield messages
    if not any(message.get("tool_calls") for message in messages):
        return
    contents = [_with_empty(messages, None), _with_empty(messages, "")]
    others = [one for one in contents if one != messages]
    yield from others
    for one in (messages, *others):
        yield [_with_arguments(message, _json_text) for message in one]


def writes_null(template: ChatTemplate, messages: Messages, tools: Tools, text: str) -> bool:
    """Whether a template writes "None" or "null" for a message without content.

    text: the rendered messages. True if "" in place of null renders with fewer such words.
    """
    if all(message.get("content") is not None for message in messages):
        return False
    try:
        other = template.render(_with_empty(messages, ""), tools)
    except BadConversationError:
        return False
    return any(text.count(word) > other.count(word) for word in _NULLS)


def check_written(template: ChatTemplate, messages: Messages, tools: Tools) -> None:
    """Raise UnwrittenError if the template leaves out a response's tool calls, or its text.

    Content beside tool calls may be left out: Llama 3.1 renders only the calls of such a turn.
    """
    marks: dict[int, list[str]] = {}
    changed: list[Mapping[str, Any]] = list(messages)
    for index in responses(messages):
        changed[index], marks[index] = _marked(messages[index], index)
    try:
        text = template.render(changed, tools)
    except BadConversationError:
        return  # the template parses contents, so placeholders cannot be rendered
    for index, wanted in marks.items():
        if any(mark not in text for mark in wanted):
            part = "tool calls" if messages[index].get("tool_calls") else "content"
            raise UnwrittenError(f"message {index}: the chat template does not write its {part}")


def _marked(message: Mapping[str, Any], index: int) -> tuple[Mapping[str, Any], list[str]]:
    """A message with marks in place of its content or its calls' arguments, and the marks."""
    calls = message.get("tool_calls")
    if not calls:
        has_content = bool((message["content"] or "").strip())
        return (
            (replaced(message, mark_of(index)), [mark_of(index)]) if has_content else (message, [])
        )
    marks = [f"{_OPEN}{index}.{place}{_CLOSE}" for place in range(len(calls))]
    left = iter(marks)
    return _with_arguments(message, lambda old: _arguments_of_mark(next(left), old)), marks


def replaced(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """A message with `mark` as its content, if it has any, and as its tool calls' arguments."""
    found = dict(message)
    if found["content"] or not found.get("tool_calls"):
        found["content"] = mark
    return _with_arguments(found, lambda old: _arguments_of_mark(mark, old))


def _arguments_of_mark(mark: str, arguments: Any) -> Any:
    """Arguments `{mark: mark}`, as an object or as JSON text like the original ones."""
    marked = {mark: mark}
    return _json_text(marked) if isinstance(arguments, str) else marked


def _with_arguments(message: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    found = dict(message)
    if found.get("tool_calls"):
        found["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": convert(call["function"].get("arguments", {})),
                },
            }
            for call in found["tool_calls"]
        ]
    return found


def _with_empty(messages: Messages, content: str | None) -> Messages:
    """The messages, with `content` where a message of tool calls has none."""
    return [
        {**message, "content": content}
        if message.get("tool_calls") and not message["content"]
        else message
        for message in messages
    ]


def _json_text(arguments: Any) -> str:
    """Arguments as JSON, as `tojson` of chat templates writes them."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


Span = tuple[int, int]

# Contents concatenated: the end token after a response, a separator after any other message.
PLAIN_SOURCE: Final = (
    "{%- for message in messages -%}{{- message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- else -%}{{- separator -}}"
    "{%- endif -%}{%- endfor -%}"
)
_GENERATION: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template and its variables.

    special_tokens: names such as `bos_token` to their text. markers: texts of all special tokens,
    end-of-turn tokens among them. options: further variables of the template.
    """

    source: str
    special_tokens: Mapping[str, str]
    markers: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_generation_blocks(self) -> bool:
        """Whether the template marks the assistant's text by generation blocks."""
        return _GENERATION.search(self.source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        *,
        add_generation_prompt: bool = False,
        continues_last: bool = False,
    ) -> str:
        """The text of messages. Raises BadConversationError: the template refuses them.

        continues_last: the text ends with the last message, whose turn stays open.
        """
        text, _ = self._rendered(
            messages, tools, add_generation_prompt, wants_spans=False, continues_last=continues_last
        )
        return text

    def render_with_spans(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> tuple[str, list[Span]]:
        """The text, and the spans of the template's generation blocks.

        Raises BadConversationError: the template refuses the messages.
        """
        return self._rendered(messages, tools, False, wants_spans=True)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        *,
        wants_spans: bool,
        continues_last: bool = False,
    ) -> tuple[str, list[Span]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                [list(messages)],
                tools=None if tools is None else list(tools),
                chat_template=self.source,
                return_assistant_tokens_mask=wants_spans,
                continue_final_message=continues_last,
                add_generation_prompt=add_generation_prompt,
                **{**self.special_tokens, **self.options},
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            # Templates compute with the messages, so Python errors are refusals as well.
            raise BadConversationError(f"the chat template refuses it: {error}") from error
        return texts[0], list(spans[0]) if spans else []


def chat_template(spec: ConversationSpec, tokenizer: Tokenizer) -> ChatTemplate:
    """The template that a source names.

    Raises DataError: the tokenizer has none, the file cannot be read, or it is no Jinja template.
    """
    special_tokens, markers = special_texts(tokenizer)
    options: dict[str, Any] = dict(spec.template_options)
    key = "data.sources.conversation.chat_template"
    if spec.chat_template == PLAIN_TEMPLATE:
        source = PLAIN_SOURCE
        options["separator"] = spec.separator
        end = tokenizer.decode([tokenizer.eos_id])
        special_tokens = {**special_tokens, "eos_token": end}
        markers = markers if end in markers else (*markers, end)
    elif spec.chat_template == TOKENIZER_TEMPLATE:
        if tokenizer.chat_template is None:
            raise DataError(
                f"{tokenizer.name}: the tokenizer has no chat template; set {key} to the path of a "
                f"Jinja file, or to {PLAIN_TEMPLATE}"
            )
        source = tokenizer.chat_template
    else:
        source = _read_source(Path(spec.chat_template).expanduser(), key)
    template = ChatTemplate(source, special_tokens, markers, options)
    _check(template, spec, tokenizer)
    return template


def special_texts(tokenizer: Tokenizer) -> tuple[dict[str, str], tuple[str, ...]]:
    """The tokenizer's special tokens: by their names in templates, and all of their texts."""
    texts = {number: text for text, number in tokenizer.special_ids.items()}
    roles = {
        "bos_token": tokenizer.bos_id,
        "eos_token": tokenizer.eos_id,
        "pad_token": tokenizer.pad_id,
    }
    named = {role: texts[number] for role, number in roles.items() if number in texts}
    return named, tuple(sorted(tokenizer.special_ids, key=lambda text: (-len(text), text)))


def _read_source(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); set {key} to the path of a Jinja file, to "
            f"{PLAIN_TEMPLATE} or to {TOKENIZER_TEMPLATE}"
        ) from error


def _check(template: ChatTemplate, spec: ConversationSpec, tokenizer: Tokenizer) -> None:
    """Raise DataError if the source is not a valid template; messages are checked at rendering."""
    from jinja2 import TemplateSyntaxError

    named = spec.chat_template
    if named == TOKENIZER_TEMPLATE:
        named = f"the chat template of {tokenizer.name}"
    try:
        template.render([{"role": "user", "content": "a"}], None)
    except BadConversationError as error:
        if isinstance(error.__cause__, TemplateSyntaxError):
            cause = error.__cause__
            raise DataError(
                f"{named}: line {cause.lineno}: {cause.message}; correct the template"
            ) from error


_Part = tuple[str, int | None]


def encode_rendered(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Encoding]:
    """Tokens and offsets of each text; a special token spelled out in the text becomes that token.

    Some tokenizers never make a special token of a text. For these the text between special tokens
    is encoded separately. Raises DataError as `encode_with_offsets` does.
    """
    if tokenizer.reads_special_tokens:
        return tokenizer.encode_with_offsets(texts)
    by_length = sorted(tokenizer.special_ids, key=len, reverse=True)
    special = re.compile(f"({'|'.join(map(re.escape, by_length))})")
    parts = [_parts(text, special, tokenizer.special_ids) for text in texts]
    plain = [part for row in parts for part, number in row if number is None]
    encoded = iter(tokenizer.encode_with_offsets(plain))
    return [
        _joined(
            row,
            [next(encoded) if number is None else _single(part, number) for part, number in row],
        )
        for row in parts
    ]


def _parts(text: str, special: re.Pattern[str], ids: dict[str, int]) -> list[_Part]:
    """The text in pieces: special tokens with their ids, and the text between them with None."""
    found = enumerate(special.split(text))
    # Pieces of odd index are the special tokens that the pattern matched.
    return [(piece, ids[piece] if at % 2 else None) for at, piece in found if piece]


def _single(text: str, number: int) -> Encoding:
    ids, start, stop = (np.array([value], np.int32) for value in (number, 0, len(text)))
    return Encoding(ids, start, stop)


def _joined(row: Sequence[_Part], encodings: Sequence[Encoding]) -> Encoding:
    places = [0, *accumulate(len(part) for part, _ in row)]
    nothing = np.zeros(0, np.int32)
    moved = [
        (one.ids_n, one.starts_n + place, one.stops_n + place)
        for one, place in zip(encodings, places, strict=False)
    ]
    ids, starts, stops = (
        np.concatenate([nothing, *columns], dtype=np.int32)
        for columns in (zip(*moved, strict=True) if moved else ((), (), ()))
    )
    return Encoding(ids, starts, stops)
