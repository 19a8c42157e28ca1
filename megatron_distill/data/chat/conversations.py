"""Rows of instruction data, in any supported layout, to one form: `Conversation`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from megatron_distill.data.text.documents import LINE_BYTES, content_digest
from megatron_distill.data.text.files import (
    DamagedFileError,
    InputFile,
    kind_of,
    record_batches,
)

ASSISTANT: Final = "assistant"
TOKENIZER_TEMPLATE: Final = "tokenizer"
PLAIN_TEMPLATE: Final = "plain"
# Role names of common corpora, mapped to those of chat templates.
ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": ASSISTANT,
    "gpt": ASSISTANT,
    "model": ASSISTANT,
    "bot": ASSISTANT,
    "chatbot": ASSISTANT,
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "ipython",
}
_PROMPT_SEPARATOR: Final = "\n\n"
SYSTEM_ROLES: Final = ("system", "developer")
LEADING_ASSISTANT: Final = ("drop", "keep", "refuse")


class BadConversationError(Exception):
    """A row is not a conversation, or the template refuses it; the message is the reason."""


@dataclass(frozen=True)
class ConversationSpec:
    """Columns of a row that hold the conversation, and the chat template that renders it.

    Rows hold a list of messages or, with `prompt_keys`, a prompt (text of these columns,
    joined by empty lines) and a response. chat_template: "tokenizer", "plain", or the path of a
    Jinja file. leading_assistant: one of LEADING_ASSISTANT, for responses before the first prompt.
    """

    messages_key: str = "messages"
    role_key: str = "role"
    content_key: str = "content"
    roles: Mapping[str, str] = field(default_factory=dict)
    prompt_keys: tuple[str, ...] = ()
    response_key: str = "response"
    system_key: str | None = None
    tools_key: str = "tools"
    weight_key: str = "weight"
    leading_assistant: str = "drop"
    chat_template: str = TOKENIZER_TEMPLATE
    separator: str = "\n"
    template_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The columns that a row must have, and those it may have."""
        if self.prompt_keys:
            system = (self.system_key,) if self.system_key else ()
            return (self.prompt_keys[0], self.response_key), (
                *self.prompt_keys[1:],
                *system,
                self.tools_key,
            )
        return (self.messages_key,), (self.tools_key,)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the form that chat templates take; `weights` holds each message's loss weight.

    dropped: number of responses before the row's first prompt that were left out.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    weights: list[float]
    dropped: int = 0

    def digest(self) -> bytes:
        """8 bytes that identify the content, independent of file, template and tokenizer.

        Raises BadConversationError: it holds half a surrogate pair.
        """
        # A missing content has one digest, whether the row holds null or "".
        messages = [{**message, "content": message["content"] or ""} for message in self.messages]
        content = json.dumps([messages, self.tools], sort_keys=True, ensure_ascii=False)
        try:
            return content_digest(content.encode("utf-8"))
        except UnicodeEncodeError:
            raise BadConversationError("it contains an unpaired surrogate; correct it") from None


def conversation_of(row: Mapping[str, Any], spec: ConversationSpec) -> Conversation:
    """The conversation in a row. Raises BadConversationError."""
    required, _ = spec.columns
    for key in required:
        if row.get(key) is None:
            keys = ", ".join(sorted(row)[:10]) or "none"
            raise BadConversationError(
                f"it has no {key!r} (its keys: {keys}); set `conversation` of the data source"
            )
    raw = _from_columns(row, spec) if spec.prompt_keys else row[spec.messages_key]
    if not isinstance(raw, list) or not raw:
        raise BadConversationError("its messages are not a list with at least one message")
    messages, weights = [], []
    for index, message in enumerate(raw):
        found, weight = _message(message, spec, index)
        messages.append(found)
        weights.append(weight)
    start, stop = _leading(messages, spec.leading_assistant)
    del messages[start:stop], weights[start:stop]
    return Conversation(messages, _tools(row.get(spec.tools_key)), weights, stop - start)


