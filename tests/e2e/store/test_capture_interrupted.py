"""A capture that is killed, stopped or out of disk goes on to the same store."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from megatron_distill.store import StoreReader, verify
from tests.distributed.pool import Pool
from tests.e2e.captures import (
    SCRIPT,
    has_shards,
    partial_files,
    run_in,
    shards_of,
    write_capture,
)
from tests.e2e.faults.test_kill import kill_everything
from tests.e2e.processes import Hold, Started, torchrun
from tests.e2e.runs import Inputs
from tests.support.store_samples import contents

LONG = 600  # samples: some seconds
LONG_SHARD = 24
SHARDS = LONG // LONG_SHARD


@pytest.fixture(scope="module")
def config(inputs: Inputs) -> Path:
    return write_capture(inputs, "long_capture", samples=LONG, per_shard=LONG_SHARD)


@pytest.fixture(scope="module")
def undisturbed(
    pool: Pool, config: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """The files that every capture here must come to."""
    store = tmp_path_factory.mktemp("undisturbed") / "store"
    assert run_in(pool, 2, config, store) is True
    assert not verify(store).problems
    assert not (store / "capture").exists()
    found = contents(store)
    shutil.rmtree(store)
    return found


def held(store: Path) -> Hold:
    """A capture that a test interrupts in its first half."""
    return Hold(store / "shards" / f"logits-{SHARDS // 2:06d}.json")


def arguments(config: Path, store: Path, *overrides: str) -> list[str]:
    return ["--config", str(config), f"store.path={store}", *overrides]


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_to_the_same_files(
    pool: Pool, config: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    store = tmp_path / "store"
    given = arguments(config, store)
    with torchrun(tmp_path, given, script=SCRIPT, hold=held(store)) as started:
        started.wait_until(has_shards(store, 5))
        kill_everything(started)
    before = contents(store / "shards")
    there = shards_of(store)
    assert 5 <= len(there) < SHARDS, started.log.read_text()
    assert (store / "capture").is_dir()
    assert run_in(pool, 2, config, store) is True
    assert contents(store) == undisturbed
    for name in there:
        assert before[f"{name}.json"] == undisturbed[f"shards/{name}.json"]


@pytest.mark.slow
def test_asked_to_stop_the_ranks_leave_nothing_half(
    pool: Pool, config: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    store = tmp_path / "store"
    given = arguments(config, store)
    with torchrun(tmp_path, given, script=SCRIPT, hold=held(store)) as started:
        started.wait_until(has_shards(store, 3))
        started.ranks()[-1].send_signal(signal.SIGTERM)
        started.let_go()  # the other rank, which has no signal
        assert started.wait() == 0, started.log.read_text()
        started.wait_for_all()
    assert_ended_well(started, store)
    # Shards that are there are not written again, in a layout of another number of replicas.
    times = {path: path.stat().st_mtime_ns for path in (store / "shards").iterdir()}
    assert run_in(pool, 1, config, store) is True
    assert contents(store) == undisturbed
    assert times.items() <= {p: p.stat().st_mtime_ns for p in (store / "shards").iterdir()}.items()


def assert_ended_well(started: Started, store: Path) -> None:
    text = started.log.read_text()
    assert started.statuses() == ["0", "0"], text
    assert "stopped by a signal; start the same command again" in text
    assert 3 <= len(shards_of(store)) < SHARDS
    assert partial_files(store) == []
    assert not (store / "manifest.json").exists()


@pytest.mark.slow
def test_a_start_goes_on_where_the_first_hole_begins(
    pool: Pool, config: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    store = tmp_path / "store"
    assert run_in(pool, 2, config, store, stop_after=30) is False
    there = shards_of(store)
    assert 3 <= len(there) < SHARDS
    kept = sorted((store / "capture").glob("stream-*.json"))
    assert len(kept) >= len(there)
    # A place that was tampered with is found, and only one of the first hole or before is used.
    value = json.loads(kept[0].read_text())
    kept[0].write_text(json.dumps(value | {"shard": 3}))
    text = run_in(pool, 2, config, store)
    assert f"StoreError: {kept[0]}: damaged, its content does not match its seal" in str(text)
    for path in kept[:2]:
        path.unlink()
    assert run_in(pool, 2, config, store) is True
    assert contents(store) == undisturbed


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_file_that_one_rank_cannot_write_ends_all(
    pool: Pool, inputs: Inputs, tmp_path: Path, failing: int
) -> None:
    config = write_capture(inputs, "two_shards", samples=2 * LONG_SHARD, per_shard=LONG_SHARD)
    store = tmp_path / "store"
    text = str(run_in(pool, 2, config, store, limits={failing: 100_000}))
    assert text.startswith(f"StoreError: cannot write {store}/shards/logits-00000{failing}.array")
    assert "free disk space or name another folder" in text
    assert partial_files(store) == []
    assert run_in(pool, 2, config, store) is True
    assert run_in(pool, 2, config, tmp_path / "undisturbed") is True
    assert contents(store) == contents(tmp_path / "undisturbed")


@pytest.mark.slow
def test_jobs_write_one_store_and_the_last_one_finishes_it(
    pool: Pool, config: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    store = tmp_path / "store"
    assert run_in(pool, 2, config, store, "store.jobs=2", "store.job=1") is True
    assert [int(name[-6:]) % 2 for name in shards_of(store)] == [1] * (SHARDS // 2)
    assert not (store / "manifest.json").exists()
    assert run_in(pool, 1, config, store, "store.jobs=2", "store.job=0") is True
    assert contents(store) == undisturbed


@pytest.fixture(scope="module")
def short(inputs: Inputs) -> Path:
    return write_capture(inputs, "short_capture", samples=9, per_shard=4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("store.codec=u8", "store.codec is 'f32' in the store, not 'u8'"),
        ("seed=8", "; seed is 7 in the store, not 8"),
        (
            "teacher.architecture.norm_epsilon=0.001",
            "digest of the teacher's weights is 'v2:",
        ),
        ("capture.precision=bf16", "capture.precision is 'fp32' in the store, not 'bf16'"),
    ],
)
def test_other_settings_are_refused_by_name(
    pool: Pool, short: Path, tmp_path: Path, change: str, words: str
) -> None:
    store = tmp_path / "store"
    assert run_in(pool, 1, short, store, stop_after=2) is False
    before = contents(store)
    text = str(run_in(pool, 2, short, store, change))
    assert text.startswith(f"StoreError: {store}: the store was started with other settings (")
    assert words in text
    assert contents(store) == before


def test_a_complete_store_is_left_as_it_is(pool: Pool, short: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert run_in(pool, 1, short, store) is True
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    assert run_in(pool, 2, short, store) is True
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before
    assert StoreReader.open(store).samples == 9
    assert (store / "tokenizer" / "tokenizer.json").is_file()


def test_the_files_of_a_killed_capture_are_put_right(
    pool: Pool, short: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    assert run_in(pool, 1, short, store) is True
    before = contents(store)
    # Killed after the manifest, before it, and a shard that was taken out.
    (store / "capture").mkdir()
    (store / "capture" / "stream-000001.json").write_text("{}")
    assert run_in(pool, 1, short, store) is True
    assert contents(store) == before
    assert not (store / "capture").exists()
    for name in ("manifest.json", "shards/logits-000001.json"):
        (store / name).unlink()
        assert run_in(pool, 1, short, store) is True
        assert contents(store) == before


def test_a_store_in_the_place_of_a_file_is_refused(pool: Pool, short: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = str(run_in(pool, 2, short, tmp_path / "file" / "store"))
    assert text.startswith(f"StoreError: cannot write {tmp_path}/file/store: Not a directory")
