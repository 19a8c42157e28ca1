"""Conversations that each model's chat template renders, aligned by the contents of messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_distill.align import (
    Chunks,
    RenderedTokens,
    align_messages,
    chunk_numbers,
    closing_roles,
    continued_spans,
    special_roles,
)
from megatron_distill.align.special_roles import SpecialRole
from megatron_distill.data.aligned.documents import is_unknown
from megatron_distill.data.chat.conversations import (
    PLAIN_TEMPLATE,
    TOKENIZER_TEMPLATE,
    BadConversationError,
    Conversation,
    ConversationSpec,
)
from megatron_distill.data.chat.spans import Rendered, ResponseFinder
from megatron_distill.data.chat.template import (
    ChatTemplate,
    Span,
    UnwrittenError,
    chat_template,
    encode_rendered,
)
from megatron_distill.data.samples import KD_TRAINED, NO_CHUNK
from megatron_distill.data.tokenizers.protocol import Encoding, Tokenizer
from megatron_distill.errors import DataError

__all__ = ["ConversationAligner", "TeacherSide", "teacher_template"]

_NO_CHUNKS: Final = "no trained token of it is in a chunk that both tokenizers share"


@dataclass(frozen=True)
class TeacherSide:
    """A conversation in the teacher's tokens, and its chunks, numbered from 0.

    chunks_n: int32, the chunk of each token of the student; -1 for none. tokens_m, chunks_m: int32,
    the teacher's tokens and their chunks. All labels of a chunk are trained. problem: the reason
    for which there is no chunk and no token of the teacher.
    """

    chunks_n: NDArray[np.int32]
    tokens_m: NDArray[np.int32]
    chunks_m: NDArray[np.int32]
    problem: str | None = None


def teacher_template(spec: ConversationSpec, tokenizer: Tokenizer) -> ChatTemplate:
    """The template of a teacher with a tokenizer of its own: the tokenizer's, or `plain`.

    Raises DataError: the tokenizer has none, or it is no Jinja template.
    """
    if spec.chat_template == PLAIN_TEMPLATE:
        return chat_template(spec, tokenizer)
    if tokenizer.chat_template is None:
        raise DataError(
            f"{tokenizer.name}: the teacher's tokenizer has no chat template; add a "
            "chat_template.jinja to its folder, or set data.sources.conversation.chat_template to "
            f"{PLAIN_TEMPLATE}"
        )
    return chat_template(replace(spec, chat_template=TOKENIZER_TEMPLATE), tokenizer)


class ConversationAligner:
    """Renders conversations for the teacher and aligns both renderings; picklable, for workers.

    Tokens within the content of a message align by their bytes, and closing tokens by their place,
    see `align_messages`. A content that the two templates write differently is in no chunk; white
    space at its ends is not compared. Chunks with an unknown token are left out.
    """

    def __init__(self, student: Tokenizer, teacher: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizers = (student, teacher)
        self._closing = (_closing_ids(student), _closing_ids(teacher))
        self._finder = ResponseFinder(template)

    def render(self, conversation: Conversation) -> Rendered:
        """The teacher's rendering. Raises BadConversationError: its template refuses it."""
        try:
            return self._finder.find(conversation.messages, conversation.tools, with_contents=True)
        except UnwrittenError as error:
            raise BadConversationError(
                f"the teacher's template: {error.reason}; put a chat_template.jinja that does into "
                "the folder of the teacher's tokenizer"
            ) from error
        except BadConversationError as error:
            raise BadConversationError(f"the teacher's template: {error}") from error

    def aligned(
        self,
        renderings: Sequence[tuple[Rendered, Rendered]],
        encodings: Sequence[Encoding],
        flags: Sequence[NDArray[np.uint8]],
    ) -> list[TeacherSide]:
        """The teacher's side of each conversation, from the student's tokens and label flags."""
        texts = [of_teacher.text for _, of_teacher in renderings]
        others = encode_rendered(self._tokenizers[1], texts)
        rows = zip(renderings, encodings, others, flags, strict=True)
        return [self._aligned(pair, (own.ids_n, other.ids_n), n) for pair, own, other, n in rows]

    def _aligned(
        self,
        pair: tuple[Rendered, Rendered],
        ids: tuple[NDArray[np.int32], NDArray[np.int32]],
        flags_n: NDArray[np.uint8],
    ) -> TeacherSide:
        try:
            chunks, sides = self._chunks(pair, ids)
        except DataError as error:
            return _without_chunks(len(flags_n), str(error))
        chunks = _trained(chunks, flags_n)
        if not len(chunks) and bool((flags_n[1:] & KD_TRAINED).any()):
            return _without_chunks(len(flags_n), _NO_CHUNKS)
        own, other = (
            chunk_numbers(ranges_C2, spans_N2, joins_N).astype(np.int32)
            for ranges_C2, (spans_N2, joins_N) in zip(
                (chunks.student, chunks.teacher), sides, strict=True
            )
        )
        return TeacherSide(own, ids[1], other)

    def _chunks(
        self, pair: tuple[Rendered, Rendered], ids: tuple[NDArray[np.int32], NDArray[np.int32]]
    ) -> tuple[Chunks, list[tuple[NDArray[np.int64], NDArray[np.bool_]]]]:
        """The chunks; of each side the spans, and the tokens without text that are in chunks."""
        messages = _common_messages(*pair)
        sides, continued = [], []
        for rendered, ids_n, tokenizer, (ends_turn, ends_text) in zip(
            pair, ids, self._tokenizers, self._closing, strict=True
        ):
            assert rendered.contents is not None, "it was rendered with its contents"
            spans = [_stripped(rendered.text, rendered.contents[one]) for one in messages]
            spans_N2, continues_N = continued_spans(tokenizer, ids_n, rendered.text)
            roles_N = closing_roles(ids_n, ends_turn=ends_turn, ends_text=ends_text)
            sides.append(RenderedTokens(spans_N2, _in_bytes(rendered.text, spans), roles_N))
            continued.append(continues_N)
        own, other = (
            is_unknown(tokenizer, ids_n)
            for tokenizer, ids_n in zip(self._tokenizers, ids, strict=True)
        )
        chunks = align_messages(*sides).continued(*continued).without(own, other)
        joins = [one | (side.roles_N > 0) for one, side in zip(continued, sides, strict=True)]
        return chunks, [(side.spans_N2, one) for side, one in zip(sides, joins, strict=True)]


