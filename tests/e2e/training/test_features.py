"""Runs with feature losses: the same in every layout, and resumed bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.distributed.hugging_face_models import stored_tensors
from tests.distributed.pool import Pool
from tests.e2e.converting import convert
from tests.e2e.runs import (
    PIPELINE,
    TENSOR,
    VIRTUAL,
    Inputs,
    assembled,
    course,
    quick_and_slow,
    run,
    validations,
)

LOSSES = (
    "objective.features=[{student: 1, teacher: 2, weight: 0.5}, "
    "{student: 3, teacher: 1, loss: cosine}, {match: uniform, loss: cosine, weight: 0.7}]"
)
MLP = "objective.projector={kind: mlp, hidden_size: 24, learning_rate: 0.01, weight_decay: 0.02}"
MAPS = (
    "objective.features=[{student: 2, teacher: 1, loss: attention}, {student: 1, teacher: 2, "
    "weight: 0.5}, {student: 4, teacher: 2, loss: attention, weight: 3.0}]"
)
SHARED = "objective.projector={shared: true}"
EQUAL = "teacher.architecture.hidden_size=32"
SHORT = ("train.steps=6", "schedule.warmup_steps=2")
RECOMPUTE = "train.recompute=full"
QUANTITIES = (
    "ce_loss", "kd_loss", "total_loss", "grad_norm", "projector_grad_norm", "features_loss",
    "feature_mse_1_2", "feature_cosine_3_1", "feature_cosine_1_1", "feature_cosine_2_1",
    "feature_cosine_3_2", "feature_cosine_4_2", "feature_attention_2_1", "feature_attention_4_2",
)  # fmt: skip


@pytest.mark.slow
def test_experts_and_bf16_have_features_too(pool: Pool, inputs: Inputs, tmp_path: Path) -> None:
    layout = (PIPELINE, "parallel.expert=2", RECOMPUTE)
    exact = run(pool, 1, inputs.folder / "moe.yaml", tmp_path / "one", LOSSES, *SHORT)
    found = run(pool, 4, inputs.folder / "moe.yaml", tmp_path / "many", LOSSES, *SHORT, *layout)
    for name in (name for name in QUANTITIES if name in exact[0]):
        assert found[0][name] == pytest.approx(exact[0][name], rel=3e-6), name
    rounded = run(
        pool, 1, inputs.folder / "moe.yaml", tmp_path / "bf16", LOSSES, *SHORT,
        "train.precision=bf16",
    )  # fmt: skip
    assert rounded[-1]["features_loss"] == pytest.approx(exact[-1]["features_loss"], rel=0.02)


SAVE = ("checkpoint.save=true", "validation.samples=8", "data.validation_fraction=0.2")
RESUMED: dict[str, tuple[int, Sequence[str], int, Sequence[str]]] = {
    "PP2+virtual in the same": (2, (PIPELINE, VIRTUAL), 2, (PIPELINE, VIRTUAL)),
    "DP2xTP2 to PP2": (4, (TENSOR,), 2, (PIPELINE,)),
    "saved meanwhile": (2, ("checkpoint.asynchronous=true",), 2, ("checkpoint.asynchronous=true",)),
}


def projector_parts(rank: int, world: int, config: Path, overrides: list[str]) -> list[bytes]:
    """Values of an assembled run's projectors and their moments."""
    with assembled(rank, world, config, overrides) as (_, parts):
        features = parts.objective.features
        assert features is not None
        assert features.projectors is not None
        return [tensor.numpy().tobytes() for _, tensor in features.projectors._tensors()]


@pytest.mark.parametrize("case", quick_and_slow(RESUMED, []))
def test_a_run_that_stops_goes_on_as_if_it_had_not(
    pool: Pool, dense: Path, tmp_path: Path, case: str
) -> None:
    world, layout, next_world, next_layout = RESUMED[case]
    both = (LOSSES, MLP, *SHORT, *SAVE)
    expected = run(pool, world, dense, tmp_path / "whole", *both, *layout)
    run(pool, world, dense, tmp_path / "cut", *both, *layout, stop_after=3)
    cut = [f"output={tmp_path / 'cut'}", *both]
    before = pool.run(world, projector_parts, dense, [*cut, *layout])
    after = pool.run(next_world, projector_parts, dense, [*cut, *next_layout])
    assert len(before[0]) == 6 * 3 * 4  # pairs of layers, weights and moments, an MLP's parameters
    assert all(parts == before[0] for parts in (*before, *after))
    found = run(pool, next_world, dense, tmp_path / "cut", *both, *next_layout)
    if layout == next_layout:
        assert course(found) == course(expected)
        held_out = validations(tmp_path / "cut")
        assert held_out == validations(tmp_path / "whole")
        assert {"features_loss", "feature_mse_1_2"} <= set(held_out[0]["validation"])
    for ours, other in zip(found, expected, strict=True):
        for name in (name for name in QUANTITIES if name in other):
            tolerance = 0.0 if layout == next_layout else 1e-4
            assert ours[name] == pytest.approx(other[name], rel=tolerance), (ours["step"], name)


