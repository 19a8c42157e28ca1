"""A writer that is killed or out of disk leaves whole shards, and the next one writes the rest."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron_distill.errors import StoreError
from megatron_distill.runtime.atomic_files import partial_files
from megatron_distill.store import CaptureSettings, binary, verify
from tests.support.store_samples import begin, contents, fill, settings, write_store

# Steps of the commits: everything that changes the disk.
STEPS = (
    "os.fsync",
    "pathlib.Path.replace",
    "pathlib.Path.hardlink_to",
    "pathlib.Path.mkdir",
    "os.open",
    "os.write",
    "os.ftruncate",
    "megatron_distill.store.binary.RecordFileWriter.write",
    "megatron_distill.store.binary.RecordFileWriter.close",
)
SAMPLES = {"samples": 3, "per_shard": 2}


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    """Starts processes that have imported everything and opened nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.unit.store.test_kill"])
    return context


def write_and_die(folder: Path, step: int, counted: object) -> None:
    """Write a store and be killed before the given step (after it, the next one begins)."""
    done = 0

    def killing(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal done
            if done == step:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            counted.value = done  # type: ignore[attr-defined]
            return original(*args, **kwargs)

        return call

    for name in STEPS:
        owner, _, attribute = name.rpartition(".")
        target = {
            "os": os,
            "pathlib.Path": Path,
            "megatron_distill.store.binary.RecordFileWriter": binary.RecordFileWriter,
        }[owner]
        setattr(target, attribute, killing(getattr(target, attribute)))
    write_store(folder, settings(), **SAMPLES)


def resume(folder: Path, wanted: CaptureSettings, **sizes: int) -> None:
    """Go on after an interruption; committed files stay as they are."""
    before = contents(folder) if folder.exists() else {}
    write_store(folder, wanted, **sizes)
    after = contents(folder)
    for name, content in before.items():
        if name.endswith(".json") and ".partial" not in name:
            assert after[name] == content, name


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_step_is_resumed_to_the_same_bytes(
    tmp_path: Path, server: ForkServerContext, stride: int
) -> None:
    write_store(tmp_path / "undisturbed", settings(), **SAMPLES)
    expected = contents(tmp_path / "undisturbed")
    counted = server.Value("i", 0)
    step, had_stale, had_holes = 0, 0, set()
    while True:
        folder = tmp_path / f"killed{step}"
        process = server.Process(target=write_and_die, args=(folder, step, counted))
        process.start()
        process.join(240)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        if (folder / "plan.json").exists():
            report = verify(folder)
            assert report.bad_shards == (), "what is committed is whole"
            had_holes.add(len(report.missing))
        if folder.exists():
            had_stale += bool(partial_files(folder) + partial_files(folder / "shards"))
        resume(folder, settings(), **SAMPLES)
        assert contents(folder) == expected, f"killed before step {step}"
        step += stride
    assert contents(folder) == expected
    assert step > 30
    assert had_stale > 10 / stride
    assert had_holes == {0, 1, 2}


def write_some(folder: Path, shards: list[int]) -> None:
    fill(begin(folder, settings(), samples=16, per_shard=2), shards)
    begin(folder, settings(), samples=16, per_shard=2).holes()


def test_processes_that_start_together_write_one_store(
    tmp_path: Path, server: ForkServerContext
) -> None:
    write_store(tmp_path / "one", settings(), samples=16, per_shard=2)
    for trial in range(2):
        folder = tmp_path / f"together{trial}"
        processes = [
            server.Process(target=write_some, args=(folder, [number, number + 4]))
            for number in range(4)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
            assert process.exitcode == 0
        writer = begin(folder, settings(), samples=16, per_shard=2)
        assert writer.holes() == []
        writer.finish()
        assert contents(folder) == contents(tmp_path / "one")


def big() -> CaptureSettings:
    return settings(k=64, sequence_length=1024)


def test_a_disk_that_fills_up_costs_no_committed_shard(
    tmp_path: Path, small_disk: Callable[[str], Path]
) -> None:
    wanted = big()
    write_store(tmp_path / "undisturbed", wanted, samples=6, per_shard=2)
    expected = contents(tmp_path / "undisturbed")
    sizes = {0, 4, 8, 128, 300, 448, 600, 800, 980, 1100, 1200}
    stopped_at, committed = set(), set()
    for size in sorted(sizes):
        folder = small_disk(f"{size or 4}k") / "store"
        if size == 0:
            (folder.parent / "filler").write_bytes(bytes(4096))
        with pytest.raises(StoreError, match="free disk space or name another folder") as caught:
            write_store(folder, wanted, samples=6, per_shard=2)
        assert str(folder) in str(caught.value)
        assert "No space left" in str(caught.value)
        stopped_at.add(str(caught.value).partition(":")[0].rpartition("/")[2])
        there = contents(folder) if folder.exists() else {}
        assert {name: expected[name] for name in there} == there
        committed.add(sum(name.endswith("0.json") for name in there))
        if there:
            subprocess.run(["mount", "-o", "remount,size=8m", folder.parent], check=True)
            resume(folder, wanted, samples=6, per_shard=2)
            assert contents(folder) == expected
    assert {"plan.json", "logits-000000.array_record"} <= stopped_at
    assert committed == {0, 1}


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace", "os.write"])
def test_an_error_of_the_disk_at_a_later_step_is_reported(tmp_path: Path, step: str) -> None:
    writer = begin(tmp_path, settings())
    full = OSError(28, "No space left on device")
    with (
        patch(step, side_effect=full),
        pytest.raises(StoreError, match="cannot write .*: No space left on device; free disk"),
    ):
        fill(writer, [0])
    assert partial_files(tmp_path / "shards") == []
    assert writer.holes() == [0, 1, 2]
    fill(writer, [0])
    assert writer.holes() == [1, 2]
