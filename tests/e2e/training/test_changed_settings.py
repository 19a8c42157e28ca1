"""A resumed run lists the settings that changed, and keeps those of each start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.distributed.pool import Pool
from tests.e2e.failing import Ending, call, message
from tests.e2e.runs import checkpoints

FIRST = (
    "train.steps=2", "schedule.decay_steps=9", "checkpoint.save=true", "optimizer.epsilon=1e-7",
)  # fmt: skip
SECOND = (
    "train.steps=3", "schedule.decay_steps=9", "checkpoint.save=true",
    "optimizer.learning_rate=0.001", "objective.terms.0.weight=0.5", "parallel.tensor=2",
)  # fmt: skip
CHANGED = [
    "parallel.tensor: 1 -> 2",
    "objective.terms.0.weight: 1.0 -> 0.5",
    "optimizer.learning_rate: 0.003 -> 0.001",
    "optimizer.epsilon: 1e-07 -> 1e-08",
    "train.steps: 2 -> 3",
]
MARK = "changed since step_0000002: "


def changes(ending: Ending) -> list[str]:
    """The changes that a rank named."""
    return [line.split(MARK)[1] for line in ending.stderr.splitlines() if MARK in line]


def kept(output: Path) -> list[str]:
    """The names of all configurations of a run."""
    return sorted(path.name for path in output.glob("config*"))


@pytest.fixture
def begun(pool: Pool, dense: Path, tmp_path: Path) -> Path:
    """A run of two steps with a checkpoint."""
    endings = call(pool, dense, tmp_path, *FIRST)
    assert [ending.status for ending in endings] == [0, 0], endings[0].stderr
    assert checkpoints(tmp_path) == ["step_0000002"]
    return tmp_path


@pytest.mark.slow
def test_changes_are_reported_once_and_each_start_is_saved(
    pool: Pool, dense: Path, begun: Path
) -> None:
    first = (begun / "config.yaml").read_bytes()
    # A run that cannot go on is refused as before, and has not started.
    wrong = (*SECOND, "student.architecture.hidden_size=48")
    assert "hidden_size 32 vs 48" in message(call(pool, dense, begun, *wrong))
    found = message(call(pool, dense, begun, *SECOND, "train.precision=bf16"))
    assert "train.precision = 'bf16': " in found
    assert "Set train.precision=fp32" in found
    assert "damaged" not in found
    assert kept(begun) == ["config.yaml"]
    assert (begun / "config.yaml").read_bytes() == first

    endings = call(pool, dense, begun, *SECOND)
    assert [ending.status for ending in endings] == [0, 0], endings[0].stderr
    assert sorted(changes(endings[0])) == sorted(CHANGED)
    assert changes(endings[1]) == []
    assert kept(begun) == ["config.step_0000002.yaml", "config.yaml"]
    assert (begun / "config.step_0000002.yaml").read_bytes() == first
    newest = yaml.safe_load((begun / "config.yaml").read_text())
    assert newest["optimizer"]["learning_rate"] == 0.001

    again = call(pool, dense, begun, *SECOND)
    assert [ending.status for ending in again] == [0, 0]
    assert "changed since" not in again[0].stderr
    assert kept(begun) == ["config.step_0000002.yaml", "config.yaml"]


@pytest.mark.slow
def test_changes_are_those_since_the_checkpoint_and_not_since_the_last_start(
    pool: Pool, dense: Path, begun: Path
) -> None:
    # A start that got as far as its first step, and left no checkpoint.
    bad = (*SECOND, "objective.ce_weight=1e30")
    assert "step 3: the loss is" in message(call(pool, dense, begun, *bad))
    endings = call(pool, dense, begun, *SECOND)
    assert sorted(changes(endings[0])) == sorted(CHANGED)
    assert kept(begun) == [
        "config.step_0000002.2.yaml",
        "config.step_0000002.yaml",
        "config.yaml",
    ]
    second = yaml.safe_load((begun / "config.step_0000002.2.yaml").read_text())
    assert second["objective"]["ce_weight"] == 1e30


@pytest.mark.slow
def test_a_checkpoint_of_an_older_version_is_compared_with_the_runs_file(
    pool: Pool, dense: Path, begun: Path
) -> None:
    path = begun / "checkpoints" / "step_0000002" / "description.json"
    description = json.loads(path.read_text())
    assert description["configuration"]["optimizer"]["epsilon"] == 1e-7
    del description["configuration"]
    path.write_text(json.dumps(description))
    # Keys that the older version did not have are not reported as changed to their defaults.
    settings = yaml.safe_load((begun / "config.yaml").read_text())
    del settings["schedule"]["wsd_decay_form"]
    (begun / "config.yaml").write_text(yaml.safe_dump(settings))
    endings = call(pool, dense, begun, *SECOND)
    assert [ending.status for ending in endings] == [0, 0], endings[0].stderr
    assert sorted(changes(endings[0])) == sorted(CHANGED)
