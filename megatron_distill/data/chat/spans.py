"""Character spans of responses, end of turn included, and of contents in a rendered conversation.

Messages' contents are never searched. A span is the difference of two renderings of the
template, or lies between two verified positions of one rendering.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from megatron_distill.data.chat.conversations import ASSISTANT, BadConversationError
from megatron_distill.data.chat.template import (
    ChatTemplate,
    Messages,
    Span,
    Tools,
    UnwrittenError,
    check_written,
    mark_of,
    message_forms,
    replaced,
    responses,
    writes_null,
)

# Placeholder contents of learned shapes; the search for responses replaces them by its marks.
_PLACE: Final = re.compile("\ue002([0-9]+)\ue003")
_MOST_SHAPES: Final = 512


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation's text, and the character span of each response: {message index: span}.

    is_closed: whether the last response has an end-of-turn token. contents: the span of each
    message's content that the template writes once, white space at its ends apart; None if unknown.
    """

    text: str
    spans: Mapping[int, Span]
    is_closed: bool = True
    contents: Mapping[int, Span] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The template's text around contents: literal, content, literal, ..., literal.

    borders: (literal, character in it) of the start and of the stop of each response.
    """

    literals: tuple[str, ...]
    contents: tuple[int, ...]
    borders: Mapping[int, tuple[tuple[int, int], tuple[int, int]]]


class ResponseFinder:
    """Renders conversations with one template and finds the assistant's responses in the text.

    A response begins after the generation prompt and ends after its end-of-turn token, without
    the white space that the template writes after it. Generation blocks of a template, if any, are
    the responses. A conversation of plain texts is rendered once. Its spans come from a cached
    rendering of the same roles with placeholders, after both texts are checked to agree.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._borders = ResponseBorders(template)
        self._shapes: dict[tuple[str, ...], _Shape | None] = {}

    def find(
        self, messages: Messages, tools: Tools = None, *, with_contents: bool = False
    ) -> Rendered:
        """Render a conversation, in the first form that the template accepts and renders fully.

        with_contents: find the contents also where that takes a rendering for each. Raises
        BadConversationError, naming the message.
        """
        refusals: list[tuple[int, BadConversationError]] = []
        for form in message_forms(messages):
            try:
                found = self._found(form, tools)
            except BadConversationError as error:
                refusals.append((_distance(error, form), error))
                continue
            if not writes_null(self._template, form, tools, found.text):
                if with_contents and found.contents is None:
                    contents = self._borders.contents(form, tools, found.text)
                    return replace(found, contents=contents)
                return found
        assert refusals, "a null that is written can be left out"
        raise min(refusals, key=lambda refusal: refusal[0])[1]

    def _found(self, messages: Messages, tools: Tools) -> Rendered:
        if self._template.has_generation_blocks:
            return self._of_blocks(messages, tools)
        text = self._template.render(messages, tools)
        if tools is None and all(_is_plain(message) for message in messages):
            shape = self._shape(tuple(str(message["role"]) for message in messages))
            placed = None if shape is None else _placed(shape, messages, text)
            if placed is not None:
                spans, contents = placed
                return replace(self._rendered(messages, text, spans), contents=contents)
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
        """The template's text around contents of these roles; None if contents change it."""
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
                return None  # inside a content
            found.append((index, border - stops[index]))
        return _Shape(
            tuple(text[stop:start] for stop, start in zip(stops, starts, strict=True)),
            tuple(int(place[1]) for place in places),
            dict(zip(spans, zip(found[::2], found[1::2], strict=True), strict=True)),
        )


def _distance(error: BadConversationError, messages: Messages) -> int:
    """Rank of a refusal, lowest first: a null content may be its only cause, so each adds one."""
    if isinstance(error, UnwrittenError):
        return 0
    return 1 + sum(message["content"] is None for message in messages)


def _is_plain(message: Mapping[str, Any]) -> bool:
    """Whether a message is a role and a text; templates may leave out text of white space alone."""
    content = message["content"]
    return len(message) == 2 and bool(content.strip())


def _placed(
    shape: _Shape, messages: Messages, text: str
) -> tuple[dict[int, Span], dict[int, Span]] | None:
    """The spans of responses and of contents, if the shape with contents gives exactly the text."""
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
    spans = {
        index: (begins[start[0]] + start[1], begins[stop[0]] + stop[1])
        for index, (start, stop) in shape.borders.items()
    }
    placed = zip(shape.contents, begins[1:], contents, strict=True)
    found = {index: (stop - len(content), stop) for index, stop, content in placed}
    once = [index for index in found if shape.contents.count(index) == 1]
    return spans, {index: found[index] for index in once}


