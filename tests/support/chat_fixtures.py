"""Chat templates as released with models, tokenizers with their special tokens, marked dialogues.

A marked text has `[*` and `*]` around each response, set by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_distill.data.chat.conversations import ConversationSpec
from megatron_distill.data.chat.spans import ResponseFinder
from megatron_distill.data.chat.template import PLAIN_SOURCE, ChatTemplate, special_texts
from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_distill.data.tokenizers.open import train_bpe

FOLDER = Path(__file__).with_name("chat_templates")


@dataclass(frozen=True)
class Style:
    """The special tokens of a model family."""

    bos: str | None
    eos: str
    others: tuple[str, ...] = ()


_CHATML = Style(None, "<|im_end|>", ("<|im_start|>", "<|endoftext|>"))
_LLAMA = Style(
    "<|begin_of_text|>",
    "<|eot_id|>",
    ("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"),
)
STYLES: Mapping[str, Style] = {
    "llama3": _LLAMA,
    "llama31": _LLAMA,
    "qwen25": _CHATML,
    "qwen3": _CHATML,
    "generation_blocks": _CHATML,
    "mistral": Style("<s>", "</s>"),
    "mistral_v3": Style(
        "<s>",
        "</s>",
        (
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
    ),
    "phi3": Style(None, "<|endoftext|>", ("<|user|>", "<|assistant|>", "<|end|>")),
    "gemma": Style("<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>")),
    "plain": Style(None, "<|endoftext|>"),
}


@cache
def chat_tokenizer(style: str) -> HuggingFaceTokenizer:
    """A small byte-level BPE with the special tokens of a style, and its template."""
    texts = ["the assistant says hello, what is the weather in Paris? It is sunny there."] * 8
    return _of_style(style, texts, size=300, name=style)


def other_tokenizer(style: str) -> HuggingFaceTokenizer:
    """A tokenizer of a style with other merges than `chat_tokenizer`."""
    texts = ["say ask why not 中文", "sunny weather or hello"] * 5
    return _of_style(style, texts, size=290, name=f"other {style}")


def _of_style(style: str, texts: list[str], *, size: int, name: str) -> HuggingFaceTokenizer:
    named = STYLES[style]
    hugging_face = train_bpe(texts, vocab_size=size).hugging_face
    hugging_face.add_special_tokens(
        {
            "eos_token": named.eos,
            "additional_special_tokens": list(named.others),
            **({"bos_token": named.bos} if named.bos else {}),
        }
    )
    if style != "plain":
        hugging_face.chat_template = (FOLDER / f"{style}.jinja").read_text()
    return HuggingFaceTokenizer(hugging_face, name=name)


def conversations(count: int, response: str) -> list[dict[str, Any]]:
    """Conversations of one to three turns, each with its own content in place of `{}`."""
    found = []
    for index in range(count):
        texts = []
        for turn in range(1 + index % 3):
            place = f"{index}.{turn}"
            texts += [f"ask {place} " + "why " * (index % 5), response.format(place)]
        found.append({"messages": turns(*texts)})
    return found


def conversation_spec(path: Path, **changes: Any) -> SourceSpec:
    """A source of conversations."""
    return SourceSpec("jsonl", (str(path),), conversation=ConversationSpec(**changes))


def template_of(style: str, **options: Any) -> ChatTemplate:
    tokenizer = chat_tokenizer(style)
    special, markers = special_texts(tokenizer)
    if style == "plain":
        return ChatTemplate(PLAIN_SOURCE, special, markers, {"separator": "\n", **options})
    return ChatTemplate(tokenizer.hugging_face.chat_template, special, markers, options)


def turns(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """User and assistant in turn, after a system message if there is one."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *messages] if system else messages


CALL_ID = "abc123456"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "now", "parameters": {"type": "object"}},
    }
]


def tool_dialogue(*, answer: str | None = "", also: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A question, a call of a tool, its result and the answer; then perhaps more turns."""
    call = {"name": "weather", "arguments": {"city": "Paris"}}
    return [
        {"role": "user", "content": "Is it sunny?"},
        {
            "role": "assistant",
            "content": answer,
            "tool_calls": [{"type": "function", "function": call, "id": CALL_ID}],
        },
        {"role": "tool", "content": "sun", "tool_call_id": CALL_ID},
        {"role": "assistant", "content": "It is."},
        *turns(*also),
    ]


def unmarked(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without its marks, and the spans that were marked."""
    pieces = re.split(r"\[\*|\*\]", marked)
    spans, length = [], 0
    for number, piece in enumerate(pieces):
        if number % 2:
            spans.append((length, length + len(piece)))
        length += len(piece)
    return "".join(pieces), spans


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Unlearned(ResponseFinder):
    """Looks at every conversation by itself."""

    def _shape(self, roles: tuple[str, ...]) -> None:
        return None
