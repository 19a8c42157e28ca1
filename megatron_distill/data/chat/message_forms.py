"""Forms of messages that chat templates differ on: missing content, arguments of tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from megatron_distill.data.chat.conversations import ASSISTANT, BadConversationError
from megatron_distill.data.chat.template import ChatTemplate

OPEN, CLOSE = "\ue000", "\ue001"  # private-use characters around placeholders for contents
_NULLS: Final = ("None", "null")  # the spellings of null in Jinja and JSON

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Any] | None


class UnwrittenError(BadConversationError):
    """The template leaves out a response's content or tool calls."""


def mark_of(index: int) -> str:
    """A placeholder for a message's content that occurs in no other text."""
    return f"{OPEN}{index}{CLOSE}"


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
            raise UnwrittenError(
                f"message {index}: the chat template does not write its {part}; set "
                "data.sources.conversation.chat_template to a Jinja file that does"
            )


def _marked(message: Mapping[str, Any], index: int) -> tuple[Mapping[str, Any], list[str]]:
    """A message with marks in place of its content or its calls' arguments, and the marks."""
    calls = message.get("tool_calls")
    if not calls:
        has_content = bool((message["content"] or "").strip())
        return (
            (replaced(message, mark_of(index)), [mark_of(index)]) if has_content else (message, [])
        )
    marks = [f"{OPEN}{index}.{place}{CLOSE}" for place in range(len(calls))]
    left = iter(marks)
    return _with_arguments(message, lambda old: _saying(next(left), old)), marks


def replaced(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """A message with `mark` as its content, if it has any, and as its tool calls' arguments."""
    found = dict(message)
    if found["content"] or not found.get("tool_calls"):
        found["content"] = mark
    return _with_arguments(found, lambda old: _saying(mark, old))


def _saying(mark: str, arguments: Any) -> Any:
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
