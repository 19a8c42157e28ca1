"""The lines of a run's state about its steps: why none is slow, and more than are wanted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_distill.launching.run_status import read_status
from tests.unit.launching.test_run_status import begin


@pytest.mark.parametrize(
    ("settings", "layout", "reason"),
    [
        ("", None, "logging.straggler_interval"),
        ("logging: {straggler_interval: 0}\n", None, "logging.straggler_interval is 0"),
        (
            "logging: {straggler_interval: 100}\n",
            "tp1-pp2-vpp1-cp1-ep1-dp2",
            "fewer steps than logging.straggler_interval = 100",
        ),
        (
            "logging: {straggler_interval: 100}\n",
            "tp1-pp2-vpp1-cp1-ep1-dp1",
            "one rank per pipeline stage has nothing to be compared with",
        ),
        (
            "logging: {straggler_interval: 25}\n",
            None,
            "no start has made logging.straggler_interval = 25 steps, or a pipeline stage has one "
            "rank",
        ),
    ],
)
def test_a_run_without_slow_ranks_says_why(
    tmp_path: Path, settings: str, layout: str | None, reason: str
) -> None:
    run = begin(tmp_path / "run", steps_done=25)
    (run / "config.yaml").write_text(f"train: {{steps: 40}}\n{settings}")
    log = run / "metrics.jsonl"
    log.write_text(log.read_text().replace("slowest_ranks", "other"))
    description = run / "checkpoints" / "step_0000020" / "description.json"
    description.write_text(json.dumps({} if layout is None else {"layout": layout}))
    assert f"slowest     not known ({reason})" in read_status(run).lines()


def test_a_run_past_its_steps_has_no_share_of_them(tmp_path: Path) -> None:
    """Its second start asked for fewer."""
    run = begin(tmp_path / "run", steps_done=25)
    (run / "config.yaml").write_text("train: {steps: 20}\n")
    assert "step        25, past train.steps = 20" in read_status(run).lines()
