"""The identity of a stream of samples: all that decides it, and nothing that does not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_distill.config import load_capture_config
from megatron_distill.errors import DataError
from megatron_distill.runtime.mcore_patches import prepare_megatron_core
from tests.distributed.pool import Pool
from tests.e2e.captures import write_capture
from tests.e2e.runs import Inputs

Settings = dict[str, Any]


def settings_of(rank: int, world: int, path: Path, overrides: list[str]) -> Settings | str:
    prepare_megatron_core(on_cuda=False)
    from megatron_distill.train.assemble.sources import dataset_digest, dataset_settings

    config = load_capture_config(path, overrides)
    try:
        found = dataset_settings(config.data, config.seed)
    except DataError as error:
        return str(error)
    assert dataset_digest(found, "a") != dataset_digest(found, "b")
    return {**found, "digest": dataset_digest(found, "a")}


def ask(pool: Pool, path: Path, *overrides: str) -> Any:
    return pool.run(1, settings_of, path, list(overrides))[0]


@pytest.fixture(scope="module")
def config(inputs: Inputs) -> Path:
    return write_capture(inputs, "identity")


def changed(one: Settings, other: Settings) -> set[str]:
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=8", "seed"),
        ("data.sequence_length=16", "sequence_length"),
        ("data.isolate_documents=false", "isolate_documents"),
        ("data.validation_fraction=0.2", "validation_fraction"),
        ("data.shuffle_buffer=17", "shuffle_buffer"),
        ("data.shuffle_samples=41", "shuffle_samples"),
        ("data.on_error=skip", "on_error"),
        ("data.sources.0.text_key=body", "sources"),
        ("data.sources.0.format=text", "sources"),
    ],
)
def test_each_setting_counts_under_its_name(
    pool: Pool, config: Path, override: str, key: str
) -> None:
    assert changed(ask(pool, config), ask(pool, config, override)) == {key, "digest"}


@pytest.mark.parametrize(
    "override",
    [
        "data.sources.0.weight=3",
        "data.sources.0.documents=line",
        "data.cache=indices",
        "parallel.tensor=2",
        "store.k=5",
        "capture.micro_batch_size=7",
    ],
)
def test_settings_that_change_no_sample_do_not_count(
    pool: Pool, config: Path, override: str
) -> None:
    assert ask(pool, config, override) == ask(pool, config)


def test_own_validation_sources_hold_nothing_back(pool: Pool, inputs: Inputs, config: Path) -> None:
    own = f"data.validation_sources=[{{format: jsonl, paths: {inputs.corpus}}}]"
    assert ask(pool, config, own)["validation_fraction"] == 0.0


def test_files_may_move_but_not_grow(
    pool: Pool, inputs: Inputs, config: Path, tmp_path: Path
) -> None:
    moved = tmp_path / inputs.corpus.name
    shutil.copy(inputs.corpus, moved)
    override = f"data.sources.0.paths={moved}"
    assert ask(pool, config, override) == ask(pool, config)
    with moved.open("a") as stream:
        stream.write('{"text": "more"}\n')
    assert changed(ask(pool, config, override), ask(pool, config)) == {"sources", "digest"}
    moved.unlink()
    assert f"{moved}: no such file" in ask(pool, config, override)


def test_indexed_files_count_by_their_sizes(pool: Pool, config: Path, tmp_path: Path) -> None:
    for end in ("bin", "idx"):
        (tmp_path / f"corpus.{end}").write_bytes(b"12345678")
    override = f"data.sources=[{{format: megatron, paths: {tmp_path}/corpus}}]"
    before = ask(pool, config, override)
    (tmp_path / "corpus.bin").write_bytes(b"123456789")
    assert changed(before, ask(pool, config, override)) == {"sources", "digest"}
    (tmp_path / "corpus.idx").unlink()
    assert "corpus.idx: no such file" in ask(pool, config, override)


def test_conversations_are_named_with_their_masks_and_the_content_of_their_template(
    pool: Pool, inputs: Inputs, config: Path
) -> None:
    template = inputs.folder / "own.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    one = f"{{format: jsonl, paths: {inputs.corpus}, conversation: {{chat_template: {template}}}}}"
    chat = f"data.sources=[{one}]"
    before = ask(pool, config, chat)
    for override, key in {
        "data.distill_on_prompt=true": "distill_on_prompt",
        "data.train_on=last_response": "train_on",
        "data.truncation=drop": "truncation",
        "data.packing_buffer=7": "packing_buffer",
    }.items():
        assert changed(before, ask(pool, config, chat, override)) == {key, "digest"}
    kept = chat.replace("chat_template:", "leading_assistant: keep, chat_template:")
    assert changed(before, ask(pool, config, kept)) == {"sources", "digest"}
    # Stores older than the key name none, and go on with its default.
    assert "leading_assistant" not in str(before)
    moved = template.rename(inputs.folder / "moved.jinja")
    renamed = chat.replace(str(template), str(moved))
    assert ask(pool, config, renamed) == before
    moved.write_text("{{ messages[1]['content'] }}")
    assert changed(before, ask(pool, config, renamed)) == {"sources", "digest"}
