"""Runs on instruction data: the same losses in every layout, resumed and from a teacher store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.e2e.captures import capture_here, write_capture
from tests.e2e.runs import STUDENT, TEACHER, Inputs, assert_same_course, failure, records, run

SECTIONS = (
    "data.sources=[{{format: jsonl, paths: {corpus}, conversation: {{chat_template: plain}}}}]"
)
STEPS = ("train.steps=4", "schedule.warmup_steps=1")


def write_chat(path: Path, *, weights: bool) -> Path:
    """Conversations of one to three turns, of different lengths."""
    rows = []
    for index in range(60):
        messages = []
        for turn in range(1 + index % 3):
            asked = {"role": "user", "content": f"def {index}" + " value" * (index % 4)}
            text = {"role": "assistant", "content": f"return {index * turn} " * (1 + index % 3)}
            if weights and index % 2:
                text["weight"] = (index % 5) / 4
            messages += [asked, text]
        rows.append({"messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def chat(inputs: Inputs) -> str:
    return SECTIONS.format(corpus=write_chat(inputs.folder / "chat.jsonl", weights=True))


@pytest.fixture(scope="module")
def config(inputs: Inputs) -> Path:
    return inputs.write("chat", STUDENT, TEACHER)


def assert_the_same_in_layouts_and_resumed(
    pool: Pool, config: Path, folder: Path, changes: list[str], alone: Any
) -> None:
    for layout in ("parallel.tensor=2", "parallel.context=2"):
        assert_same_course(run(pool, 2, config, folder / layout, *changes, layout), alone)
    saving = (*changes, "checkpoint.save=true")
    run(pool, 2, config, folder / "halves", *saving, stop_after=3)
    assert_same_course(run(pool, 2, config, folder / "halves", *saving), alone)


@pytest.mark.slow
def test_losses_on_conversations_are_the_same_in_every_layout_and_resumed(
    pool: Pool, config: Path, chat: str, tmp_path: Path
) -> None:
    changes = [chat, *STEPS, "data.distill_on_prompt=true", "data.sequence_length=48"]
    changes.append(f"data.cache={tmp_path / 'cache'}")
    saving = ["checkpoint.save=true", "validation.samples=4", "validation.interval=4"]
    alone = run(pool, 1, config, tmp_path / "alone", *changes, *saving)
    assert_the_same_in_layouts_and_resumed(pool, config, tmp_path, changes, alone)


def write_chat_tokenizers(rank: int, world: int, folder: Path) -> None:
    """Two tokenizers with other merges, special tokens and chat templates, in a pool worker."""
    from tests.support.chat_fixtures import chat_tokenizer, other_tokenizer

    chat_tokenizer("qwen25").save(folder / "student")
    other_tokenizer("llama3").save(folder / "teacher")


@pytest.mark.slow
def test_conversations_of_two_templates_are_the_same_in_every_layout_and_resumed(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    pool.run(1, write_chat_tokenizers, tmp_path)
    corpus = write_chat(tmp_path / "chat.jsonl", weights=True)
    changes = [
        f"data.sources=[{{format: jsonl, paths: {corpus}, conversation: {{}}}}]",
        f"data.tokenizer.path={tmp_path / 'student'}",
        f"teacher.tokenizer.path={tmp_path / 'teacher'}",
        f"data.cache={tmp_path / 'cache'}",
        "data.sequence_length=96", "teacher.sequence_length=120", "data.truncation=split",
        *STEPS,
    ]  # fmt: skip
    config = inputs.folder / "aligned.yaml"
    saving = ["checkpoint.save=true", "validation.samples=4", "validation.interval=4"]
    alone = run(pool, 1, config, tmp_path / "alone", *changes, *saving)
    held_out: Any = records(tmp_path / "alone")[-1]["validation"]
    assert held_out["kd_loss"] > 0
    for record in alone:
        # Headers and the ends of responses around a content are in no chunk.
        assert 0.5 < record["aligned_labels"] <= 1
        assert record["chunks"] > 100
        assert record["kd_loss"] > 0
    assert_the_same_in_layouts_and_resumed(pool, config, tmp_path, changes, alone)


def test_a_broken_row_stops_every_rank_with_its_file_and_row(
    pool: Pool, inputs: Inputs, config: Path
) -> None:
    path = write_chat(inputs.folder / "broken.jsonl", weights=False)
    lines = path.read_text().splitlines()
    lines[17] = '{"messages": [{"role": "usr", "content": "a"}]}'
    path.write_text("\n".join(lines))
    changes = [SECTIONS.format(corpus=path), *STEPS]
    folder = inputs.folder / "chat-broken"
    text = failure(pool, 2, config, folder, *changes)
    assert f"{path}:18: message 0 has the role 'usr'" in text
    assert list((folder / "cache").glob("*")) == []
    assert len(run(pool, 2, config, folder, *changes, "data.on_error=skip")) == 4


@pytest.mark.slow
def test_a_store_keeps_the_masks_of_conversations(pool: Pool, inputs: Inputs, config: Path) -> None:
    path = write_chat(inputs.folder / "stored.jsonl", weights=False)
    chat = SECTIONS.format(corpus=path)
    capture = write_capture(inputs, "chat-capture", samples=32, per_shard=8)
    store = inputs.folder / "chat-store"
    shared = [chat, "data.distill_on_prompt=true", f"data.cache={inputs.folder / 'chat-cache'}"]
    (captured,) = pool.run(1, capture_here, capture, [*shared, f"store.path={store}"])
    assert captured is True
    changes = [*shared, *STEPS, "objective.terms.0.top_k=12"]
    live = run(pool, 1, config, inputs.folder / "chat-live", *changes)
    from_store = [*changes, f"teacher={{store: {store}}}", "objective.terms.0.top_k=12"]
    joined = run(pool, 2, config, inputs.folder / "chat-joined", *from_store)
    assert_same_course(joined, live)
