"""Which characters of a rendered conversation the assistant says, its ends of turns included.

Nothing is searched for in what people wrote: a span is what lies between two renderings of the
template, or between two verified places of one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from megatron_distill.data.chat_template import ChatTemplate, Span
from megatron_distill.data.conversations import BadConversationError
from megatron_distill.data.message_forms import (
    OPEN,
    Messages,
    Tools,
    UnwrittenError,
    check_written,
    message_forms,
    responses,
    writes_null,
)
from megatron_distill.data.response_borders import ResponseBorders

# Contents of learned shapes, which the search for responses replaces by marks of its own.
_PLACE: Final = re.compile("\ue002([0-9]+)\ue003")
_MOST_SHAPES: Final = 512


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation's text, and the characters of each response: {message index: span}.

    is_closed: whether the last response has a token that ends its turn.
    """

    text: str
    spans: Mapping[int, Span]
    is_closed: bool = True


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
        self._borders = ResponseBorders(template)
        self._shapes: dict[tuple[str, ...], _Shape | None] = {}

    def find(self, messages: Messages, tools: Tools = None) -> Rendered:
        """Render a conversation, in the first form that the template takes and writes whole.

        Raises BadConversationError, naming the message.
        """
        refusals: list[tuple[int, BadConversationError]] = []
        for form in message_forms(messages):
            try:
                found = self._found(form, tools)
            except BadConversationError as error:
                refusals.append((_distance(error, form), error))
                continue
            if not writes_null(self._template, form, tools, found.text):
                return found
        assert refusals, "a null that is written can be left out"
        raise min(refusals, key=lambda refusal: refusal[0])[1]

    def _found(self, messages: Messages, tools: Tools) -> Rendered:
        if self._template.has_generation_blocks:
            return self._of_blocks(messages, tools)
        text = self._template.render(messages, tools)
        if tools is None and all(_is_plain(message) for message in messages):
            shape = self._shape(tuple(str(message["role"]) for message in messages))
            spans = None if shape is None else _placed(shape, messages, text)
            if spans is not None:
                return self._rendered(messages, text, spans)
        check_written(self._template, messages, tools)
        return self._rendered(messages, text, self._borders.spans(messages, tools, text))

    def _of_blocks(self, messages: Messages, tools: Tools) -> Rendered:
        text, blocks = self._template.render_with_spans(messages, tools)
        places = responses(messages)
        if len(blocks) != len(places):
            raise BadConversationError(
                f"the template's generation blocks give {len(blocks)} responses, the conversation "
                f"has {len(places)}; correct the template"
            )
        check_written(self._template, messages, tools)
        return self._rendered(messages, text, dict(zip(places, blocks, strict=True)))

    def _rendered(self, messages: Messages, text: str, spans: Mapping[int, Span]) -> Rendered:
        return Rendered(text, spans, is_closed=self._borders.is_closed(messages, text, spans))

    def _shape(self, roles: tuple[str, ...]) -> _Shape | None:
        """What the template writes around texts of these roles; None where it depends on them."""
        if roles not in self._shapes:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.pop(next(iter(self._shapes)))
            self._shapes[roles] = self._learned(roles)
        return self._shapes[roles]

    def _learned(self, roles: tuple[str, ...]) -> _Shape | None:
        messages = [
            {"role": role, "content": f"\ue002{index}\ue003"} for index, role in enumerate(roles)
        ]
        try:
            text = self._template.render(messages, None)
            check_written(self._template, messages, None)
            spans = self._borders.spans(messages, None, text)
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


def _distance(error: BadConversationError, messages: Messages) -> int:
    """How far a refusal is from the point: a null or the like may be all that it is about."""
    if isinstance(error, UnwrittenError):
        return 0
    return 1 + sum(message["content"] is None for message in messages)


def _is_plain(message: Mapping[str, Any]) -> bool:
    """Whether a message is a role and a text; one of white space alone a template may leave out."""
    content = message["content"]
    return len(message) == 2 and bool(content.strip()) and OPEN not in content


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
