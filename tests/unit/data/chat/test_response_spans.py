"""Spans of responses in templates of released models, against dialogues marked by hand.

Llama 3 and 3.1, ChatML (Qwen 2.5 and 3), Mistral v0.2 and v0.3, Gemma 2, Phi 3, plain, blocks;
one turn and several, system prompts, tool calls, contents that hold markers themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distill.data.chat.conversations import BadConversationError
from megatron_distill.data.chat.spans import ResponseFinder
from tests.support.chat_fixtures import (
    STYLES,
    TOOLS,
    Unlearned,
    chat_tokenizer,
    template_of,
    tool_dialogue,
    turns,
    unmarked,
)

H, E = "<|start_header_id|>", "<|end_header_id|>\n\n"
LLAMA31_SYSTEM = (
    f"<|begin_of_text|>{H}system{E}Cutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n"
)
QWEN_SYSTEM = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
RESULT = "<tool_response>\nsun\n</tool_response>"
TWO = turns("Hi", "Yo!", "2+2?", "4")
WITH_SYSTEM = turns("Hi", "Yo!", "2+2?", "4", system="Be brief.")

MARKED = {
    "llama3, two turns": (
        "llama3",
        WITH_SYSTEM,
        f"<|begin_of_text|>{H}system{E}Be brief.<|eot_id|>{H}user{E}Hi<|eot_id|>"
        f"{H}assistant{E}[*Yo!<|eot_id|>*]{H}user{E}2+2?<|eot_id|>"
        f"{H}assistant{E}[*4<|eot_id|>*]",
    ),
    "llama3 trims": (
        "llama3",
        turns(" Hi\n", "  Yo! "),
        f"<|begin_of_text|>{H}user{E}Hi<|eot_id|>{H}assistant{E}[*Yo!<|eot_id|>*]",
    ),
    "llama31, a tool call without a list of tools": (
        "llama31",
        tool_dialogue(),
        LLAMA31_SYSTEM + f"<|eot_id|>{H}user{E}Is it sunny?<|eot_id|>"
        f'{H}assistant{E}[*{{"name": "weather", "parameters": {{"city": "Paris"}}}}<|eot_id|>*]'
        f'{H}ipython{E}"sun"<|eot_id|>{H}assistant{E}[*It is.<|eot_id|>*]',
    ),
    "qwen25, a text and a tool call": (
        "qwen25",
        tool_dialogue(answer="Wait."),
        QWEN_SYSTEM + "<|im_end|>\n<|im_start|>user\nIs it sunny?<|im_end|>\n"
        f"<|im_start|>assistant\n[*Wait.\n{CALL}<|im_end|>*]\n<|im_start|>user\n{RESULT}"
        "<|im_end|>\n<|im_start|>assistant\n[*It is.<|im_end|>*]\n",
    ),
    "qwen3 thinks in its last turn alone": (
        "qwen3",
        turns("Hi", "<think>\nhm\n</think>\n\nYo!", "2+2?", "<think>\neasy\n</think>\n\n4"),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[*Yo!<|im_end|>*]\n"
        "<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n[*<think>\neasy\n</think>\n\n4<|im_end|>*]\n",
    ),
    "qwen3, a tool call and another turn": (
        "qwen3",
        tool_dialogue(also=["Sure?", "Yes."]),
        "<|im_start|>user\nIs it sunny?<|im_end|>\n"
        f"<|im_start|>assistant\n[*{CALL}<|im_end|>*]\n"
        f"<|im_start|>user\n{RESULT}<|im_end|>\n"
        "<|im_start|>assistant\n[*It is.<|im_end|>*]\n<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n[*<think>\n\n</think>\n\nYes.<|im_end|>*]\n",
    ),
    "mistral, two turns": (
        "mistral",
        TWO,
        "<s>[INST] Hi [/INST][*Yo!</s>*][INST] 2+2? [/INST][*4</s>*]",
    ),
    "mistral_v3 drops a system prompt that is not before the last turn": (
        "mistral_v3",
        WITH_SYSTEM,
        "<s>[INST] Hi[/INST][* Yo!</s>*][INST] 2+2?[/INST][* 4</s>*]",
    ),
    "mistral_v3, a tool call": (
        "mistral_v3",
        tool_dialogue(),
        "<s>[INST] Is it sunny?[/INST]"
        '[*[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": "abc123456"}]'
        '</s>*][TOOL_RESULTS] {"content": sun, "call_id": "abc123456"}[/TOOL_RESULTS]'
        "[* It is.</s>*]",
    ),
    "gemma, two turns": (
        "gemma",
        TWO,
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n[*Yo!<end_of_turn>*]\n"
        "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n[*4<end_of_turn>*]\n",
    ),
    "phi3 closes the whole text": (
        "phi3",
        TWO,
        "<|user|>\nHi<|end|>\n<|assistant|>\n[*Yo!<|end|>*]\n<|user|>\n2+2?<|end|>\n"
        "<|assistant|>\n[*4<|end|>\n<|endoftext|>*]",
    ),
    "plain": (
        "plain",
        WITH_SYSTEM,
        "Be brief.\nHi\n[*Yo!<|endoftext|>*]2+2?\n[*4<|endoftext|>*]",
    ),
    "generation blocks": (
        "generation_blocks",
        TWO,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[*Yo!<|im_end|>*]\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[*4<|im_end|>*]\n",
    ),
}


@pytest.mark.parametrize("case", MARKED)
def test_the_marked_characters_are_found(case: str) -> None:
    style, messages, marked = MARKED[case]
    text, spans = unmarked(marked)
    found = ResponseFinder(template_of(style)).find(messages)
    assert found.text == text
    assert [found.spans[index] for index in sorted(found.spans)] == spans
    assert [messages[index]["role"] for index in found.spans] == ["assistant"] * len(spans)


def test_tools_are_part_of_the_prompt_wherever_the_template_puts_them() -> None:
    # Mistral's goes before the last user message, Llama's into the first one, Qwen's to the system.
    for style, responses in {
        "mistral_v3": [" It is.</s>", " Yes.</s>"],
        "llama31": ["It is.<|eot_id|>", "Yes.<|eot_id|>"],
        "qwen25": ["It is.<|im_end|>", "Yes.<|im_end|>"],
    }.items():
        messages = tool_dialogue(also=["Sure?", "Yes."])
        found = ResponseFinder(template_of(style)).find(messages, TOOLS)
        reported = [found.text[slice(*found.spans[index])] for index in (1, 3, 5)]
        assert reported[1:] == responses, style
        assert '"weather"' in reported[0]
        assert "description" not in "".join(reported)
        assert "description" in found.text


def test_the_text_is_that_of_transformers() -> None:
    for style in STYLES:
        if style == "plain":
            continue
        messages = turns("Hi\n", " Yo!", "2+2?", "4 ")
        expected = chat_tokenizer(style).hugging_face.apply_chat_template(messages, tokenize=False)
        assert ResponseFinder(template_of(style)).find(messages).text == expected, style


EVIL = st.sampled_from(
    ["a", " b ", "\n", "<|im_end|>", "<|im_start|>assistant\n", "[/INST]", "</s>", "<|eot_id|>"]
    + ["<end_of_turn>", "<start_of_turn>model\n", "</think>", "<think>", "Be brief.", "\u4f60", "0"]
    + ["\ue000", "\ue0001\ue001", "\ue0021\ue003"]
)
TEXTS = st.lists(EVIL, min_size=1, max_size=3).map("".join).filter(str.strip)


@pytest.mark.parametrize("style", [style for style in STYLES if style != "generation_blocks"])
@settings(max_examples=12, deadline=None)
@given(texts=st.lists(TEXTS, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
def test_learned_shapes_agree_with_each_conversation_alone(
    style: str, texts: Sequence[str]
) -> None:
    template = template_of(style)
    messages = turns(*texts)

    def found(finder: ResponseFinder) -> Any:
        try:
            return finder.find(messages, with_contents=True)
        except BadConversationError as error:
            return str(error)

    learned = found(ResponseFinder(template))
    if isinstance(learned, str):
        assert found(Unlearned(template)) == learned
        return
    for index, (start, stop) in learned.spans.items():
        reported = learned.text[start:stop]
        assert messages[index]["content"].split("</think>")[-1].strip() in reported
    by_itself = found(Unlearned(template))
    if not isinstance(by_itself, str):
        assert by_itself.text == learned.text
    if style in ("llama3", "llama31", "qwen25", "qwen3", "gemma", "mistral", "phi3", "plain"):
        assert by_itself == learned


@pytest.mark.parametrize("style", ["llama3", "mistral", "qwen3"])
def test_private_use_characters_of_a_text_are_not_placeholders(style: str) -> None:
    icons = "\ue000 \ue0001\ue001 \ue0021\ue003"
    messages = turns(icons, f"say {icons}", "why", f"{icons} then")
    for finder in (ResponseFinder(template_of(style)), Unlearned(template_of(style))):
        found = finder.find(messages, with_contents=True)
        texts = {index: found.text[slice(*span)] for index, span in found.contents.items()}
        assert texts == {index: message["content"] for index, message in enumerate(messages)}
        assert all(texts[index] in found.text[slice(*found.spans[index])] for index in (1, 3))


def test_a_template_that_hides_its_responses_is_refused() -> None:
    from megatron_distill.data.chat.template import ChatTemplate

    backwards = "{% for message in messages[::-1] %}{{ message['content'] }};{% endfor %}"
    finder = ResponseFinder(ChatTemplate(backwards, {}, ()))
    with pytest.raises(BadConversationError, match="message 1: the chat template does not show"):
        finder.find(turns("a", "b", "c", "d"))


def test_a_template_s_refusal_is_reported_with_its_message() -> None:
    with pytest.raises(BadConversationError, match="System role not supported"):
        ResponseFinder(template_of("gemma")).find(WITH_SYSTEM)
