"""Which characters of a rendered conversation the assistant says, its ends of turns included.

Nothing is searched for in what people wrote: a span is what lies between two renderings of the
template, or between two verified places of one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from megatron_distill.data.chat_template import ChatTemplate, Span
from megatron_distill.data.conversations import ASSISTANT, BadConversationError

_OPEN, _CLOSE = "\ue000", "\ue001"  # private characters, which stand in for contents
_PLACE: Final = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_MOST_SHAPES: Final = 512

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Any] | None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation's text, and the characters of each response: {message index: span}."""

    text: str
    spans: Mapping[int, Span]


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a template writes around contents: literal, content, literal, ..., literal.

    borders: of each response, (literal, character in it) of its start and stop.
    """

    literals: tuple[str, ...]
    contents: tuple[int, ...]
    borders: Mapping[int, tuple[tuple[int, int], tuple[int, int]]]


class ResponseFinder:
    """Renders conversations with one template and finds what the assistant says in them.

    A response begins after the generation prompt and ends after its end-of-turn token; white space
    that the template writes after that is not part of it. Where the template has generation blocks,
    they are the responses. Conversations of plain texts are rendered once, and their spans follow
    from those of the same turns with other contents, which must give the very same text.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._has_blocks = template.has_generation_blocks
        markers = "|".join(map(re.escape, template.markers)) or "(?!)"
        self._marker = re.compile(markers)
        self._last_marker = re.compile(f"(?:{markers})(?=\\s*$)")
        self._shapes: dict[tuple[str, ...], _Shape | None] = {}

    def find(self, messages: Messages, tools: Tools = None) -> Rendered:
        """Render a conversation. Raises BadConversationError, naming the message."""
        if self._has_blocks:
            return self._of_blocks(messages, tools)
        text = self._template.render(messages, tools)
        if tools is None and all(_is_plain(message) for message in messages):
            shape = self._shape(tuple(str(message["role"]) for message in messages))
            spans = None if shape is None else _placed(shape, messages, text)
            if spans is not None:
                return Rendered(text, spans)
        return Rendered(text, self._spans(messages, tools, text))

    def _of_blocks(self, messages: Messages, tools: Tools) -> Rendered:
        text, blocks = self._template.render_with_spans(messages, tools)
        responses = _responses(messages)
        if len(blocks) != len(responses):
            raise BadConversationError(
                f"the template's generation blocks give {len(blocks)} responses, the conversation "
                f"has {len(responses)}; correct the template"
            )
        return Rendered(text, dict(zip(responses, blocks, strict=True)))

    def _shape(self, roles: tuple[str, ...]) -> _Shape | None:
        """What the template writes around texts of these roles; None where it depends on them."""
        if roles not in self._shapes:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.pop(next(iter(self._shapes)))
            self._shapes[roles] = self._learned(roles)
        return self._shapes[roles]

    def _learned(self, roles: tuple[str, ...]) -> _Shape | None:
        messages = [
            {"role": role, "content": f"{_OPEN}{index}{_CLOSE}"} for index, role in enumerate(roles)
        ]
        try:
            text = self._template.render(messages, None)
            spans = self._spans(messages, None, text)
        except BadConversationError:
            return None
        places = list(_PLACE.finditer(text))
        stops = [0, *(place.end() for place in places)]
        starts = [*(place.start() for place in places), len(text)]
        found: list[tuple[int, int]] = []
        for border in (border for span in spans.values() for border in span):
            index = next(i for i, start in enumerate(starts) if border <= start)
            if border < stops[index]:
                return None  # inside of a content
            found.append((index, border - stops[index]))
        return _Shape(
            tuple(text[stop:start] for stop, start in zip(stops, starts, strict=True)),
            tuple(int(place[1]) for place in places),
            dict(zip(spans, zip(found[::2], found[1::2], strict=True), strict=True)),
        )

    def _spans(self, messages: Messages, tools: Tools, text: str) -> dict[int, Span]:
        spans: dict[int, Span] = {}
        for index in _responses(messages):
            span = self._by_prefix(messages, tools, text, index)
            if span is None:
                span = self._by_difference(messages, tools, text, index)
            if span is None or span[0] >= span[1]:
                raise BadConversationError(
                    f"message {index}: the chat template does not show where this response begins "
                    "and ends; correct the template, or mark it with {% generation %} blocks"
                )
            spans[index] = span
        return spans

    def _by_prefix(self, messages: Messages, tools: Tools, text: str, index: int) -> Span | None:
        """The span between two beginnings of the conversation, if they are beginnings of its text.

        They are not where a template writes earlier turns in another way than the last one.
        """
        try:
            whole = self._template.render(messages[: index + 1], tools)
            if not text.startswith(whole):
                return None
            prompt = self._template.render(messages[:index], tools, add_generation_prompt=True)
        except BadConversationError:
            return None
        if not whole.startswith(prompt):
            return None
        last = self._last_marker.search(whole, len(prompt))
        return len(prompt), len(whole) if last is None else last.end()

    def _by_difference(
        self, messages: Messages, tools: Tools, text: str, index: int
    ) -> Span | None:
        """The span around what changes in the whole text when this message says something else."""
        content = self._content_span(messages, tools, text, index)
        if content is None:
            return None
        start, stop = content
        before = self._end_of_content(messages, tools, text, index)
        gap = text[before:start]
        begin = None if before > start else self._begin_in(messages, tools, gap, index)
        following = len(text)
        if index + 1 < len(messages):
            after = self._content_span(messages, tools, text, index + 1)
            following = len(text) if after is None else after[0]
        end = self._marker.search(text, stop, following)
        return None if begin is None or end is None else (before + begin, end.end())

    def _begin_in(self, messages: Messages, tools: Tools, gap: str, index: int) -> int | None:
        """Where in the text between two contents the second one's generation prompt ends."""
        try:
            asked = self._template.render(messages[:index], tools, add_generation_prompt=True)
            plain = self._template.render(messages[:index], tools)
        except BadConversationError:
            return None
        closing = self._last_marker.search(plain)
        if not asked.startswith(plain) and closing is not None:
            plain = plain[: closing.start()]  # some templates end a text that asks for nothing
        if not asked.startswith(plain):
            return None
        prompt = asked[len(plain) :]
        if not prompt:
            marker = self._marker.search(gap)
            return None if marker is None else marker.end()
        # A prompt may end with what only the last turn has, as the beginning of a thought.
        last = list(self._marker.finditer(prompt))
        for wanted in (prompt, prompt[: last[-1].end()] if last else prompt):
            place = gap.find(wanted)
            if place >= 0:
                return place + len(wanted)
        return None

    def _end_of_content(self, messages: Messages, tools: Tools, text: str, index: int) -> int:
        """Where the last content before a message ends."""
        for earlier in range(index - 1, -1, -1):
            span = self._content_span(messages, tools, text, earlier)
            if span is not None:
                return span[1]
        return 0

    def _content_span(self, messages: Messages, tools: Tools, text: str, index: int) -> Span | None:
        """The characters that depend on what a message says; None where none does."""
        mark = f"{_OPEN}{index}{_CLOSE}"
        changed = [*messages[:index], _replaced(messages[index], mark), *messages[index + 1 :]]
        try:
            other = self._template.render(changed, tools)
        except BadConversationError:
            return None
        start, stop = other.find(mark), other.rfind(mark) + len(mark)
        if start < 0 or _OPEN in text:
            return None
        begin, end = start, len(text) - (len(other) - stop)
        if begin > end or text[:begin] != other[:start] or text[end:] != other[stop:]:
            return None
        return begin, end


