"""The rule of the best checkpoint: its metric against the figures of a run."""

from __future__ import annotations

import pytest

from megatron_distill.train.checkpoint.best import BestRule


@pytest.mark.parametrize(
    ("metric", "is_missing"),
    [("validation.loss", True), ("validation.ce_loss", False), ("mmlu.acc", False)],
)
def test_a_validation_figure_that_the_run_lacks_is_named(metric: str, is_missing: bool) -> None:
    """A metric of a task is checked at the start, where the task is read."""
    text = BestRule(metric, "min").missing_figure(["validation.ce_loss", "validation.kd_loss"])
    assert (f"checkpoint.keep_best.metric = '{metric}' is not a figure" in text) == is_missing
    assert ("give one of validation.ce_loss, validation.kd_loss" in text) == is_missing
