"""Differences of templates: headers that go on, turns without an end, forms of tool calls."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_distill.data.chat.conversations import BadConversationError, ConversationSpec
from megatron_distill.data.chat.spans import ResponseFinder
from megatron_distill.data.chat.template import ChatTemplate, chat_template
from megatron_distill.data.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.support.chat_fixtures import STYLES, TOOLS, template_of, tool_dialogue, turns

THOUGHT = "<think>\nhm\n</think>\n\n"
# The last turn has a thought, empty or not, as in Qwen 3.5; `prompt` is what it is asked by.
THINKING = """{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and loop.last %}
{%- set parts = content.split('</think>') %}
{%- set thought = parts[0].split('<think>')[-1].strip() if parts | length > 1 else '' %}
{%- set content = '<think>\\n' + thought + '\\n</think>\\n\\n' + parts[-1].lstrip() %}
{%- elif message.role == 'assistant' %}
{%- set content = content.split('</think>')[-1].lstrip() %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' + prompt }}{% endif %}"""
# An empty thought in one line that no prompt ends with, as in Nemotron 3.
EMPTY_THOUGHT = """{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '<think>' not in content %}
{%- set content = '<think></think>' + content %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
# No end of a turn, as in GLM 4; thoughts in the last turn alone, so that others are not prefixes.
OPEN_ENDED = """{%- for message in messages %}
{%- set content = message.content or '' %}
{%- if message.role == 'tool' %}{{- '<|observation|>\\n' + content }}
{%- else %}
{%- if '</think>' in content and not loop.last %}
{%- set content = content.split('</think>')[-1].lstrip() %}
{%- endif %}
{{- '<|' + message.role + '|>\\n' + content }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.arguments | tojson + '</tool_call>' }}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}"""
# Arguments are put together as texts and no content is none, as in DeepSeek's.
AS_TEXT = """{%- for message in messages %}
{{- '<|' + message.role + '|>' }}
{%- if message.content is none %}
{%- for call in message.tool_calls %}
{{- '<|call|>' + call.function.name + '\\n' + call.function.arguments + '<|done|>' }}
{%- endfor %}
{%- else %}{{- message.content }}{% endif %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""
# Writes Jinja's word for a null.
WRITES_NULL = """{%- for message in messages %}
{{- '<|' + message.role + '|>' + message.content | string }}
{%- for call in message.tool_calls or [] %}
{{- ' ' + call.function.arguments | tojson }}
{%- endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""

_CHATML = ("<|im_start|>", "<|im_end|>")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_ROLES = ("<|observation|>", "<|assistant|>", "<|system|>", "<|user|>", "<|tool|>")


def finder(
    source: str, markers: tuple[str, ...], *, has_tags: bool = False, **options: Any
) -> ResponseFinder:
    tags = _TAGS if has_tags else ()
    return ResponseFinder(ChatTemplate(source, {}, (*markers, *tags), options))


def responses(finder: ResponseFinder, messages: Any, tools: Any = None) -> list[str]:
    found = finder.find(messages, tools)
    return [found.text[slice(*found.spans[index])] for index in sorted(found.spans)]


@pytest.mark.parametrize("has_tags", [False, True])
@pytest.mark.parametrize(
    ("prompt", "plain", "thinking"),
    [
        ("<think>\n", "\n</think>\n\n4<|im_end|>", "hm\n</think>\n\n4<|im_end|>"),
        ("<think>\n\n</think>\n\n", "4<|im_end|>", "hm\n</think>\n\n4<|im_end|>"),
    ],
)
def test_a_header_is_not_a_response_where_its_prompt_goes_on(
    prompt: str, plain: str, thinking: str, has_tags: bool
) -> None:
    one = finder(THINKING, _CHATML, has_tags=has_tags, prompt=prompt)
    assert responses(one, turns("Hi", "Yo!", "2+2?", "4")) == ["Yo!<|im_end|>", plain]
    assert responses(one, turns("Hi", f"{THOUGHT}Yo!", "2+2?", "4")) == ["Yo!<|im_end|>", plain]
    assert responses(one, turns("Hi", "Yo!", "2+2?", f"{THOUGHT}4")) == ["Yo!<|im_end|>", thinking]
    assert responses(one, turns("2+2?", f"{THOUGHT}4")) == [thinking]


@pytest.mark.parametrize("has_tags", [False, True])
def test_an_empty_thought_that_the_prompt_does_not_write_belongs_to_the_response(
    has_tags: bool,
) -> None:
    one = finder(EMPTY_THOUGHT, _CHATML, has_tags=has_tags)
    empty = ["<think></think>Yo!<|im_end|>", "<think></think>4<|im_end|>"]
    assert responses(one, turns("Hi", "Yo!", "2+2?", "4")) == empty
    assert responses(one, turns("2+2?", f"{THOUGHT}4")) == ["hm\n</think>\n\n4<|im_end|>"]


@pytest.mark.parametrize("has_tags", [False, True])
def test_a_turn_without_an_end_is_ended_by_the_next_ones_first_token(has_tags: bool) -> None:
    one = finder(OPEN_ENDED, _ROLES, has_tags=has_tags)
    assert responses(one, turns("Hi", "Yo!", "2+2?", "4")) == ["Yo!<|user|>", "4"]
    # By what changes, because of the thought: the same.
    assert responses(one, turns("Hi", f"{THOUGHT}Yo!", "2+2?", "4")) == ["Yo!<|user|>", "4"]
    assert responses(one, turns("Hi", f"{THOUGHT}Yo!", "2+2?", f"{THOUGHT}4")) == [
        "Yo!<|user|>",
        f"{THOUGHT}4",
    ]
    call = '<tool_call>{"city": "Paris"}</tool_call><|observation|>'
    assert responses(one, tool_dialogue(), TOOLS) == [call, "It is."]
    # The header of another response ends no turn.
    twice = [*turns("Hi", "Yo!"), {"role": "assistant", "content": "4"}]
    assert responses(one, twice) == ["Yo!", "4"]


def test_a_conversation_shows_whether_its_last_response_is_ended() -> None:
    one = finder(OPEN_ENDED, _ROLES, has_tags=True)
    assert not one.find(turns("Hi", "Yo!", "2+2?", "4")).is_closed
    assert not one.find(tool_dialogue()[:2], TOOLS).is_closed  # by a call's tag alone
    assert one.find(turns("Hi", "Yo!", "2+2?")).is_closed
    assert one.find(turns("Hi")).is_closed
    for style in STYLES:
        assert ResponseFinder(template_of(style)).find(turns("Hi", "Yo!")).is_closed, style


def test_plain_turns_are_ended_by_an_end_of_document_that_is_not_special() -> None:
    words = tokenizers.Tokenizer(tokenizers.models.BPE({"<|endoftext|>": 0, "a": 1, "b": 2}, []))
    words.add_tokens([tokenizers.AddedToken("<|endoftext|>", special=False)])
    own = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=words), name="plain")
    assert (own.eos_id, own.special_ids) == (0, {})
    template = chat_template(ConversationSpec(chat_template="plain"), own)
    found = ResponseFinder(template).find(turns("a", "b"))
    assert found.text[slice(*found.spans[1])] == "b<|endoftext|>"
    assert found.is_closed


@pytest.mark.parametrize(
    ("style", "answer"),
    [
        ("llama3", None), ("llama3", ""), ("llama3", "Wait."), ("phi3", None), ("gemma", ""),
        ("mistral", "Wait."), ("generation_blocks", None),
    ],
)  # fmt: skip
def test_calls_that_the_template_does_not_write_are_refused_by_name(
    style: str, answer: str | None
) -> None:
    refusal = "message 1: the chat template does not write its tool calls; set"
    if style in ("gemma", "mistral"):
        refusal = "roles must alternate"
    with pytest.raises(BadConversationError, match=refusal):
        ResponseFinder(template_of(style)).find(tool_dialogue(answer=answer), TOOLS)


def test_the_second_of_two_calls_must_be_written_too() -> None:
    first_alone = WRITES_NULL.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]")
    messages = tool_dialogue()
    finder(first_alone, ("<|end|>", *_ROLES)).find(messages, TOOLS)
    messages[1]["tool_calls"] *= 2
    with pytest.raises(BadConversationError, match="message 1: .* does not write its tool calls"):
        finder(first_alone, ("<|end|>", *_ROLES)).find(messages, TOOLS)


def test_a_text_that_the_template_does_not_write_is_refused_by_name() -> None:
    of_parts = "{% for part in one.content %}{{ part.text }}{% endfor %}"
    parts = f"{{% for one in messages %}}{of_parts}<|end|>{{% endfor %}}"
    with pytest.raises(BadConversationError, match="message 1: .* does not write its content"):
        finder(parts, ("<|end|>",)).find(turns("Hi", "Yo!"))


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("arguments", [{"city": "Łódź"}, '{"city": "Łódź"}'])
def test_arguments_that_a_template_refuses_as_an_object_are_given_as_text(
    content: str | None, arguments: Any
) -> None:
    messages = tool_dialogue(answer=content)
    messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
    before = deepcopy(messages)
    one = finder(AS_TEXT, ("<|end|>", "<|call|>", "<|done|>", *_ROLES))
    call = '<|call|>weather\n{"city": "Łódź"}<|done|><|end|>'
    assert responses(one, messages, TOOLS) == [call, "It is.<|end|>"]
    assert messages == before


def test_a_null_is_given_to_the_template_and_never_written() -> None:
    one = finder(WRITES_NULL, ("<|end|>", *_ROLES))
    assert responses(one, tool_dialogue(answer=None), TOOLS) == [
        ' {"city": "Paris"}<|end|>',
        "It is.<|end|>",
    ]
    tells = WRITES_NULL.replace(
        "+ message.content | string",
        "+ (message.content if message.content is not none else '(no text)')",
    )
    asked = finder(tells, ("<|end|>", *_ROLES)).find(tool_dialogue(answer=None), TOOLS)
    assert '<|assistant|>(no text) {"city": "Paris"}<|end|>' in asked.text
