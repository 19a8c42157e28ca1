"""Runs with feature losses that are refused, each with its reason."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.distributed.pool import Pool
from tests.e2e.runs import assembled, checkpoints, failure, run, train_parts
from tests.e2e.training.test_features import (
    LOSSES,
    MAPS,
    MLP,
    PIPELINE,
    SHARED,
    TENSOR,
    saved_features,
)

saved = saved_features


@pytest.mark.slow
def test_only_a_run_of_the_same_features_goes_on(
    pool: Pool, dense: Path, saved: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    going_on = ("train.steps=3", "schedule.warmup_steps=1", "checkpoint.save=true")
    for changes, part in (
        ((LOSSES.replace("cosine}, {match", "mse}, {match"), MLP), "losses are ['feature_mse_1_2'"),
        ((LOSSES, MLP.replace("24", "16")), "'sizes': [32, 24, 40]} in the checkpoint and "),
        ((LOSSES, SHARED), "projectors are {'names': ['1_2', "),
        ((), "losses are ['feature_mse_1_2'"),
    ):
        text = failure(pool, 2, dense, folder, *going_on, *changes)
        assert text.startswith(f"CheckpointError: {folder / 'checkpoints' / 'step_0000002'}")
        assert part in text
        assert "student.checkpoint" in text
    # Weights may change, as those of other terms may.
    heavier = LOSSES.replace("weight: 0.5", "weight: 0.8")
    found = run(pool, 2, dense, folder, *going_on, heavier, MLP)
    assert [record["step"] for record in found] == [1, 2, 3]


def poisoned_step(
    rank: int, world: int, config: Path, overrides: list[str]
) -> tuple[str, bool, list[float]]:
    """Train with a projector's gradient that overflows, while everything else is finite."""
    with assembled(rank, world, config, overrides) as (found, parts):
        features = parts.objective.features
        assert features is not None
        assert features.projectors is not None
        # Weights of zero keep the gradient, however large, from the student.
        for _, tensor in features.projectors._tensors():
            tensor.zero_()
        weights = [p for chunk in parts.state.student.chunks for p in chunk.parameters()]
        before = [weight.detach().clone() for weight in weights]
        text = train_parts(found, parts)
        same = all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))
        moved = [float(tensor.abs().max()) for _, tensor in features.projectors._tensors()]
        return text, same, moved


@pytest.mark.parametrize("layout", [PIPELINE, pytest.param(TENSOR, marks=pytest.mark.slow)])
def test_a_step_not_finite_in_a_projector_alone_is_not_applied(
    pool: Pool, dense: Path, tmp_path: Path, layout: str
) -> None:
    # Only the square of the gradient overflows.
    huge = "objective.features=[{student: 1, teacher: 2, weight: 1e27}]"
    overrides = [f"output={tmp_path}", huge, layout, "checkpoint.save=true"]
    found = pool.run(2, poisoned_step, dense, overrides)
    text, student_stays, moved = found[0]
    assert found[1][0] == text
    assert text.startswith("step 1: the loss is ")
    assert "that of the projectors inf; the step was not applied" in text
    assert "nan" not in text
    assert student_stays
    assert found[1][1]
    assert moved == found[1][2] == [0.0] * len(moved)
    assert checkpoints(tmp_path) == []


def test_layers_that_an_opened_model_lacks_are_named_on_all_ranks(
    pool: Pool, dense: Path, saved: Path, tmp_path: Path
) -> None:
    start = (f"student.checkpoint={saved}", "train.steps=1", "schedule.warmup_steps=0")
    features = (
        "objective.features=[{student: 5, teacher: 2}, {student: 2, teacher: 1}, "
        "{match: uniform, weight: 0.3}]"
    )
    text = failure(pool, 2, dense, tmp_path, *start, features, "student.architecture=null")
    for part in (
        "ConfigError: feature losses between 4 student layers and 2 teacher layers: ",
        "2 problems",
        "objective.features.0.student = 5: the student has layers 1 to 4, counted from 1",
        "objective.features.2 and objective.features.1 both have the mse loss of "
        "student layer 2 and teacher layer 1",
    ):
        assert part in text


def test_maps_of_layers_that_see_other_keys_are_refused(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    window = "student.architecture={sliding_window: 8, sliding_layers: [3]}"
    text = failure(pool, 2, dense, tmp_path, MAPS, window)
    assert text.startswith(
        "ConfigError: objective.features with loss = 'attention' need student and"
    )
    assert (
        "layer 4 of the student has a sliding_window of 8, layer 2 of the teacher one of None"
        in text
    )
    assert "layer 2 of the student" not in text
