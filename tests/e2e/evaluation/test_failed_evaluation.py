"""An evaluation that fails during a run, and one without the measure of the best checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from megatron_distill.errors import DataError
from tests.distributed.pool import Pool
from tests.e2e.evaluation.test_evaluation import evaluations, quiz, saved, train_evaluating
from tests.e2e.runs import checkpoints, log_of, run


def _failing(
    rank: int, world: int, config: Path, overrides: list[str], call: int
) -> tuple[str, str]:
    """The error of a run in which one evaluation fails on all ranks, and its log."""
    calls = count()

    def failing(evaluate: Callable[..., Any], model: Any, **named: Any) -> Any:
        if next(calls) == call:
            raise DataError("no grader starts; install it")
        return evaluate(model, **named)

    with log_of(rank) as log:
        try:
            train_evaluating(rank, world, config, overrides, failing)
        except DataError as error:
            return str(error), log.getvalue()
    return "", log.getvalue()


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_evaluation_that_fails_loses_no_step(
    pool: Pool, dense: Path, tmp_path: Path, world: int
) -> None:
    """The step is saved, and a later start begins with its evaluation.

    The metric of the best checkpoint is one that words of several tokens do not have. A warning
    tells so at the start.
    """
    tasks, output, whole = quiz(tmp_path), tmp_path / "run", tmp_path / "whole"
    best = ("checkpoint.keep_best.metric=quiz.letter_mass", "evaluation.at_start=false")
    given = ("train.steps=2", "checkpoint.save=true", *tasks, *best, "evaluation.teacher=false")
    endings = pool.run(world, _failing, dense, [f"output={output}", *given], 0)
    assert [error for error, _ in endings] == ["no grader starts; install it"] * world
    assert checkpoints(output) == ["step_0000002"]
    assert evaluations(output) == []
    run(pool, world, dense, output, *given)
    endings = pool.run(world, _failing, dense, [f"output={whole}", *given], 9)
    text = "checkpoint.keep_best.metric = 'quiz.letter_mass' is not in the results of quiz, so"
    assert [(error, log.count(text)) for error, log in endings] == [("", 1), ("", 0)][:world]
    given = "quiz.acc, quiz.acc_norm, quiz.calibration_error, prose.bits_per_byte"
    assert f"give one of {given}" in endings[0][1]
    assert evaluations(output) == evaluations(whole)
    assert saved(output, 2) == saved(whole, 2)


def test_the_best_validation_of_a_step_whose_evaluation_fails_is_kept(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    """Also of the last step, whose validation no later start makes up."""
    output = tmp_path / "run"
    given = ("train.steps=2", "checkpoint.save=true", *quiz(tmp_path), "evaluation.at_start=false")
    given += ("checkpoint.keep_best.metric=validation.ce_loss", "validation.interval=2")
    given += ("validation.samples=2",)
    endings = pool.run(
        1, _failing, dense, [f"output={output}", *given, "evaluation.teacher=false"], 0
    )
    assert endings[0][0] == "no grader starts; install it"
    assert "the evaluation after step 2 failed: no grader starts; install it" in endings[0][1]
    best = json.loads((output / "checkpoints" / "best.json").read_text())
    assert best["step"] == 2
    assert best["metric"] == "validation.ce_loss"