@pytest.mark.parametrize(
    "undecayed", ["objective.projector.weight_decay=0.0", "optimizer.weight_decay=0"]
)
def test_projectors_train_and_are_saved_without_weight_decay(
    pool: Pool, dense: Path, tmp_path: Path, undecayed: str
) -> None:
    # Matrices and biases then have the same decay, and must stay two groups.
    both = (LOSSES, undecayed, "train.steps=2", "schedule.warmup_steps=0", "checkpoint.save=true")
    (before,) = pool.run(1, projector_parts, dense, [f"output={tmp_path / 'none'}", *both])
    run(pool, 1, dense, tmp_path / "run", *both)
    (after,) = pool.run(1, projector_parts, dense, [f"output={tmp_path / 'run'}", *both])
    assert len(before) == len(after) == 6 * 3 * 2  # a matrix and a bias of each pair of layers
    assert all(ours != other for ours, other in zip(after, before, strict=True))


@pytest.fixture(scope="module", name="saved")
def saved_features(pool: Pool, inputs: Inputs) -> Path:
    """A run with projectors and one checkpoint, not to be changed."""
    output = inputs.folder / "saved-features"
    short = ("train.steps=2", "schedule.warmup_steps=1", "checkpoint.save=true")
    run(pool, 1, inputs.folder / "dense.yaml", output, LOSSES, MLP, *short)
    return output


@pytest.mark.slow
def test_a_projector_serves_its_own_run_alone(
    pool: Pool, dense: Path, saved: Path, tmp_path: Path
) -> None:
    folder = saved / "checkpoints" / "step_0000002"
    names = set(FileSystemReader(str(folder)).read_metadata().state_dict_metadata)
    projectors = {name for name in names if name.startswith("projector.")}
    assert "projector.3_2.weights.1" in projectors
    assert "projector.exp_avg_sq.1_2.biases.0" in projectors
    # A run that starts from the student has projectors of its own, or none.
    start = (f"student.checkpoint={saved}", "train.steps=1", "schedule.warmup_steps=0")
    plain = run(pool, 1, dense, tmp_path / "plain", *start)
    again = run(pool, 2, dense, tmp_path / "again", *start, LOSSES, SHARED, PIPELINE)
    assert again[0]["ce_loss"] == pytest.approx(plain[0]["ce_loss"], rel=1e-6)
    # An export does not know of any.
    endings = convert(pool, "export", "--checkpoint", saved, "--hf", tmp_path / "out")
    assert [ending.status for ending in endings] == [0, 0], endings[0].stderr
    exported = stored_tensors(tmp_path / "out")
    assert exported
    assert not any("projector" in name for name in exported)


def test_layers_of_one_size_need_no_projector(pool: Pool, dense: Path, tmp_path: Path) -> None:
    short = ("train.steps=2", "schedule.warmup_steps=1", LOSSES, EQUAL)
    (plain, *_) = run(pool, 2, dense, tmp_path / "plain", *short, PIPELINE)
    assert "projector_grad_norm" not in plain
    (asked, *_) = run(pool, 1, dense, tmp_path / "asked", *short, "objective.projector.always=true")
    assert asked["projector_grad_norm"] > 0
    assert asked["feature_mse_1_2"] != pytest.approx(plain["feature_mse_1_2"], rel=1e-3)


def schedule_of(rank: int, world: int, config: Path, overrides: list[str]) -> list[Any]:
    """The learning rates of student and projectors at each step."""
    with assembled(rank, world, config, overrides) as (found, parts):
        features, schedule = parts.objective.features, parts.state.schedule
        assert features is not None
        assert features.projectors is not None
        rates = []
        for _ in range(found.train.steps):
            features.projectors.apply_gradients(
                schedule, norm=torch.tensor(0.0), skipped=torch.tensor(False)
            )
            groups = features.projectors._adam.param_groups
            rates.append((parts.state.optimizer.param_groups[0]["lr"], *(g["lr"] for g in groups)))
            schedule.step(1)
        return rates


def test_projectors_follow_the_schedule_in_shape(pool: Pool, dense: Path, tmp_path: Path) -> None:
    overrides = [f"output={tmp_path}", LOSSES, MLP, *SHORT, "schedule.min_learning_rate=0.0006"]
    (rates,) = pool.run(1, schedule_of, dense, overrides)
    expected = [0, 0.0015, 0.003, 0.00264853, 0.0018, 0.00095147]
    assert [own for own, *_ in rates] == pytest.approx(expected, rel=1e-5)
    for own, *others in rates:
        assert others == pytest.approx([own * 0.01 / 0.003] * 2)
