"""Rows of instruction data to token ids, each with the loss-mask flag of its label.

A prompt is one user message in the tokenizer's chat template, without an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_distill.data.aligned.conversations import ConversationAligner
from megatron_distill.data.chat.conversations import (
    ASSISTANT,
    BadConversationError,
    Conversation,
    ConversationSpec,
    RowBlock,
    conversation_of,
    rows_of,
)
from megatron_distill.data.chat.spans import Rendered, ResponseFinder
from megatron_distill.data.chat.template import (
    ChatTemplate,
    chat_template,
    encode_rendered,
    message_forms,
    writes_null,
)
from megatron_distill.data.samples import (
    CE_TRAINED,
    FULLY_TRAINED,
    KD_TRAINED,
    NO_CHUNK,
    weight_flag,
)
from megatron_distill.data.text.documents import RowFilter
from megatron_distill.data.tokenizers.open import Encoding, Tokenizer
from megatron_distill.data.tokenizers.protocol import begin_token
from megatron_distill.errors import ConfigError, DataError

INDEX_TYPE: Final = np.dtype(
    [
        ("stop", "<i8"),  # where the conversation's tokens end
        ("row", "<i8"),  # its number in the file, from 1
        ("digest", "<u8"),  # of its content
        ("file", "<i4"),
        ("trained", "<i4"),  # number of labels that distillation trains, with cross-entropy's
    ]
)


# Messages that no template writes in another form; results of tools are JSON in some.
_PROMPTS: Final = ("system", "user")


@dataclass(frozen=True)
class MaskRule:
    """Loss-mask rule: all responses or only the last; optionally distillation on prompts too."""

    only_last: bool = False
    distill_on_prompt: bool = False


@dataclass(frozen=True)
class TeacherColumns:
    """The conversations of a block for a teacher with a tokenizer of its own, see `TeacherSide`.

    stops: int64, where each conversation's tokens of the teacher end. unaligned: conversations
    without a chunk, as (row, reason).
    """

    chunks_n: NDArray[np.int32]
    tokens_m: NDArray[np.int32]
    chunks_m: NDArray[np.int32]
    stops: NDArray[np.int64]
    unaligned: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class PreparedBlock:
    """The conversations of a block of rows, one after another.

    index: of INDEX_TYPE, `stop` counted from the block's beginning. problems: rows that are no
    conversations, as (row, reason). rows: rows read, bad ones included. file: the file's index.
    unclosed: conversations whose last response has no end-of-turn token. dropped: responses
    left out because no prompt comes before them. unseen, teacher_unseen: conversations whose text
    for the student, and for a teacher with its own template, lacks a prompt or tools, see
    `lacks_context`. teacher: None where the teacher has the same
    tokenizer; with it, the trained labels of `index` are those in chunks.
    """

    tokens_n: NDArray[np.int32]
    flags_n: NDArray[np.uint8]
    index: NDArray[np.void]
    problems: tuple[tuple[int, str], ...]
    rows: int
    ce_labels: int
    file: int
    unclosed: int = 0
    dropped: int = 0
    unseen: int = 0
    teacher_unseen: int = 0
    teacher: TeacherColumns | None = None


@dataclass(frozen=True)
class _RenderedRow:
    """A conversation of a row, as it is rendered for the student and perhaps for the teacher."""

    row: int
    conversation: Conversation
    rendered: Rendered
    digest: bytes
    of_teacher: Rendered | None


class ConversationEncoder:
    """Turns blocks of rows into token ids and flags; picklable, for worker processes.

    aligner: of a teacher with a tokenizer of its own, None without one. rows: selects some rows,
    None: all.
    """

    def __init__(
        self,
        spec: ConversationSpec,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        rule: MaskRule,
        aligner: ConversationAligner | None = None,
        rows: RowFilter | None = None,
    ) -> None:
        self._spec = spec
        self._rows = rows
        self._tokenizer = tokenizer
        self._rule = rule
        self._finder = ResponseFinder(template)
        self._aligner = aligner

    @property
    def has_teacher(self) -> bool:
        """Whether blocks have the columns of a teacher with a tokenizer of its own."""
        return self._aligner is not None

    def __call__(self, block: RowBlock) -> PreparedBlock:
        """The conversations of a block. A bad row raises nothing and is listed in `problems`."""
        found: list[_RenderedRow] = []
        problems: list[tuple[int, str]] = []
        rows = 0
        for row, content in rows_of(block):
            if isinstance(content, str):
                rows += 1
                problems.append((row, content))
                continue
            if self._rows is not None and not self._rows.selects(content):
                continue
            rows += 1
            try:
                conversation = conversation_of(content, self._spec)
                digest = conversation.digest()
                rendered = self._rendered(conversation)
                other = None if self._aligner is None else self._aligner.render(conversation)
            except BadConversationError as error:
                problems.append((row, str(error)))
                continue
            found.append(_RenderedRow(row, conversation, rendered, digest, other))
        return self._encoded(block, found, tuple(problems), rows)

    def _rendered(self, conversation: Conversation) -> Rendered:
        try:
            return self._finder.find(
                conversation.messages,
                conversation.tools,
                with_contents=self._aligner is not None,
            )
        except BadConversationError as error:
            if not conversation.dropped:
                raise
            raise BadConversationError(
                f"{error} (messages are counted without the {conversation.dropped} before the "
                "first prompt)"
            ) from error

    def _encoded(
        self,
        block: RowBlock,
        found: Sequence[_RenderedRow],
        problems: tuple[tuple[int, str], ...],
        rows: int,
    ) -> PreparedBlock:
        encodings = encode_rendered(self._tokenizer, [one.rendered.text for one in found])
        flags = [
            label_flags(encoding, one.rendered, one.conversation.weights, self._rule)
            for one, encoding in zip(found, encodings, strict=True)
        ]
        teacher = None
        trained = [own[1:] & KD_TRAINED > 0 for own in flags]
        if self._aligner is not None:
            teacher, trained = _aligned(self._aligner, found, encodings, flags)
        index = np.zeros(len(found), INDEX_TYPE)
        stop = ce_labels = 0
        for place, one in enumerate(found):
            stop += len(flags[place])
            ce_labels += int(np.count_nonzero(flags[place][1:] & CE_TRAINED))
            number = int.from_bytes(one.digest, "big")
            labels = int(np.count_nonzero(trained[place]))
            index[place] = (stop, one.row, number, block.file, labels)
        return PreparedBlock(
            tokens_n=_joined([encoding.ids_n for encoding in encodings]),
            flags_n=np.concatenate(flags) if flags else np.zeros(0, np.uint8),
            index=index,
            problems=problems,
            rows=rows,
            ce_labels=ce_labels,
            file=block.file,
            unclosed=sum(not one.rendered.is_closed for one in found),
            dropped=sum(one.conversation.dropped for one in found),
            unseen=sum(lacks_context(one.conversation, one.rendered) for one in found),
            teacher_unseen=sum(
                one.of_teacher is not None and lacks_context(one.conversation, one.of_teacher)
                for one in found
            ),
            teacher=teacher,
        )


def lacks_context(conversation: Conversation, rendered: Rendered) -> bool:
    """Whether the template leaves out a system message, a question, or a tool's name."""
    parts = [one["content"] for one in conversation.messages if one["role"] in _PROMPTS]
    functions = (tool.get("function", tool) for tool in conversation.tools or ())
    parts += [one.get("name") for one in functions if isinstance(one, dict)]
    return any(isinstance(one, str) and one.strip() not in rendered.text for one in parts)