def _leading(messages: Sequence[Mapping[str, Any]], policy: str) -> tuple[int, int]:
    """The responses before the first prompt that are to be dropped, as a slice."""
    assert policy in LEADING_ASSISTANT, policy
    roles = [message["role"] for message in messages]
    start = next((at for at, role in enumerate(roles) if role not in SYSTEM_ROLES), len(roles))
    stop = next((at for at in range(start, len(roles)) if roles[at] != ASSISTANT), len(roles))
    if start == stop or policy == "keep":
        return start, start
    if policy == "refuse":
        raise BadConversationError(
            f"message {start} is a response without a prompt before it; correct the row, or set "
            "conversation.leading_assistant of the data source to drop or keep"
        )
    if stop == len(roles):
        raise BadConversationError(
            "all its messages are responses before the first prompt, which are dropped; set "
            "conversation.leading_assistant of the data source to keep to train them"
        )
    return start, stop


def _from_columns(row: Mapping[str, Any], spec: ConversationSpec) -> list[Any]:
    """The messages of prompt, response and system columns, each text or messages itself."""
    roles = (spec.role_key, spec.content_key)
    messages: list[Any] = []
    if spec.system_key and row.get(spec.system_key):
        messages.append({roles[0]: "system", roles[1]: row[spec.system_key]})
    parts = [row.get(key) for key in spec.prompt_keys]
    if isinstance(parts[0], list):
        messages += parts[0]
    else:
        texts = [_text(part, "the prompt") for part in parts if part]
        messages.append({roles[0]: "user", roles[1]: _PROMPT_SEPARATOR.join(texts)})
    response = row[spec.response_key]
    if isinstance(response, list):
        return messages + response
    return [*messages, {roles[0]: ASSISTANT, roles[1]: response}]


def _message(message: object, spec: ConversationSpec, index: int) -> tuple[dict[str, Any], float]:
    if not isinstance(message, dict):
        raise BadConversationError(f"message {index} is not an object but {kind_of(message)}")
    found = {key: value for key, value in message.items() if value is not None}
    name = found.pop(spec.role_key, None)
    role = spec.roles.get(name) or ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        known = ", ".join(sorted({*ROLES, *spec.roles}))
        raise BadConversationError(
            f"message {index} has the {spec.role_key} {name!r}, not one of {known}; correct it or "
            "add it to conversation.roles of the data source"
        )
    content = found.pop(spec.content_key, None)
    calls = _tool_calls(found.pop("tool_calls", None), index)
    if content is None and not calls:
        raise BadConversationError(f"message {index} has no {spec.content_key!r}")
    weight = _weight(found.pop(spec.weight_key, 1), index)
    text = None if content is None else _text(content or "", f"message {index}")
    ordered: dict[str, Any] = {"role": role, "content": text}
    if calls:
        ordered["tool_calls"] = calls
    return {**ordered, **found}, weight


def _weight(weight: object, index: int) -> float:
    if isinstance(weight, int | float) and math.isfinite(weight) and 0 <= weight <= 1:
        return float(weight)
    raise BadConversationError(
        f"message {index} has the weight {weight!r}; it must be a number from 0 to 1 (divide all "
        "weights by the largest)"
    )


def _text(content: object, where: str) -> str:
    """Content as text; parts of text are joined, other parts refused."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)  # type: ignore[arg-type]
        raise BadConversationError(f"{where} has a part that is not text")
    raise BadConversationError(f"{where} is not text but {kind_of(content)}")


def _tool_calls(calls: object, index: int) -> list[dict[str, Any]]:
    """Tool calls in the form that templates take: arguments as an object, not as JSON text."""
    if not calls:
        return []
    if isinstance(calls, str):
        calls = _parsed(calls, f"tool_calls of message {index}")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadConversationError(f"tool_calls of message {index} is not a list of objects")
    found = []
    for call in without_nulls(calls):
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadConversationError(f"a tool call of message {index} has no function name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parsed(arguments, f"the tool arguments of message {index}")
        rest = {key: value for key, value in call.items() if key not in ("function", "type")}
        if function is call:
            rest = {key: rest[key] for key in rest if key not in ("name", "arguments")}
        found.append({"type": "function", "function": {**function, "arguments": arguments}, **rest})
    return found


def _tools(tools: object) -> list[Any] | None:
    if isinstance(tools, str) and tools.strip():
        tools = _parsed(tools, "its tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise BadConversationError(f"its tools are not a list but {kind_of(tools)}")
    found = [_parsed(tool, "a tool") if isinstance(tool, str) else tool for tool in tools]
    if not all(isinstance(tool, dict) for tool in found):
        raise BadConversationError("a tool is not an object")
    return list(without_nulls(found))


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadConversationError(f"{what} is not valid JSON ({error})") from None


def without_nulls(value: Any) -> Any:
    """The value without null entries of objects; columns of tables add such entries."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    return value


