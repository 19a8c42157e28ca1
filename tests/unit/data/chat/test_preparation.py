"""Preparation and its cache: hits, what invalidates it, bad rows, workers, and what failures leave.

The same conversations by this process and by workers; a worker that is killed; a disk that is full;
files that move.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megatron_distill.data.chat import cache as conversation_cache
from megatron_distill.data.chat.cache import PreparedConversations
from megatron_distill.data.chat.conversations import ConversationSpec
from megatron_distill.data.chat.prepare import prepared_conversations
from megatron_distill.data.chat.source import ConversationOptions
from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.worker_processes import worker_map
from megatron_distill.errors import DataError
from tests.support.chat_fixtures import FOLDER, chat_tokenizer, tool_dialogue, turns, write_rows
from tests.support.worker_functions import dying, refusing, slow

ROWS = [{"messages": turns(f"ask {index}", f"say {index}")} for index in range(30)]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("megatron_distill")
    before = logger.propagate
    logger.propagate = True
    caplog.set_level(logging.INFO, "megatron_distill")
    yield caplog
    logger.propagate = before


def prepare(
    path: Path, *, style: str = "qwen25", skip_bad: bool = False, spec: Any = None, **options: Any
) -> PreparedConversations:
    source = SourceSpec("jsonl", (str(path),), conversation=spec or ConversationSpec())
    chosen = ConversationOptions(cache=path.parent / "cache", workers=0)
    return prepared_conversations(
        source, chat_tokenizer(style), options=replace(chosen, **options), skip_bad=skip_bad
    )


def test_the_cache_is_found_again_by_content(
    tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path / "a.jsonl", ROWS)
    first = prepare(path)
    assert "cache hit" not in logged.text
    moved = path.rename(tmp_path / "b.jsonl")
    os.utime(moved, (0, 0))
    again = prepare(moved)
    assert "cache hit" in logged.text
    assert again.folder == first.folder
    assert again.place(3) == f"{moved}:4"
    assert isinstance(again.tokens_n, np.memmap)
    np.testing.assert_array_equal(first.tokens_n, again.tokens_n)


def test_everything_that_decides_tokens_and_masks_makes_another_cache(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", ROWS)
    template = tmp_path / "own.jinja"
    template.write_text((FOLDER / "gemma.jinja").read_text())
    own = ConversationSpec(chat_template=str(template))
    found = [
        prepare(path),
        prepare(path, style="qwen3"),
        prepare(path, spec=own),
        prepare(path, spec=ConversationSpec(template_options={"x": 1})),
        prepare(path, distill_on_prompt=True),
        prepare(path, train_on="last_response"),
    ]
    template.write_text(template.read_text() + "{# #}")
    found.append(prepare(path, spec=own))
    write_rows(path, [*ROWS[:-1], ROWS[0]])
    found.append(prepare(path))
    assert len({one.folder for one in found}) == len(found)
    # Settings of the making of samples do not.
    assert prepare(path, truncation="drop", packing_buffer=7).folder == found[-1].folder


def test_damaged_files_are_prepared_anew(tmp_path: Path, logged: pytest.LogCaptureFixture) -> None:
    path = write_rows(tmp_path / "a.jsonl", ROWS)
    first = prepare(path)
    expected = np.array(first.tokens_n)
    with (first.folder / "tokens").open("r+b") as stream:
        stream.truncate(8)
    np.testing.assert_array_equal(prepare(path).tokens_n, expected)
    assert "cache hit" not in logged.text
    (first.folder / "manifest.json").write_text("{")
    np.testing.assert_array_equal(prepare(path).tokens_n, expected)


def test_a_cache_that_another_run_has_written_meanwhile_is_kept(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [*ROWS, {"text": 1}])
    first = prepare(path, skip_bad=True)
    expected, refused = np.array(first.tokens_n), []
    inode = (first.folder / "tokens").stat().st_ino
    found = conversation_cache.write_cache(first.folder, [path], [], refuse=refused.append)
    assert (first.folder / "tokens").stat().st_ino == inode
    np.testing.assert_array_equal(found.tokens_n, expected)
    assert len(refused) == 1
    assert "it has no 'messages'" in refused[0]


def test_bad_rows_stop_or_are_counted_from_the_cache_too(
    tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [*ROWS[:4], {"text": 1}, 5, *ROWS[4:]])
    message = f"{path}:5: it has no 'messages'"
    with pytest.raises(DataError, match=message):
        prepare(path)
    assert list((tmp_path / "cache").iterdir()) == []
    found = prepare(path, skip_bad=True)
    assert len(found) == len(ROWS)
    assert (found.manifest.rows, found.manifest.bad_rows) == (len(ROWS) + 2, 2)
    assert message in logged.text
    assert f"{path}:6: not a JSON object but a number" in logged.text
    assert "2 bad rows skipped" in logged.text
    with pytest.raises(DataError, match=message):
        prepare(path)
    logged.clear()
    prepare(path, skip_bad=True)
    assert message in logged.text


OPEN_ENDED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_turns_without_an_end_are_warned_of_once_per_source(
    tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [*ROWS, {"messages": turns("a", "b", "c")}])
    template = tmp_path / "open.jinja"
    template.write_text(OPEN_ENDED)
    spec = ConversationSpec(chat_template=str(template))
    first = prepare(path, style="phi3", spec=spec)
    again = prepare(path, style="phi3", spec=spec)
    assert first.manifest.unclosed == again.manifest.unclosed == len(ROWS)
    warnings = [one.getMessage() for one in logged.records if one.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        f"jsonl {path}: in 30 of 31 conversations the chat template writes"
    )
    assert "no end-of-turn token after the last response" in warnings[0]
    assert "data.sources.conversation.chat_template" in warnings[0]
    logged.clear()
    assert prepare(path).manifest.unclosed == 0
    assert not [one for one in logged.records if one.levelname == "WARNING"]


def test_prompts_that_a_template_leaves_out_are_counted(
    tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    template = tmp_path / "no_system.jinja"
    template.write_text(OPEN_ENDED.replace("messages %}", "messages if m.role != 'system' %}"))
    corpus = [*ROWS, {"messages": turns(" a ", "b", system="be kind")}]
    path = write_rows(tmp_path / "a.jsonl", corpus)
    found = prepare(path, style="phi3", spec=ConversationSpec(chat_template=str(template)))
    assert found.manifest.unseen == 1
    assert "in 1 conversation the chat template leaves out a system message" in logged.text
    assert prepare(path).manifest.unseen == 0


def test_responses_before_the_first_prompt_are_counted_and_logged_once(
    tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    greeting = {"role": "assistant", "content": "Welcome."}
    greeted = {"messages": [greeting, greeting, *turns("ask", "say")]}
    path = write_rows(tmp_path / "a.jsonl", [greeted, *ROWS])
    for _ in range(2):  # the second from the cache, as held-out samples of the same start
        assert prepare(path).manifest.dropped == 2
    assert logged.text.count("2 responses before the first prompt dropped") == 1
    with pytest.raises(DataError, match=f"{path}:1: message 0 is a response without a prompt"):
        prepare(path, spec=ConversationSpec(leading_assistant="refuse"))
    kept = prepare(path, spec=ConversationSpec(leading_assistant="keep"))
    assert kept.manifest.dropped == 0
    assert kept.manifest.ce_labels > prepare(path).manifest.ce_labels
    # Messages are counted as the template gets them.
    call = {**greeting, "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}
    write_rows(path, [{"messages": [greeting, *turns("a"), call]}])
    reason = "message 1: .* not write its tool calls.* .messages are counted without the 1 before"
    with pytest.raises(DataError, match=reason):
        prepare(path, style="llama3")


def data_workers() -> set[int | None]:
    """Workers of this process; those of streams that earlier tests dropped may still be there."""
    return {child.pid for child in active_children() if child.name.startswith("data-worker")}


@pytest.mark.slow
def test_workers_prepare_the_same_as_one_process(tmp_path: Path) -> None:
    before, template = data_workers(), tmp_path / "text.jinja"
    template.write_text(
        "{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') }}"
        "{% for c in m.tool_calls or [] %}{{ '{' + c.function.arguments + '}' }}{% endfor %}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    rows = [{"messages": tool_dialogue(answer=None, also=["why " * 900, "so"])} for _ in range(400)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    assert path.stat().st_size > 1 << 20  # several blocks
    spec = ConversationSpec(chat_template=str(template))
    alone = prepare(path, style="phi3", spec=spec)
    together = prepare(path, style="phi3", spec=spec, cache=tmp_path / "other", workers=2)
    assert alone.manifest == together.manifest
    assert alone.manifest.conversations == len(rows)
    for name in ("tokens", "flags", "index"):
        ours, reference = (one.folder / name for one in (alone, together))
        assert ours.read_bytes() == reference.read_bytes()
    assert data_workers() <= before
    # Arguments that the template wants as text are given so, there too.
    start, stop = alone.bounds(0)
    text = chat_tokenizer("phi3").decode(alone.tokens_n[start:stop].tolist())
    assert '<|assistant|>{{"city": "Paris"}}<|end|>' in text


def interrupted() -> None:
    with worker_map(slow, range(99), workers=2) as found:
        next(found)
        raise KeyboardInterrupt


def test_results_come_in_order_and_workers_end_whatever_happens() -> None:
    before = data_workers()
    with worker_map(slow, range(40), workers=2) as results:
        found = list(results)
    assert [item for item, _ in found] == list(range(40))
    assert len({process for _, process in found}) == 2
    with pytest.raises(DataError, match="five"), worker_map(refusing, range(9), workers=2) as found:
        list(found)
    with (
        pytest.raises(DataError, match="a worker process ended early"),
        worker_map(dying, range(9), workers=2) as found,
    ):
        list(found)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert data_workers() <= before


@pytest.mark.slow
def test_workers_end_by_themselves_where_their_parent_is_killed() -> None:
    root = Path(__file__).parents[4]
    command = [sys.executable, "-m", "tests.support.killed_parent"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        workers = [psutil.Process(int(word)) for word in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.kill()
    _, alive = psutil.wait_procs(workers, timeout=240)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "a.jsonl", ROWS)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversation_cache.os, "fsync", full)
    with pytest.raises(DataError, match="cannot be written .No space left on device.; free disk"):
        prepare(path)
    assert list((tmp_path / "cache").iterdir()) == []


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", ROWS)
    folder = prepare(path).folder
    left = folder.rename(folder.with_name(f"{folder.name}.partial-{os.uname().nodename}-99999999"))
    assert prepare(path).folder == folder
    assert not left.exists()