@dataclass(frozen=True, slots=True)
class _Habits:
    """The template's text around a plain question and its answer.

    header: the generation prompt. opening: its first special token. closes_turns: whether a
    special token follows the answer.
    """

    header: str
    opening: str | None
    closes_turns: bool


class ResponseBorders:
    """Finds responses between renderings of two prefixes, or around the text that a mark changes.

    A response begins after the generation prompt, or after the part of it that the turn has.
    It ends after its end-of-turn token; if the template writes none, after the special token
    that begins the next turn.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        markers = "|".join(map(re.escape, template.markers)) or "(?!)"
        self._marker = re.compile(markers)
        self._last_marker = re.compile(f"(?:{markers})(?=\\s*$)")
        self._next_marker = re.compile(f"\\s*({markers})")

    def spans(self, messages: Messages, tools: Tools, text: str) -> dict[int, Span]:
        """Find all responses in the text of a conversation.

        Raises BadConversationError: one is not found.
        """
        spans: dict[int, Span] = {}
        stop = 0
        for index in responses(messages):
            span = self._by_prefix(messages, tools, text, index)
            if span is None:
                span = self._by_difference(messages, tools, text, index)
            if span is None or not stop <= span[0] < span[1]:
                raise BadConversationError(
                    f"message {index}: the chat template does not show where this response begins "
                    "and ends; correct the template, or mark it with {% generation %} blocks"
                )
            following = messages[index + 1]["role"] if index + 1 < len(messages) else None
            stop = self._end(text, span, is_before_response=following == ASSISTANT)
            spans[index] = span[0], stop
        return spans

    def is_closed(self, messages: Messages, text: str, spans: Mapping[int, Span]) -> bool:
        """Whether the last response has an end-of-turn token; true without responses."""
        if not spans:
            return True
        last = max(spans)
        if not self._is_marked(text, spans[last]):
            return False
        if self._template.has_generation_blocks or last + 1 < len(messages):
            return True
        return self._habits.closes_turns

    def contents(self, messages: Messages, tools: Tools, text: str) -> dict[int, Span]:
        """Find the contents that the template writes, once and unchanged but for outer spaces."""
        found: dict[int, Span] = {}
        for index, message in enumerate(messages):
            content = message["content"]
            if isinstance(content, str) and content.strip():
                span = self._content_span(messages, tools, text, index)
                if span is not None and text[slice(*span)].strip() == content.strip():
                    found[index] = span
        return found

    def _end(self, text: str, span: Span, *, is_before_response: bool) -> int:
        """End of a response: after its end-of-turn token, or else the next turn's first token.

        Some templates write no end-of-turn token: the token that begins the next turn stops the
        model. A token that begins another response does not.
        """
        if self._habits.closes_turns and self._is_marked(text, span):
            return span[1]
        following = self._next_marker.match(text, span[1])
        if following is None or (is_before_response and following[1] == self._habits.opening):
            return span[1]
        return following.end()

    def _is_marked(self, text: str, span: Span) -> bool:
        return text[slice(*span)].rstrip().endswith(self._template.markers)

    @cached_property
    def _habits(self) -> _Habits:
        """Computed once per template; if it refuses the conversation, turns count as closed."""
        asked = {"role": "user", "content": mark_of(0)}
        answer = {"role": ASSISTANT, "content": mark_of(1)}
        header = self._prompt([asked], None) or ""
        opening = self._marker.search(header)
        try:
            text = self._template.render([asked, answer], None)
        except BadConversationError:
            text = ""
        place = text.rfind(mark_of(1))
        closes = place < 0 or self._marker.search(text, place) is not None
        return _Habits(header, opening[0] if opening else None, closes)

    def _by_prefix(self, messages: Messages, tools: Tools, text: str, index: int) -> Span | None:
        """The span between two rendered prefixes of the conversation, if both begin its text.

        They do not if the template renders earlier turns differently from the last one.
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
        start = len(prompt)
        headers = _beginnings(self._habits.header, self._marker)
        header = next((one for one in headers if whole.startswith(one, start)), "")
        if header and self._prompt(messages[:index], tools) == "":
            start += len(header)  # the template ignores add_generation_prompt, but writes a header
        last = self._last_marker.search(whole, start)
        return start, len(whole) if last is None else last.end()

    def _by_difference(
        self, messages: Messages, tools: Tools, text: str, index: int
    ) -> Span | None:
        """The span around the text that changes if this message's content is replaced."""
        content = self._content_span(messages, tools, text, index)
        if content is None:
            return None
        start, stop = content
        before = self._end_of_content(messages, tools, text, index)
        if before > start:
            return None
        begin = self._begin_in(messages, tools, text[before:start], index)
        following = len(text)
        if index + 1 < len(messages):
            after = self._content_span(messages, tools, text, index + 1)
            following = len(text) if after is None else after[0]
        if following < stop:
            return None  # another message lies inside
        end = self._end_in(messages[: index + 1], tools, text[stop:following])
        return None if begin is None or end is None else (before + begin, stop + end)

    def _begin_in(self, messages: Messages, tools: Tools, gap: str, index: int) -> int | None:
        """End of the second content's generation prompt in the text between two contents."""
        # Most templates cannot render a generation prompt without messages.
        prompt = self._prompt(messages[:index], tools)
        for wanted in _beginnings(prompt or self._habits.header, self._marker):
            place = gap.find(wanted)
            if place >= 0:
                return place + len(wanted)
        marker = self._marker.search(gap) if prompt == "" else None
        return None if marker is None else marker.end()

    def _end_in(self, messages: Messages, tools: Tools, gap: str) -> int | None:
        """Number of characters after the last message's content that belong to its turn.

        It is the common prefix of the text after this content in the conversation cut here and in
        the whole one.
        """
        try:
            whole = self._template.render(messages, tools)
        except BadConversationError:
            whole = ""
        content = self._content_span(messages, tools, whole, len(messages) - 1) if whole else None
        if content is None:
            marker = self._marker.search(gap)
            return None if marker is None else marker.end()
        tail = whole[content[1] :]
        if not gap.startswith(tail):
            common = tail[: _agreement(tail, gap)]
            tail = common[: max((one.end() for one in self._marker.finditer(common)), default=0)]
        last = self._last_marker.search(tail)
        return len(tail) if last is None else last.end()

    def _prompt(self, messages: Messages, tools: Tools) -> str | None:
        """The generation prompt after these messages; None if two renderings do not show it."""
        try:
            asked = self._template.render(messages, tools, add_generation_prompt=True)
            plain = self._template.render(messages, tools)
        except BadConversationError:
            return None
        closing = self._last_marker.search(plain)
        if not asked.startswith(plain) and closing is not None:
            plain = plain[: closing.start()]  # some templates end a text without such a prompt
        return asked[len(plain) :] if asked.startswith(plain) else None

    def _end_of_content(self, messages: Messages, tools: Tools, text: str, index: int) -> int:
        """End of the last content before a message."""
        for earlier in range(index - 1, -1, -1):
            span = self._content_span(messages, tools, text, earlier)
            if span is not None:
                return span[1]
        return 0

    def _content_span(self, messages: Messages, tools: Tools, text: str, index: int) -> Span | None:
        """The characters that depend on a message's content; None if there are none."""
        mark = mark_of(index, beside=text)
        changed = [*messages[:index], replaced(messages[index], mark), *messages[index + 1 :]]
        try:
            other = self._template.render(changed, tools)
        except BadConversationError:
            return None
        start, stop = other.find(mark), other.rfind(mark) + len(mark)
        if start < 0:
            return None
        # More text than the mark changes if the template inserts a thinking block for it.
        begin = _agreement(text, other[:start])
        end = len(text) - _agreement(text[::-1], other[stop:][::-1])
        return None if begin > end else (begin, end)


def _beginnings(prompt: str, marker: re.Pattern[str]) -> Iterator[str]:
    """Yield the generation prompt, then its prefixes that an earlier turn may have instead.

    After the role a prompt may contain text of some turns only, as the start of a thinking block.
    Prefixes that end at a line end come before those that end at a special token: thinking tags
    are special tokens in some tokenizers only.
    """
    if prompt:
        yield prompt
    lines = [place.end() for place in re.finditer("\n", prompt)]
    tokens = [place.end() for place in marker.finditer(prompt)]
    for stop in (*reversed(lines), *reversed(tokens)):
        if prompt[:stop].strip() and stop < len(prompt):
            yield prompt[:stop]


def _agreement(first: str, second: str) -> int:
    """Length of the common prefix of two texts."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