def _responses(messages: Messages) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]


def _is_plain(message: Mapping[str, Any]) -> bool:
    """Whether a message is a role and a text; one of white space alone a template may leave out."""
    content = message["content"]
    return len(message) == 2 and bool(content.strip()) and _OPEN not in content


def _replaced(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """A message that says `mark`: in its text if it has one, and as the name of its tool calls."""
    found = dict(message)
    if found["content"] or not found.get("tool_calls"):
        found["content"] = mark
    if found.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "function": {**call["function"], "name": mark}} for call in found["tool_calls"]
        ]
    return found


def _placed(shape: _Shape, messages: Messages, text: str) -> dict[int, Span] | None:
    """The spans of a conversation of this shape, if its text is the shape's with its contents."""
    raw = [str(messages[index]["content"]) for index in shape.contents]
    for contents in (raw, [content.strip() for content in raw]):
        parts = [shape.literals[0]]
        for content, literal in zip(contents, shape.literals[1:], strict=True):
            parts += (content, literal)
        if "".join(parts) == text:
            break
    else:
        return None
    begins, length = [], 0
    for place, part in enumerate(parts):
        if place % 2 == 0:
            begins.append(length)
        length += len(part)
    return {
        index: (begins[start[0]] + start[1], begins[stop[0]] + stop[1])
        for index, (start, stop) in shape.borders.items()
    }
