"""Rows of instruction data as conversations: the common shapes, roles, tools, weights, bad rows."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_distill.data.chat.conversations import (
    BadConversationError,
    ConversationSpec,
    conversation_of,
)

PLAIN = ConversationSpec()
ALPACA = ConversationSpec(
    prompt_keys=("instruction", "input"), response_key="output", system_key="system"
)
SHARE = ConversationSpec(messages_key="conversations", role_key="from", content_key="value")
EXPECTED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("spec", "row"),
    [
        (PLAIN, {"messages": EXPECTED}),
        (PLAIN, {"messages": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]}),
        (PLAIN, {"messages": [EXPECTED[0], {**EXPECTED[1], "name": None, "tool_calls": None}]}),
        (
            PLAIN,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}]},
                    EXPECTED[1],
                ]
            },
        ),
        (
            SHARE,
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        ),
        (ALPACA, {"instruction": "a", "input": "", "output": "b", "system": ""}),
        (ALPACA, {"instruction": [EXPECTED[0]], "output": [EXPECTED[1]]}),
        (
            ConversationSpec(roles={"me": "user", "you": "assistant"}),
            {"messages": [{"role": "me", "content": "a"}, {"role": "you", "content": "b"}]},
        ),
    ],
)
def test_every_shape_gives_the_same_conversation(spec: ConversationSpec, row: Any) -> None:
    found = conversation_of(row, spec)
    expected = conversation_of({"messages": EXPECTED}, PLAIN)
    assert found == expected
    assert found.messages == EXPECTED
    assert found.digest() == expected.digest()
    assert found.weights == [1.0, 1.0]


def test_columns_of_a_prompt_are_joined_and_a_system_prompt_goes_first() -> None:
    row = {"instruction": "a", "input": "x", "output": "b", "system": "s"}
    assert conversation_of(row, ALPACA).messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\n\nx"},
        EXPECTED[1],
    ]


def test_arguments_of_tool_calls_become_objects_without_nulls() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    row = {
        "messages": [EXPECTED[0], {"role": "assistant", "tool_calls": [call]}],
        "tools": '[{"type": "function", "function": {"name": "f", "strict": null}}]',
    }
    found = conversation_of(row, PLAIN)
    assert found.messages[1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, "id": "1"}
        ],
    }
    # A conversation is the same by its content, however a row spells that there is no text.
    spelled = {"messages": [EXPECTED[0], {**row["messages"][1], "content": ""}]} | {
        "tools": row["tools"]
    }
    assert conversation_of(spelled, PLAIN).messages[1]["content"] == ""
    assert conversation_of(spelled, PLAIN).digest() == found.digest()
    assert found.tools == [{"type": "function", "function": {"name": "f"}}]


def test_a_message_keeps_its_weight_out_of_the_template() -> None:
    row = {"messages": [EXPECTED[0], {**EXPECTED[1], "weight": 0.25}]}
    found = conversation_of(row, PLAIN)
    assert (found.messages, found.weights) == (EXPECTED, [1.0, 0.25])


SYSTEM = {"role": "system", "content": "s"}
GREETED = [{**EXPECTED[1], "weight": 0.5}, EXPECTED[1], *EXPECTED]


@pytest.mark.parametrize("before", [[], [SYSTEM], [SYSTEM, {**SYSTEM, "role": "developer"}]])
def test_responses_before_the_first_prompt_are_dropped_trained_or_refused(before: Any) -> None:
    row = {"messages": [*before, *GREETED]}
    found = conversation_of(row, PLAIN)
    assert found.messages == [*before, *EXPECTED]
    assert (found.dropped, found.weights) == (2, [1.0] * (len(before) + 2))
    kept = conversation_of(row, ConversationSpec(leading_assistant="keep"))
    assert [message["role"] for message in kept.messages[len(before) :]] == [
        *["assistant"] * 2,
        "user",
        "assistant",
    ]
    assert (kept.dropped, kept.weights[len(before)]) == (0, 0.5)
    text = f"message {len(before)} is a response without a prompt before it"
    with pytest.raises(BadConversationError, match=text):
        conversation_of(row, ConversationSpec(leading_assistant="refuse"))


@pytest.mark.parametrize("before", [[], [SYSTEM]])
def test_a_row_of_responses_alone_names_the_switch(before: Any) -> None:
    with pytest.raises(
        BadConversationError, match="set conversation.leading_assistant of the data source to keep"
    ):
        conversation_of({"messages": [*before, EXPECTED[1]]}, PLAIN)


@pytest.mark.parametrize(
    ("row", "reported"),
    [
        ({"text": "a"}, "it has no 'messages' .its keys: text."),
        ({"messages": []}, "at least one message"),
        ({"messages": "a"}, "not a list"),
        ({"messages": ["a"]}, "message 0 is not an object but text"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, "message 0 has the role 'asistant'"),
        ({"messages": [{"role": "user"}]}, "message 0 has no 'content'"),
        ({"messages": [{"role": "user", "content": 5}]}, "message 0 is not text but a number"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "message 0 has a part that is not text",
        ),
        ({"messages": [{**EXPECTED[1], "weight": 2}]}, "weight 2; it must be a number from 0 to 1"),
        ({"messages": [{**EXPECTED[1], "weight": float("nan")}]}, "weight nan"),
        ({"messages": EXPECTED, "tools": "{"}, "its tools is not valid JSON"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "a tool call of message 0 has no function name",
        ),
    ],
)
def test_a_bad_row_names_its_fault(row: Any, reported: str) -> None:
    with pytest.raises(BadConversationError, match=reported):
        conversation_of(row, PLAIN)


def test_half_a_surrogate_pair_is_refused() -> None:
    row = {"messages": [{"role": "user", "content": "\ud800"}, EXPECTED[1]]}
    with pytest.raises(BadConversationError, match="unpaired surrogate"):
        conversation_of(row, PLAIN).digest()
