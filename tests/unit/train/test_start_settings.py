"""The start of a run: its clock, and the settings that changed since the last one."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_distill.train.run_folder import keep_settings, setting_changes
from megatron_distill.train.start_clock import StartClock


def test_the_parts_of_a_start_add_up_to_the_time_since_the_process_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, now = psutil.Process().create_time(), time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    whole = now - began
    clock = StartClock(joined=now - 0.75 * whole, opened=now - 0.25 * whole)
    line = clock.line(load_seconds=0.1 * whole, step_seconds=0.05 * whole)
    first, *parts = map(float, re.findall(r"([\d.]+) s", line))
    assert first == pytest.approx(whole, abs=1.0)
    wanted = [0.25 * whole, 0.4 * whole, 0.1 * whole, 0.05 * whole]
    if len(parts) == 5:  # a young process has nothing to show before the step
        wanted.insert(3, 0.2 * whole)
    assert parts == pytest.approx(wanted, abs=0.2)


def test_ranks_that_had_met_before_have_no_start() -> None:
    assert StartClock(joined=None).line(load_seconds=0.0, step_seconds=1.0) is None


BEFORE: dict[str, Any] = {
    "seed": 1,
    "teacher": None,
    "optimizer": {"learning_rate": 0.003, "beta1": 0.9},
    "data": {"sources": [{"name": "a", "weight": 1.0}], "paths": ["x", "y"]},
}


def changed(**now: Any) -> list[str]:
    return [str(change) for change in setting_changes(BEFORE, {**BEFORE, **now})]


def test_equal_settings_have_no_changes() -> None:
    assert changed() == []
    # A number is the same however it is written.
    assert changed(seed=1.0) == []


@pytest.mark.parametrize(
    ("now", "lines"),
    [
        ({"seed": 2}, ["seed: 1 -> 2"]),
        (
            {"optimizer": {"learning_rate": 0.001, "beta1": 0.8}},
            ["optimizer.learning_rate: 0.003 -> 0.001", "optimizer.beta1: 0.9 -> 0.8"],
        ),
        ({"teacher": {"hf": "t"}}, ['teacher: null -> {"hf": "t"}']),
        # Of a whole section what is given, not its twenty keys that are null.
        (
            {"teacher": {"hf": "t", "store": None, "transfer": {"what": "hidden", "k": None}}},
            ['teacher: null -> {"hf": "t", "transfer": {"what": "hidden"}}'],
        ),
        ({"optimizer": {"beta1": 0.9}}, ["optimizer.learning_rate: 0.003 -> nothing"]),
        ({"new": {"key": True}}, ['new: nothing -> {"key": true}']),
        (
            {
                "data": {
                    "sources": [{"name": "a", "weight": 2.0}, {"name": "b"}],
                    "paths": ["x"],
                }
            },
            [
                "data.sources.0.weight: 1.0 -> 2.0",
                'data.sources.1: nothing -> {"name": "b"}',
                'data.paths: ["x", "y"] -> ["x"]',
            ],
        ),
        (
            {"data": {"sources": [], "paths": ["x", "y"]}},
            ['data.sources: [{"name": "a", "weight": 1.0}] -> []'],
        ),
    ],
)
def test_each_changed_key_is_a_line(now: dict[str, Any], lines: list[str]) -> None:
    assert changed(**now) == lines


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def test_a_start_that_changes_nothing_writes_nothing(tmp_path: Path) -> None:
    assert keep_settings(tmp_path, "a", resumed_step=None) is None
    before = (tmp_path / "config.yaml").stat()
    assert keep_settings(tmp_path, "a", resumed_step=20) is None
    after = (tmp_path / "config.yaml").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert files(tmp_path) == {"config.yaml": "a"}


def test_each_replaced_start_has_a_numbered_file(tmp_path: Path) -> None:
    keep_settings(tmp_path, "a", resumed_step=None)
    assert keep_settings(tmp_path, "b", resumed_step=20) == tmp_path / "config.step_0000020.yaml"
    kept = keep_settings(tmp_path, "c", resumed_step=20)
    assert kept == tmp_path / "config.step_0000020.2.yaml"
    keep_settings(tmp_path, "a", resumed_step=40)
    assert files(tmp_path) == {
        "config.step_0000020.2.yaml": "b",
        "config.step_0000020.yaml": "a",
        "config.step_0000040.yaml": "c",
        "config.yaml": "a",
    }


def test_a_start_from_the_beginning_replaces_a_run_without_checkpoint(tmp_path: Path) -> None:
    keep_settings(tmp_path, "a", resumed_step=None)
    assert keep_settings(tmp_path, "b", resumed_step=None) is None
    assert files(tmp_path) == {"config.yaml": "b"}


def test_a_start_that_was_killed_between_two_files_is_done_again(tmp_path: Path) -> None:
    keep_settings(tmp_path, "a", resumed_step=None)
    # The first file was complete, the second was not.
    (tmp_path / "config.step_0000020.yaml").write_text("a")
    (tmp_path / "config.yaml.partial").write_text("ha")
    kept = keep_settings(tmp_path, "half", resumed_step=20)
    assert kept == tmp_path / "config.step_0000020.yaml"
    assert files(tmp_path) == {"config.step_0000020.yaml": "a", "config.yaml": "half"}


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    keep_settings(tmp_path, "a", resumed_step=None)
    (tmp_path / "config.step_0000020.yaml.partial").mkdir()
    with pytest.raises(OSError, match="directory"):
        keep_settings(tmp_path, "b", resumed_step=20)
    assert (tmp_path / "config.yaml").read_text() == "a"