def _closing_ids(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that end a turn, and those that end a text."""
    roles = special_roles(tokenizer)
    turn, text = (
        tuple(roles[role] for role in (one,) if role in roles)
        for one in (SpecialRole.END_OF_TURN, SpecialRole.END_OF_TEXT)
    )
    return turn, text


def _without_chunks(tokens: int, problem: str) -> TeacherSide:
    nothing = np.zeros(0, np.int32)
    return TeacherSide(np.full(tokens, NO_CHUNK, np.int32), nothing, nothing, problem)


def _trained(chunks: Chunks, flags_n: NDArray[np.uint8]) -> Chunks:
    """The chunks whose labels are all trained and have a token before them."""
    untrained = np.concatenate([np.zeros(1, np.int64), np.cumsum((flags_n & KD_TRAINED) == 0)])
    bounds_C2 = chunks.student
    is_valid_C = untrained[bounds_C2[:, 1]] == untrained[bounds_C2[:, 0]]
    is_valid_C &= (bounds_C2[:, 0] > 0) & (chunks.teacher[:, 0] > 0)
    return Chunks(bounds_C2[is_valid_C], chunks.teacher[is_valid_C])


def _common_messages(student: Rendered, teacher: Rendered) -> list[int]:
    """The messages whose contents both templates write, equal and in the same order.

    A template may move the system message; it is left out if it stands among other responses.
    """
    own_spans, other_spans = student.contents, teacher.contents
    assert own_spans is not None
    assert other_spans is not None
    found: list[int] = []
    stops = (0, 0)
    pairs = [(student.text, own_spans), (teacher.text, other_spans)]
    candidates = [
        index
        for _, index in sorted((span, index) for index, span in own_spans.items())
        if index in other_spans
        and _responses_before(student, index) == _responses_before(teacher, index)
    ]
    for index in candidates:
        own, other = (_stripped(text, contents[index]) for text, contents in pairs)
        is_equal = student.text[slice(*own)] == teacher.text[slice(*other)]
        if is_equal and own[0] >= stops[0] and other[0] >= stops[1]:
            found.append(index)
            stops = (own[1], other[1])
    return found


def _responses_before(rendered: Rendered, index: int) -> int:
    assert rendered.contents is not None
    place = rendered.contents[index][0]
    return sum(stop <= place for _, stop in rendered.spans.values())


def _stripped(text: str, span: Span) -> Span:
    """The span without the white space at its ends."""
    inside = text[slice(*span)]
    start = span[0] + len(inside) - len(inside.lstrip())
    return start, start + len(inside.strip())


def _in_bytes(text: str, spans: Sequence[Span]) -> NDArray[np.int64]:
    """Ascending character spans in bytes of the text's UTF-8, int64 [K, 2]."""
    edges = [edge for span in spans for edge in span]
    found, place, length = [], 0, 0
    for edge in edges:
        length += len(text[place:edge].encode())
        found.append(length)
        place = edge
    return np.array(found, np.int64).reshape(-1, 2)
