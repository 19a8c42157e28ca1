"""An evaluation that a signal ended is made up: its step may be the best, and may be the last."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.e2e.evaluation.test_evaluation import (
    COMMON,
    STEPS,
    evaluations,
    quiz,
    train_evaluating,
)
from tests.e2e.runs import checkpoints, run


def _interrupted(rank: int, world: int, config: Path, overrides: list[str], call: int) -> bool:
    """Train until a signal to the first rank ends the grading in the evaluation of this number."""
    calls = count()

    def ending(evaluate: Callable[..., Any], model: Any, **named: Any) -> Any:
        if next(calls) == call:
            model = replace(model, stop_requested=lambda: rank == 0)
        return evaluate(model, **named)

    return train_evaluating(rank, world, config, overrides, ending)


@pytest.mark.slow
def test_a_step_that_is_evaluated_on_resume_may_be_the_best_or_the_last(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    """Bits per byte fall: the largest are those of the first evaluation, which is made up."""
    output = tmp_path / "run"
    best = ("checkpoint.keep_best={metric: prose.bits_per_byte, mode: max}", "checkpoint.keep=1")
    only = ("evaluation.at_start=false", "evaluation.teacher=false")
    arguments = [*COMMON, *quiz(tmp_path), *best, *only]
    assert pool.run(2, _interrupted, dense, [f"output={output}", *arguments], 0) == [False] * 2
    assert checkpoints(output) == ["step_0000002"]
    # The evaluation after the second step is made up, and that after the last one is lost.
    assert pool.run(2, _interrupted, dense, [f"output={output}", *arguments], 1) == [True] * 2
    (found,) = evaluations(output)
    value = found[1]["student"]["prose"]["bits_per_byte"]
    kept = ["best.json", "step_0000002", f"step_{STEPS:07d}"]
    assert checkpoints(output) == kept
    written = json.loads((output / "checkpoints" / "best.json").read_text())
    assert written == {"step": 2, "metric": "prose.bits_per_byte", "value": value}
    for _ in range(2):  # the second time nothing is left to do
        run(pool, 2, dense, output, *arguments)
        assert [step for step, _ in evaluations(output)] == [2, STEPS]
        assert checkpoints(output) == kept
