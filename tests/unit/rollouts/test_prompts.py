"""Prompts of rollouts from every format, and the folder of their parts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from megatron_distill.data.tokenizers.open import train_bpe
from megatron_distill.errors import CheckpointError, ConfigError, DataError
from megatron_distill.models.generation import WriteRow, Written
from megatron_distill.rollouts.check import LogProbCheck, TextSample
from megatron_distill.rollouts.folder import RolloutFolder, Totals
from megatron_distill.rollouts.prompts import Prompt, PromptFile, PromptTokens
from tests.support.chat_fixtures import chat_tokenizer

USER = {"role": "user", "content": "Is it sunny?"}
ANSWER = {"role": "assistant", "content": "yes"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def written(folder: Path, rows: Sequence[Mapping[str, Any]], suffix: str = ".jsonl") -> Path:
    """Write rows to a file of this kind."""
    path = folder / f"prompts{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return path
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([dict(row) for row in rows])
    if suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow"])
def test_texts_and_conversations_are_read_from_every_format(tmp_path: Path, suffix: str) -> None:
    texts = PromptFile(written(tmp_path, [{"q": "def a"}, {"q": "def b"}], suffix), key="q")
    assert list(texts) == [Prompt(1, "def a"), Prompt(2, "def b")]
    assert texts.count(None) == 2
    assert texts.count(1) == 1
    rows = [{"messages": [USER, ANSWER]}, {"messages": [SYSTEM, USER]}]
    chats = PromptFile(written(tmp_path, rows, suffix))
    assert [one.messages for one in chats] == [(USER,), (SYSTEM, USER)]


def test_a_conversation_is_answered_anew_after_its_last_question(tmp_path: Path) -> None:
    """Its last responses are left out; what came before, and its tools, stay."""
    untrained = {**ANSWER, "weight": 0.0}
    row = {"messages": [SYSTEM, USER, untrained, USER, ANSWER, ANSWER], "tools": [TOOL]}
    (prompt,) = PromptFile(written(tmp_path, [row]), system="Another.")
    assert prompt.messages == (SYSTEM, USER, ANSWER, USER)
    new = {"role": "assistant", "content": "no"}
    assert prompt.answered("no") == {
        "messages": [SYSTEM, USER, untrained, USER, new],
        "tools": [TOOL],
    }


def test_a_text_is_a_document_or_a_question(tmp_path: Path) -> None:
    path = written(tmp_path, [{"prompt": "Is it sunny?"}])
    (begun,) = PromptFile(path)
    assert begun.answered(" No.") == {"text": "Is it sunny? No."}
    (asked,) = PromptFile(path, is_chat=True, system="Be brief.")
    assert asked.messages == (SYSTEM, USER)
    (left,) = PromptFile(written(tmp_path, [{"messages": [USER]}]), system="Be brief.")
    assert left.messages == (SYSTEM, USER)


@pytest.mark.parametrize("style", ["qwen25", "llama31", "gemma"])
def test_ids_are_those_of_transformers_up_to_the_response(style: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(style)
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER, USER]}]
    prompts = list(PromptFile(written(tmp_path, rows)))
    tokens = PromptTokens.of(tokenizer, prompts[0])
    expected = [
        tuple(
            tokenizer.hugging_face.apply_chat_template(
                list(one.messages), add_generation_prompt=True, return_dict=False
            )
        )
        for one in prompts
    ]
    assert tokens(prompts) == expected
    assert tokenizer.eos_id in tokens.stop_ids


def test_a_document_begins_with_the_begin_of_text_token_where_training_has_it() -> None:
    tokenizer = chat_tokenizer("llama31")
    prompt = Prompt(1, "hello")
    without, with_begin = (PromptTokens.of(tokenizer, prompt, add_bos=one) for one in (False, True))
    (plain,), (begun,) = without([prompt]), with_begin([prompt])
    assert begun == (tokenizer.bos_id, *plain)
    assert without.identity != with_begin.identity


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"text": "a"}],
            r"row 1: has no 'messages' and no 'prompt' \(it has: text\); name the col",
        ),
        ([{"prompt": 3}], "row 1: 'prompt' is a number, not text; correct it"),
        ([{"prompt": None}], "row 1: 'prompt' is null; correct or remove the row"),
        (
            [{"prompt": "a"}, {"messages": [USER]}],
            "row 2: is a conversation, and the first row a t",
        ),
        ([{"messages": [USER]}, {"prompt": "a"}], "row 2: is a text, and the first row a conversa"),
        ([{"messages": [USER]}, {"messages": "a"}], "row 2: its messages are not a list"),
        (
            [{"messages": [{"from": "human", "value": "a"}]}],
            "row 1: .*; give messages with `role` an",
        ),
        ([{"messages": [SYSTEM]}], "row 1: asks nothing: it has no message of a user or a tool; a"),
        ([{"messages": [ANSWER]}], "row 1: asks nothing"),
        ([{"messages": [{**USER, "name": "\ud800"}]}], "row 1: its messages are not JSON"),
    ],
)
def test_a_row_that_is_not_a_prompt_is_named(
    rows: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path, rows)
    with pytest.raises(DataError, match=f"--prompts {path}: {message}"):
        PromptFile(path).count(None)


def test_a_message_of_a_table_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    rows = [{"messages": [{**USER, "sent": datetime(2026, 1, 1, tzinfo=UTC)}]}]
    path = written(tmp_path, rows, ".parquet")
    with pytest.raises(DataError, match="row 1: its messages are not JSON .*datetime"):
        PromptFile(path).count(None)


def test_a_system_message_needs_a_chat(tmp_path: Path) -> None:
    path = written(tmp_path, [{"prompt": "a"}])
    with pytest.raises(DataError, match="row 1: is a text, and --system a message of a chat; add"):
        PromptFile(path, system="Be brief.").count(None)


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n{broken\n')
    with pytest.raises(DataError, match="row 3: not a JSON object"):
        PromptFile(path).count(None)


def test_a_file_that_is_missing_empty_or_of_another_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.jsonl: there is no such file; name one of .jsonl"):
        PromptFile(tmp_path / "none.jsonl")
    (tmp_path / "a.txt").touch()
    with pytest.raises(ConfigError, match=r"a.txt: not one of .jsonl, .parquet, .arrow; convert"):
        PromptFile(tmp_path / "a.txt")
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(ConfigError, match="it has no row; name another file"):
        PromptFile(tmp_path / "a.jsonl").first()


def test_prompts_that_cannot_be_encoded_have_a_reason_and_the_rest_their_ids() -> None:
    plain = train_bpe(["a b c"], vocab_size=260)
    with pytest.raises(ConfigError, match=r"--prompts has conversations, and .* no chat template"):
        PromptTokens.of(plain, Prompt(1, messages=(USER,)))
    prompts = [Prompt(1, "a"), Prompt(2, ""), Prompt(3, "\ud800"), Prompt(4, "b")]
    first, empty, broken, last = PromptTokens.of(plain, prompts[0])(prompts)
    assert empty == "it has no token"
    assert "unpaired surrogate" in broken
    assert [first, last] == [tuple(ids.tolist()) for ids in plain.encode_batch(["a", "b"])]
    asked = [Prompt(1, messages=(SYSTEM, USER)), Prompt(2, messages=(USER,))]
    refused, kept = PromptTokens.of(chat_tokenizer("gemma"), asked[1])(asked)
    assert isinstance(refused, str)
    assert isinstance(kept, tuple)


def test_a_call_of_a_tool_is_written_in_the_form_that_the_template_takes() -> None:
    """As in training: no null is written for the content beside the call."""
    tokenizer = chat_tokenizer("qwen25")
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = (USER, asks, {"role": "tool", "content": "sunny"})
    prompt = Prompt(1, messages=messages, tools=(TOOL,))
    (ids,) = PromptTokens.of(tokenizer, prompt)([prompt])
    assert not isinstance(ids, str), ids
    text = tokenizer.decode(ids)
    assert "None" not in text
    assert "null" not in text
    assert "Paris" in text


SETTINGS = {"seed": 1, "weights": "sha256:a"}
ONE = Totals(texts=2, tokens=10, truncated=1, left_out=0, log_prob=-5.0)


def test_parts_are_counted_and_their_sums_are_kept(tmp_path: Path) -> None:
    folder = RolloutFolder(tmp_path / "a" / "b", SETTINGS)
    folder.require(digest="b")
    assert folder.missing(3) == [0, 1, 2]
    folder.write(1, [{"text": "é", "row": 1}], ONE)
    assert folder.missing(3) == [0, 2]
    assert folder.part(1).read_text(encoding="utf-8") == '{"text": "é", "row": 1}\n'
    folder.write(0, [], Totals(left_out=1))
    folder.require(digest="b")
    assert folder.finish(2, None) == (Totals(2, 10, 1, 1, -5.0), None)
    check = LogProbCheck(texts=1, tokens=5, mean_difference=1e-7, max_difference=4e-7)
    assert folder.finish(2, check)[1] == check
    assert folder.finish(2, None)[1] == check, "a start without texts keeps it"
    record = json.loads((tmp_path / "a" / "b" / "rollouts.json").read_text())
    assert record["totals"] == {
        "texts": 2, "tokens": 10, "truncated": 1, "left_out": 1, "log_prob": -5.0,
    }  # fmt: skip
    assert record["log_prob_check"] == vars(check)
    other = {**record, "log_prob_check": {"of": "another version"}}
    (tmp_path / "a" / "b" / "rollouts.json").write_text(json.dumps(other))
    assert folder.finish(2, None)[1] is None
    assert record["settings"] == {"version": 1, **SETTINGS, "digest": "b"}
    with pytest.raises(ConfigError, match=r"its rollouts have digest = b, not c; name another"):
        folder.require(digest="c")


@pytest.mark.parametrize("place", [0, 1])
def test_a_comparison_with_numbers_that_are_none_is_an_error(place: int) -> None:
    sample = TextSample(1)
    sample.take([WriteRow((5,), 0, 2)], [Written((7, 8), (-1.0, -2.0), "length", "x")])
    other = [-1.0, -2.5]
    assert sample.compared([other]) == LogProbCheck(1, 2, 0.25, 0.5)
    other[place] = math.nan
    with pytest.raises(CheckpointError, match="not a number"):
        sample.compared([other])


def test_other_settings_are_refused_by_their_name_and_both_values(tmp_path: Path) -> None:
    RolloutFolder(tmp_path, {**SETTINGS, "seed": 7}).close()  # without a part it binds nothing
    first = RolloutFolder(tmp_path, SETTINGS)
    first.write(0, [], ONE)
    first.close()
    RolloutFolder(tmp_path, SETTINGS).close()
    with pytest.raises(ConfigError) as error:
        RolloutFolder(tmp_path, {**SETTINGS, "seed": 2})
    assert str(error.value) == (
        f"--output {tmp_path}: its rollouts have seed = 1, not 2; name another folder, or start "
        "with the same"
    )


def test_a_folder_of_another_kind_or_with_damaged_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "part-00000.jsonl").touch()
    with pytest.raises(
        ConfigError, match=r"it has parts without their settings in .*rollouts.json"
    ):
        RolloutFolder(tmp_path, SETTINGS)
    (tmp_path / "rollouts.json").write_text("[")
    with pytest.raises(ConfigError, match=r"rollouts.json is damaged; name another --output"):
        RolloutFolder(tmp_path, SETTINGS)
    other = RolloutFolder(tmp_path / "other", SETTINGS)
    other.write(0, [], ONE)
    (tmp_path / "other" / "sums" / "part-00000.json").unlink()
    with pytest.raises(ConfigError, match=r"is missing or damaged; remove .*part-00000.jsonl to"):
        other.finish(1, None)


def test_a_second_process_is_refused_while_the_first_holds_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_distill.runtime.folder_lock._MOMENT_SECONDS", 0.0)
    first = RolloutFolder(tmp_path, SETTINGS)
    with pytest.raises(ConfigError, match=f"--output {tmp_path}"):
        RolloutFolder(tmp_path, SETTINGS)
    first.close()
    RolloutFolder(tmp_path, SETTINGS).close()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_table_names_all_columns_that_it_has_and_its_damage_once(
    tmp_path: Path, suffix: str
) -> None:
    path = written(tmp_path, [{"text": "a", "number": 3}], suffix)
    with pytest.raises(DataError, match=r"and no 'prompt' \(it has: number, text\); name the"):
        PromptFile(path).first()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged or cut off") as caught:
        PromptFile(path).first()
    assert str(caught.value).count(path.name) == 1
    assert "data source" not in str(caught.value)
