"""Feature losses that are balanced with the rest, in every layout, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.distributed.feature_worlds import (
    ROWS,
    STUDENT_HEADS,
    TEACHER_HEADS,
    Found,
    Setting,
    take_step,
    trained,
)
from tests.distributed.losses.test_feature_layouts import (
    MAPS,
    PP2,
    SEQUENCE,
    VIRTUAL,
    assert_close,
)
from tests.distributed.models.test_model_layouts import _whole
from tests.distributed.pool import Pool
from tests.e2e.runs import quick_and_slow
from tests.reference.features import Answer, Trained, solve

ALPHA = 0.6
MAGNITUDE = Setting(mode="magnitude", alpha=ALPHA)
NORMS = replace(MAGNITUDE, mode="gradient_norm")

# A scale of one would show nothing.
HEAVY_MAPS = tuple((*pair[:3], 2 * pair[3]) for pair in MAPS)
CASES: dict[str, tuple[int, Setting]] = {
    "PP2, recompute": (2, replace(MAGNITUDE, layout=PP2, recompute="full")),
    "CP2": (2, replace(MAGNITUDE, layout={"context": 2}, micro_batch_size=2)),
    "TP2+sequence x PP2": (4, replace(MAGNITUDE, layout={**SEQUENCE, **PP2})),
    "maps, TP2+sequence x PP2": (
        4,
        replace(MAGNITUDE, layout={**SEQUENCE, **PP2}, pairs=HEAVY_MAPS),
    ),
    "norms, TP2+sequence x PP2": (4, replace(NORMS, layout={**SEQUENCE, **PP2})),
    "norms, CP2xPP2": (4, replace(NORMS, layout={"context": 2, **PP2}, recompute="full")),
    "own tokens, CP2xPP2": (
        4,
        replace(MAGNITUDE, layout={"context": 2, **PP2}, tokens="own"),
    ),
    "own tokens, norms, TP2+sequence": (2, replace(NORMS, layout=SEQUENCE, tokens="own")),
}
QUICK = ("TP2+sequence x PP2",)


def oracle(
    setting: Setting, found: list[Found], batch: Trained | None = None
) -> Callable[[float, float, list[float]], Answer]:
    """The definition of a setting's losses, for any weights."""
    student, teacher = (
        _whole([getattr(shard, name) for shard in found]) for name in ("weights", "teacher_weights")
    )

    def solved(ce: float, kd: float, features: list[float]) -> Answer:
        pairs = [(*pair[:3], weight) for pair, weight in zip(setting.pairs, features, strict=True)]
        return solve(
            (student, STUDENT_HEADS),
            (teacher, TEACHER_HEADS),
            batch or trained(setting),
            pairs,
            found[0].projectors,
            ce_weight=ce,
            kd_weight=kd,
        )

    return solved


def effective(
    setting: Setting, ce: float, kd: float, features: float
) -> tuple[float, float, list[float]]:
    """The published chain: features to the divergence, both to the labels; sizes are weighted."""
    feature_scale = kd / features
    scale = setting.alpha * ce / (kd + feature_scale * features)
    own = [pair[3] for pair in setting.pairs]
    weights = [scale * feature_scale * weight for weight in own]
    return setting.ce_weight, scale * setting.kd_weight, weights


def sizes(setting: Setting, answer: Answer) -> tuple[float, float, float]:
    """Of the three groups, with their own weights."""
    own = [pair[3] for pair in setting.pairs]
    if setting.mode == "gradient_norm":
        ce, kd, *norms = answer.norms
        features = sum((w * norm) ** 2 for w, norm in zip(own, norms, strict=True)) ** 0.5
    else:
        ce, kd = answer.ce, answer.kd
        features = sum(w * value for w, value in zip(own, answer.features, strict=True))
    return setting.ce_weight * ce, setting.kd_weight * kd, features


@pytest.mark.parametrize("case", quick_and_slow(CASES, QUICK))
def test_total_and_gradients_are_those_of_the_formula(pool: Pool, case: str) -> None:
    world, setting = CASES[case]
    found = pool.run(world, take_step, setting)
    solved = oracle(setting, found)
    own = [pair[3] for pair in setting.pairs]
    raw = solved(setting.ce_weight, setting.kd_weight, own)
    ce, kd, features = effective(setting, *sizes(setting, raw))
    assert not 0.8 < features[0] / own[0] < 1.25, "the scale is too close to one to be seen"
    expected = solved(ce, kd, features)
    for shard in found:
        assert shard.balance == found[0].balance, "ranks differ"
        assert shard.values == found[0].values, "ranks differ"
        assert shard.balance["kd_scale"] * ALPHA == pytest.approx(kd / setting.kd_weight, rel=1e-5)
        assert shard.values["total"] == pytest.approx(expected.total, rel=1e-5)
        names = [f"feature_{loss}_{a}_{b}" for a, b, loss, _ in setting.pairs]
        assert [shard.values[name] for name in names] == pytest.approx(raw.features, rel=1e-5)
        logged = [shard.balance[f"{name}_weight"] for name in names]
        assert logged == pytest.approx(features, rel=1e-5)
        assert_close(shard.projector_gradients, expected.projector_gradients)
    assert_close(_whole([shard.gradients for shard in found]), expected.gradients)


LITERAL: dict[str, tuple[int, Setting]] = {
    "PP2+virtual, recompute": (2, replace(MAGNITUDE, layout=VIRTUAL, recompute="full")),
    "TP2+sequence x PP2": (
        4, replace(MAGNITUDE, layout={**SEQUENCE, **PP2}, micro_batch_size=2),
    ),
    "DP2": (2, MAGNITUDE),
}  # fmt: skip


@pytest.mark.parametrize("case", quick_and_slow(LITERAL, ["TP2+sequence x PP2"]))
def test_per_micro_batch_each_has_the_formula_of_its_own(pool: Pool, case: str) -> None:
    world, setting = LITERAL[case]
    setting = replace(setting, per_micro_batch=True)
    found = pool.run(world, take_step, setting)
    whole, size = trained(), setting.micro_batch_size
    own = [pair[3] for pair in setting.pairs]
    total = 0.0
    gradients: dict[str, Tensor] = {}
    projectors: dict[str, Tensor] = {}
    for start in range(0, ROWS, size):
        part = Trained(whole.packed, whole.labels, whole.ce_mask.clone(), whole.kd_mask.clone())
        for mask in (part.ce_mask, part.kd_mask):
            mask[:start] = False
            mask[start + size :] = False
        solved = oracle(setting, found, part)
        weights = effective(
            setting, *sizes(setting, solved(setting.ce_weight, setting.kd_weight, own))
        )
        # The micro-batch's share of the whole, in place of an average over all.
        ce_share, kd_share = (
            float(local.sum() / every.sum())
            for local, every in ((part.ce_mask, whole.ce_mask), (part.kd_mask, whole.kd_mask))
        )
        ce, kd, features = weights
        answer = solved(ce_share * ce, kd_share * kd, [kd_share * one for one in features])
        total += answer.total
        for sums, added in (
            (gradients, answer.gradients),
            (projectors, answer.projector_gradients),
        ):
            for name, gradient in added.items():
                sums[name] = sums.get(name, torch.zeros_like(gradient)) + gradient
    for shard in found:
        assert shard.values["total"] == pytest.approx(total, rel=1e-5)
        assert_close(shard.projector_gradients, projectors)
    assert_close(_whole([shard.gradients for shard in found]), gradients)
