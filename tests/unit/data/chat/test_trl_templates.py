"""Every chat template of TRL's package: what of it is trained, and what TRL trains in its place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from megatron_distill.data.chat.conversations import (
    BadConversationError,
    ConversationSpec,
    conversation_of,
)
from megatron_distill.data.chat.encode import MaskRule, label_flags
from megatron_distill.data.chat.spans import ResponseFinder
from megatron_distill.data.chat.template import (
    ChatTemplate,
    chat_template,
    encode_rendered,
    message_forms,
    special_texts,
)
from megatron_distill.data.samples import FULLY_TRAINED
from tests.support.chat_fixtures import Unlearned
from tests.support.trl_templates import (
    CALLS,
    DIALOGUES,
    NAMES,
    TWINS,
    folder,
    sources,
    stops,
    tokenizer,
)

pytestmark = pytest.mark.skipif(
    folder() is None, reason="TRL with its chat templates is not installed (extra bench)"
)

# The dialogues that a template cannot render, and the error of each.
_ALTERNATE = "the chat template refuses it: Conversation roles must alternate"
_NO_CALLS = "message 1: the chat template does not write its tool calls; set"
_NO_TEXTS = "message [12]: the chat template does not write its (content|tool calls); set"
_NO_PARTS = "the chat template refuses it: "
_APART = "message 1: the chat template does not show where this response begins and ends"
_CALLS = dict.fromkeys(CALLS, _NO_CALLS)
_TEXTS = (
    dict.fromkeys(DIALOGUES, _NO_TEXTS)
    | dict.fromkeys(CALLS, _NO_PARTS)
    | {
        "text and call": _NO_TEXTS,
    }
)
_AFTER_THE_RESULT = {"text and call": _APART}  # the text stands behind the call's result
REFUSED: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("cohere", "cohere2", "gemma3"), dict.fromkeys(CALLS, _ALTERNATE)),
    "gemma": {
        **dict.fromkeys(CALLS, _ALTERNATE),
        "system": "the chat template refuses it: System role not supported",
    },
    **dict.fromkeys(("lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl"), _CALLS),
    "deepseek_r1_distill": {"text and call": _NO_CALLS},
    "gptoss": {"two calls": _NO_CALLS},  # the first one alone
    **dict.fromkeys(
        ("llama3_1", "llama3_2"),
        {"two calls": "the chat template refuses it: This model only supports single tool-calls"},
    ),
    **dict.fromkeys(("diffusion_gemma", "gemma4", "gemma4_v3"), _AFTER_THE_RESULT),
    **dict.fromkeys(("gemma4_v4", "gemma4_v5"), _AFTER_THE_RESULT),
    # These want contents as lists of parts, and write nothing of a text.
    **dict.fromkeys(("idefics3", "smolvlm"), _TEXTS),
    "llava_next": dict.fromkeys(DIALOGUES, _NO_PARTS),
}

# Text that one of the two trains, before or after the text that both train, and the reason.
Difference = tuple[str, str, str]
_LINE_END: Mapping[Difference, str] = {
    ("TRL", "after", "\n"): "the template's line end, after the token that stops the model",
}
_OPENED: Mapping[Difference, str] = {
    ("TRL", "before", "<think>\n"): "the generation prompt has it, so the model is given it",
}
_CLOSED: Mapping[Difference, str] = {
    ("TRL", "before", "<think>\n\n</think>\n\n"): "the generation prompt has it where no thought "
    "is wanted; in earlier turns the twin writes it and the template does not",
}
_HISTORY: Mapping[Difference, str] = {
    ("TRL", "before", "<think>\n\n</think>\n\n"): "only the twin writes it in earlier turns",
    ("TRL", "before", "<think>\nhm\n</think>\n\n"): "only the twin writes it in earlier turns",
}
_STARTED: Mapping[Difference, str] = {
    ("TRL", "before", "<|start|>assistant"): "the role header, which the prompt ends with",
}
_DEEPSEEK: Mapping[Difference, str] = {
    ("TRL", "before", "<｜Assistant｜>"): "the role header, which the prompt ends with",
    ("TRL", "before", "<｜tool▁outputs▁end｜>"): "the end of the tool's result, a prompt",
}
DIFFERENT: Mapping[str, Mapping[Difference, str]] = {
    "deepseekv3": _DEEPSEEK,
    "deepseek_r1_distill": {
        **_DEEPSEEK,
        ("TRL", "before", "<｜Assistant｜><think>\nhm\n</think>"): "only the twin writes thoughts",
    },
    "diffusion_gemma": {
        **_LINE_END,
        ("ours", "after", "<|tool_response>"): "the token that stops the model after a call",
    },
    "glm4moe": {
        ("TRL", "after", "<|user|>"): "only the twin ends the last turn, with the next one's token",
    },
    **dict.fromkeys(("gptoss", "muse_glimmer"), _STARTED),
    "qwen2_5": {
        **_LINE_END,
        ("TRL", "before", "\n"): "the line end of the role header, which the prompt ends with",
    },
    **dict.fromkeys(("gemma", "gemma3", "lfm2", "lfm2_v2", "phi3", "phi3_5"), _LINE_END),
    **dict.fromkeys(("qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl"), _LINE_END),
    "qwen3": _LINE_END | _HISTORY,
    **dict.fromkeys(("qwen3_5_think", "qwen3_6"), _LINE_END | _HISTORY | _OPENED),
    "qwen3_5_nothink": _LINE_END | _HISTORY | _OPENED | _CLOSED,
    "qwen3_8": _LINE_END | _OPENED,
    **{name: _LINE_END | _OPENED for name in TWINS if name.startswith("nemotron")},
}


@cache
def ours(name: str, dialogue: str, *, has_tags: bool) -> list[str] | str:
    """The texts of the trained tokens, in runs, or why the dialogue is refused."""
    messages, tools = DIALOGUES[dialogue]
    own = tokenizer(name, has_tags=has_tags)
    try:
        rendered = ResponseFinder(chat_template(ConversationSpec(), own)).find(messages, tools)
    except BadConversationError as error:
        return str(error)
    (encoding,) = encode_rendered(own, [rendered.text])
    flags_n = label_flags(encoding, rendered, [1.0] * len(messages), MaskRule())
    return runs(own, encoding.ids_n.tolist(), (flags_n == FULLY_TRAINED).tolist())


def trained_by_trl(name: str, dialogue: str) -> list[str]:
    """Masks of transformers with the twin; calls are in a form that the twin writes."""
    messages, tools = DIALOGUES[dialogue]
    own = tokenizer(name, has_tags=True)
    named, markers = special_texts(own)
    twin = ChatTemplate(sources()[f"{name}_training"], named, markers)
    for form in message_forms(messages):
        try:
            text, blocks = twin.render_with_spans(form, tools)
        except BadConversationError:
            continue
        if "None" not in text and ("Paris" in text) == (dialogue in CALLS):
            break
    else:
        pytest.fail(f"{name}: no form of {dialogue!r} is one for TRL's template")
    encoded = own.hugging_face(text, add_special_tokens=False)
    is_trained = [0] * len(encoded["input_ids"])
    for start, stop in blocks:
        first, last = encoded.char_to_token(start), encoded.char_to_token(stop - 1)
        is_trained[first : last + 1] = [1] * (last + 1 - first)
    return runs(own, encoded["input_ids"], is_trained)


def runs(own: Any, ids: Sequence[int], is_trained: Sequence[int]) -> list[str]:
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], is_trained, [0]]).astype(int)))
    return [own.decode(ids[a:b]) for a, b in zip(bounds[::2], bounds[1::2], strict=True)]


def differences(trained_here: Sequence[str], twins: Sequence[str]) -> set[Difference]:
    found: set[Difference] = set()
    for one, other in zip(trained_here, twins, strict=True):
        who, longer, shorter = ("TRL", other, one) if one in other else ("ours", one, other)
        assert shorter in longer, (one, other)
        before, _, after = longer.partition(shorter)
        found |= {
            (who, place, text) for place, text in (("before", before), ("after", after)) if text
        }
    return found


@pytest.mark.parametrize("name", NAMES)
def test_responses_are_trained_whole_and_nothing_else_is(name: str) -> None:
    refused = REFUSED.get(name, {})
    for dialogue, (messages, _) in DIALOGUES.items():
        found = ours(name, dialogue, has_tags=False)
        if isinstance(found, str):
            assert dialogue in refused, (dialogue, found)
            assert re.match(refused[dialogue], found), (dialogue, found)
            continue
        assert dialogue not in refused, (dialogue, found)
        responses = [message for message in messages if message["role"] == "assistant"]
        for place, (text, message) in enumerate(zip(found, responses, strict=True)):
            called = message.get("tool_calls", ())
            wanted = [call["function"]["arguments"]["city"] for call in called]
            for part in wanted or message["content"].split("\n")[-1:]:
                assert part in text, (dialogue, text)
            # Muse writes a header before each of several calls, which is the model's to write.
            headers = len(called) - 1 if name == "muse_glimmer" and called else 0
            assert text.count("assistant") == headers, (dialogue, text)
            assert "model" not in text, (dialogue, text)
            # GLM's stop token is the next turn's first one.
            is_open = name.startswith("glm4") and place + 1 == len(found)
            assert text.rstrip("\n").endswith(stops(name)) != is_open, (dialogue, text)
        prompts = [message["content"] for message in messages if message not in responses]
        assert not [one for one in prompts for text in found if one in text], (dialogue, found)


# The others have their tags as tokens beside their twins below.
WITHOUT_TWIN = [name for name in NAMES if name not in TWINS]


@pytest.mark.parametrize("name", [*WITHOUT_TWIN, *TWINS[::8]])
def test_neither_tags_nor_earlier_conversations_change_a_response(name: str) -> None:
    # The tags of thoughts are special tokens or not; each conversation is looked at by itself.
    template = chat_template(ConversationSpec(), tokenizer(name, has_tags=False))
    learned, unlearned = ResponseFinder(template), Unlearned(template)
    for dialogue, (messages, _) in DIALOGUES.items():
        without = ours(name, dialogue, has_tags=False)
        assert ours(name, dialogue, has_tags=True) == without, dialogue
        if dialogue in ("system", "thought last", "thought first") and isinstance(without, list):
            assert learned.find(messages) == unlearned.find(messages), dialogue


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_the_twin_trains_the_same_except_the_table_s_rows(name: str) -> None:
    refused, found = REFUSED.get(name, {}), set[Difference]()
    for dialogue in DIALOGUES:
        if dialogue not in refused:
            trained_here = ours(name, dialogue, has_tags=True)
            assert not isinstance(trained_here, str), (dialogue, trained_here)
            found |= differences(trained_here, trained_by_trl(name, dialogue))
    assert found == DIFFERENT.get(name, {}).keys()


GREETED = {"messages": [{"role": "assistant", "content": "Welcome."}, *DIALOGUES["one turn"][0]]}
# These want turns of two roles, one after the other.
ALTERNATING = ("cohere", "cohere2", "gemma", "gemma3")


# Of turns with a header, in brackets, of two roles alone, with thoughts and with channels.
@pytest.mark.parametrize("name", ["llama3_1", "gemma", "cohere2", "qwen3", "gptoss", "phi3"])
def test_a_response_before_the_first_prompt_is_dropped_or_trained_with_every_template(
    name: str,
) -> None:
    template = chat_template(ConversationSpec(), tokenizer(name, has_tags=True))
    finder = ResponseFinder(template)
    dropped = conversation_of(GREETED, ConversationSpec())
    assert finder.find(dropped.messages) == finder.find(DIALOGUES["one turn"][0])
    kept = conversation_of(GREETED, ConversationSpec(leading_assistant="keep")).messages
    if name in ALTERNATING:
        with pytest.raises(BadConversationError, match=_ALTERNATE):
            finder.find(kept)
        return
    found = finder.find(kept)
    first = found.text[slice(*found.spans[0])]
    assert "Welcome." in first
    assert "assistant" not in first
    assert "model" not in first
    assert first.rstrip("\n").endswith(stops(name))


def test_the_tables_name_templates_of_the_package() -> None:
    assert len(NAMES) >= 41
    assert len(TWINS) >= 31
    assert {*REFUSED} <= {*NAMES}
    assert {*DIFFERENT} <= {*TWINS}
