"""Lists of documents that are lost or were never written come back without their records' loss."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_distill.store import verify
from tests.distributed.pool import Pool
from tests.e2e.captures import run_in, shards_of, write_capture
from tests.e2e.runs import Inputs
from tests.support.store_samples import contents

SAMPLES, PER_SHARD = 24, 4
LISTS = "documents-*.json"


@pytest.fixture(scope="module")
def corpus(inputs: Inputs) -> Path:
    """The session's corpus, in a file of its own."""
    path = inputs.folder / "listed.jsonl"
    shutil.copyfile(inputs.corpus, path)
    return path


@pytest.fixture(scope="module")
def config(inputs: Inputs, corpus: Path) -> Path:
    path = write_capture(inputs, "listed", samples=SAMPLES, per_shard=PER_SHARD)
    path.write_text(path.read_text().replace(str(inputs.corpus), str(corpus)))
    return path


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, inputs: Inputs, config: Path) -> Path:
    store = inputs.folder / "listed-store"
    assert run_in(pool, 1, config, store) is True
    assert len(list((store / "shards").glob(LISTS))) == len(shards_of(store)) == 6
    assert verify(store).problems == ()
    return store


@pytest.fixture
def without_lists(undisturbed: Path, tmp_path: Path) -> Path:
    """A copy of the store that has lost all lists."""
    store = tmp_path / "store"
    shutil.copytree(undisturbed, store)
    for path in (store / "shards").glob(LISTS):
        path.unlink()
    return store


def times(store: Path) -> dict[str, int]:
    """When each file of records was written."""
    return {path.name: path.stat().st_mtime_ns for path in (store / "shards").glob("logits-*")}


@pytest.mark.parametrize("lost", ["two", pytest.param("all", marks=pytest.mark.slow)])
def test_the_same_capture_writes_lost_lists_again_and_no_record(
    pool: Pool, config: Path, undisturbed: Path, tmp_path: Path, lost: str
) -> None:
    store = tmp_path / "store"
    shutil.copytree(undisturbed, store)
    for path in sorted((store / "shards").glob(LISTS))[:: 1 if lost == "all" else 4]:
        path.unlink()
    if lost == "two":
        path = store / "shards" / "documents-000002.json"
        path.write_text(path.read_text().replace('"shard": 2', '"shard": 3'))
    before = times(store)
    assert run_in(pool, 1, config, store) is True
    assert contents(store) == contents(undisturbed)
    assert times(store) == before
    assert verify(store).problems == ()


@pytest.mark.slow
def test_a_capture_from_before_there_were_lists_goes_on_and_keeps_its_shards(
    pool: Pool, config: Path, undisturbed: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    assert run_in(pool, 1, config, store, stop_after=4) is False
    there = shards_of(store)
    assert 1 <= len(there) < 6
    for path in (store / "shards").glob(LISTS):
        path.unlink()
    before = times(store)
    assert run_in(pool, 2, config, store) is True
    assert contents(store) == contents(undisturbed)
    assert before.items() <= times(store).items()


@pytest.mark.slow
def test_each_job_writes_the_lists_of_its_own_shards(
    pool: Pool, config: Path, undisturbed: Path, without_lists: Path
) -> None:
    for job in range(2):
        assert run_in(pool, 1, config, without_lists, "store.jobs=2", f"store.job={job}") is True
        written = sorted(path.name for path in (without_lists / "shards").glob(LISTS))
        assert len(written) == 3 * (job + 1)
    assert contents(without_lists) == contents(undisturbed)


@pytest.mark.slow
def test_a_list_of_changed_texts_is_refused_and_nothing_is_written(
    pool: Pool, config: Path, corpus: Path, undisturbed: Path, tmp_path: Path
) -> None:
    store, intact = tmp_path / "store", corpus.read_bytes()
    shutil.copytree(undisturbed, store)
    (store / "shards" / "documents-000001.json").unlink()
    before = contents(store)
    rows = [json.loads(line)["text"] for line in intact.decode().splitlines()]
    # Of the same size, which a plan compares.
    changed = [text[::-1] if text.isascii() else text for text in rows]
    text = "".join(json.dumps({"text": one}) + "\n" for one in changed)
    assert len(text) == len(intact)
    corpus.write_text(text)
    try:
        found = str(run_in(pool, 1, config, store))
    finally:
        corpus.write_bytes(intact)
    assert found.startswith("StoreError: ")
    assert "logits-000001.array_record: its records have other tokens than data.sources" in found
    assert "restore the files" in found
    assert contents(store).keys() - {"capture/job-0.lock"} == before.keys()


@pytest.mark.slow
def test_a_stop_is_logged_and_the_next_start_goes_on(
    pool: Pool, config: Path, undisturbed: Path, without_lists: Path
) -> None:
    assert run_in(pool, 1, config, without_lists, stop_after=10) is False
    assert len(list((without_lists / "shards").glob(LISTS))) == 2
    assert run_in(pool, 1, config, without_lists) is True
    assert contents(without_lists) == contents(undisturbed)