def contents(conversation: Conversation) -> Sequence[str]:
    """The messages' contents, without a template."""
    return [str(message["content"]) for message in conversation.messages if message["content"]]


BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive rows of one file, the first of them with the number `first_row`, from 1.

    data: whole lines of JSON, or a table in Arrow's stream format. problem: the reason why the
    file cannot be read from here on; `data` is empty then.
    """

    file: int
    path: str
    first_row: int
    data: bytes
    is_table: bool = False
    problem: str | None = None


Row = tuple[int, dict[str, Any] | str]
"""A row's number and what it holds, or as text what is wrong with it."""


RowBlockReader = Callable[[int, Path, Sequence[str], Sequence[str]], Iterator[RowBlock]]
"""Reads a file, given its number, path, and the names of required and optional columns."""


def read_blocks(
    files: Sequence[Path],
    *,
    read: RowBlockReader,
    required: Sequence[str],
    optional: Sequence[str],
) -> Iterator[RowBlock]:
    """Yield the rows of all files in blocks of about BLOCK_BYTES.

    Raises DataError where a file cannot be opened, or a table has no column of a required name.
    """
    for number, path in enumerate(files):
        yield from read(number, path, required, optional)


def line_blocks(
    number: int,
    path: Path,
    required: Sequence[str],  # noqa: ARG001
    optional: Sequence[str],  # noqa: ARG001
) -> Iterator[RowBlock]:
    """Yield the blocks of a file of JSON lines."""
    row, carried = 1, b""
    file: InputFile | None = None
    try:
        file = InputFile(path)
        while data := file.read(BLOCK_BYTES):
            cut = data.rfind(b"\n") + 1
            if not cut:
                carried += data
                if len(carried) > LINE_BYTES:
                    raise DamagedFileError(
                        path, f"the line is longer than {LINE_BYTES} bytes; split it"
                    )
                continue
            lines, carried = carried + data[:cut], data[cut:]
            yield RowBlock(number, str(path), row, lines)
            row += lines.count(b"\n")
        if carried:
            yield RowBlock(number, str(path), row, carried)
    except DamagedFileError as error:
        yield RowBlock(number, str(path), row, b"", problem=error.reason)
    finally:
        if file is not None:
            file.close()


def table_blocks(
    number: int, path: Path, required: Sequence[str], optional: Sequence[str]
) -> Iterator[RowBlock]:
    """Yield the blocks of a Parquet or Arrow file."""
    import pyarrow as pa

    row = 0
    try:
        for row, batch in record_batches(path, required=required, optional=optional):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            data = sink.getvalue().to_pybytes()
            yield RowBlock(number, str(path), row + 1, data, is_table=True)
            row += batch.num_rows
    except DamagedFileError as error:
        yield RowBlock(number, str(path), row + 1, b"", problem=error.reason)


def rows_of(block: RowBlock) -> Iterator[Row]:
    """The rows of a block; empty lines are passed over."""
    if block.problem is not None:
        yield block.first_row, block.problem
    elif block.is_table:
        yield from _table_rows(block)
    else:
        for place, line in enumerate(block.data.split(b"\n")):
            if line and not line.isspace():
                yield block.first_row + place, _json_row(line)


def _json_row(line: bytes) -> dict[str, Any] | str:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"not valid UTF-8 ({error.reason}); convert the file to UTF-8"
    except (ValueError, RecursionError) as error:
        return f"not a JSON object ({error}); correct the line"
    return value if isinstance(value, dict) else f"not a JSON object but {kind_of(value)}"


def _table_rows(block: RowBlock) -> Iterator[Row]:
    import pyarrow as pa

    with pa.ipc.open_stream(block.data) as reader:
        rows = reader.read_all().to_pylist()
    for place, row in enumerate(rows):
        yield block.first_row + place, without_nulls(row)