def _aligned(
    aligner: ConversationAligner,
    found: Sequence[_RenderedRow],
    encodings: Sequence[Encoding],
    flags: Sequence[NDArray[np.uint8]],
) -> tuple[TeacherColumns, list[NDArray[np.bool_]]]:
    """The teacher's columns, and of each conversation's labels whether they are in a chunk."""
    pairs = [(one.rendered, one.of_teacher) for one in found if one.of_teacher is not None]
    sides = aligner.aligned(pairs, encodings, flags)
    columns = TeacherColumns(
        chunks_n=_joined([side.chunks_n for side in sides]),
        tokens_m=_joined([side.tokens_m for side in sides]),
        chunks_m=_joined([side.chunks_m for side in sides]),
        stops=np.cumsum([len(side.tokens_m) for side in sides], dtype=np.int64),
        unaligned=tuple(
            (one.row, side.problem)
            for one, side in zip(found, sides, strict=True)
            if side.problem is not None
        ),
    )
    return columns, [side.chunks_n[1:] != NO_CHUNK for side in sides]


def _joined(parts: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(parts, dtype=np.int32) if parts else np.zeros(0, np.int32)


def label_flags(
    encoding: Encoding, rendered: Rendered, weights: Sequence[float], rule: MaskRule
) -> NDArray[np.uint8]:
    """Loss-mask flags of a conversation's tokens as labels: uint8 `[n]`, as in `Sample`.

    A token belongs to a response if one of its characters does. A token that holds the end
    of a prompt and the beginning of its response is therefore trained. A token without characters
    belongs to the response that begins there. Messages of weight 0 are not trained; with
    `only_last` only the last response is.
    """
    starts_n, stops_n = _covered(encoding)
    untrained = KD_TRAINED if rule.distill_on_prompt else 0
    flags_n = np.full(len(starts_n), untrained, np.uint8)
    is_empty_n = starts_n == stops_n
    last = max(rendered.spans, default=-1)
    for message, (start, stop) in rendered.spans.items():
        if weights[message] == 0 or (rule.only_last and message != last):
            continue
        inside_n = (stops_n > start) & (starts_n < stop) | is_empty_n & (starts_n == start)
        flags_n[inside_n] = FULLY_TRAINED | weight_flag(weights[message])
    return flags_n


def _covered(encoding: Encoding) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The character span of each token, with the spaces that its offsets leave out restored.

    Byte-level tokenizers trim spaces off the offsets, which leaves a token of spaces empty. Such
    a token gets the characters between its neighbours.
    """
    starts_n, stops_n = encoding.starts_n, encoding.stops_n
    before_n = np.concatenate([np.zeros(1, np.int32), stops_n[:-1]])[: len(stops_n)]
    is_trimmed_n = (starts_n == stops_n) & (before_n < starts_n)
    return np.where(is_trimmed_n, before_n, starts_n), stops_n


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids to continue, and the ids that end the continuation.

    has_begin: whether the first id is a begin-of-text token before the text.
    """

    ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    has_begin: bool = False

    @property
    def text_ids(self) -> tuple[int, ...]:
        """The ids of the text."""
        return self.ids[1:] if self.has_begin else self.ids


def plain_prompt(tokenizer: Tokenizer, text: str, *, add_bos: bool | None = None) -> EncodedPrompt:
    """Return a text as the beginning of a document; the tokenizer's `end_ids` stop.

    add_bos: as `data.add_bos`. Raises ConfigError if there is nothing to begin with, and DataError
    as `begin_token`.
    """
    begin = begin_token(tokenizer, add_bos)
    ids = ([] if begin is None else [begin]) + tokenizer.encode_batch([text])[0].tolist()
    if not ids:
        raise ConfigError("--prompt is empty: give at least one character")
    return EncodedPrompt(tuple(ids), tokenizer.end_ids, begin is not None)


def chat_prompt(tokenizer: Tokenizer, text: str, *, system: str | None = None) -> EncodedPrompt:
    """Return a user message up to the response; `end_ids` and the template's end of a turn stop.

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
    ends = {*tokenizer.end_ids, *_ends_of_turn(template, tokenizer, messages)}
    return EncodedPrompt(tuple(ids), tuple(sorted(ends)))


def response_prompts(
    tokenizer: Tokenizer, conversations: Sequence[tuple[list[dict[str, Any]], list[Any] | None]]
) -> list[tuple[int, ...] | str]:
    """Return the ids of each conversation up to a response, or why there are none.

    A conversation is its messages and its tools. The tokenizer has a chat template.
    """
    template = chat_template(ConversationSpec(), tokenizer)
    found: list[tuple[int, ...] | str] = []
    for messages, tools in conversations:
        try:
            text = _up_to_response(template, messages, tools)
            ids = encode_rendered(tokenizer, [text])[0].ids_n
            found.append(tuple(ids.tolist()) or "it has no token")
        except (BadConversationError, DataError) as error:
            found.append(str(error))
    return found


def _up_to_response(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None
) -> str:
    """Return the text of messages up to a response, in the first form that the template writes.

    Raises BadConversationError: it writes none.
    """
    refusal: BadConversationError | None = None
    for form in message_forms(messages):
        try:
            text = template.render(form, tools, add_generation_prompt=True)
        except BadConversationError as error:
            refusal = refusal or error
            continue
        if not writes_null(template, form, tools, text):
            return text
    assert refusal is not None, "a null that is written can be left out"
    raise refusal


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
