"""Feature losses, their sum with the rest, and every gradient, in every layout, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.feature_worlds import (
    PAIRS,
    STUDENT_HEADS,
    TEACHER,
    TEACHER_HEADS,
    Found,
    Setting,
    take_step,
    trained,
)
from tests.distributed.models.test_model_layouts import _whole
from tests.distributed.pool import Pool
from tests.e2e.runs import quick_and_slow
from tests.reference.features import Answer, solve
from tests.reference.llama import Heads

TP2 = {"tensor": 2}
SEQUENCE = {"tensor": 2, "sequence": True}
PP2 = {"pipeline": 2}
VIRTUAL = {"pipeline": 2, "virtual_pipeline": 2}
# Beside losses of states, and two maps of one layer.
MAPS = (
    (1, 5, "attention", 0.8),
    (3, 2, "attention", 1.2),
    (3, 6, "attention", 0.5),
    (3, 6, "mse", 0.3),
    (4, 4, "attention", 0.4),
)
NARROW = {**TEACHER, "hidden_size": 32, "head_size": 8}
EVEN = {**NARROW, "num_layers": 3}

CASES: dict[str, tuple[int, Setting]] = {
    "micro-batch 4": (1, Setting(micro_batch_size=4)),
    "recompute attention": (1, Setting(recompute="selective")),
    "PP2+virtual, recompute": (2, Setting(VIRTUAL, "full")),
    "PP4": (4, Setting({"pipeline": 4}, "full")),
    "CP2": (2, Setting({"context": 2}, micro_batch_size=2)),
    "DP2, recompute": (2, Setting(recompute="full")),
    "TP2+sequence x PP2, recompute": (4, Setting({**SEQUENCE, **PP2}, "full")),
    "CP2xPP2+virtual": (4, Setting({"context": 2, **VIRTUAL})),
    "MLP, PP2xTP2+sequence": (4, Setting({**SEQUENCE, **PP2}, projector="mlp")),
    "shared, PP2xDP2": (4, Setting(PP2, "full", shared=True)),
    "shared MLP, TP2": (2, Setting(TP2, projector="mlp", shared=True)),
    "equal sizes, TP2+sequence": (2, Setting(SEQUENCE, teacher=NARROW)),
    "uneven teacher, PP2": (
        2, Setting(PP2, pairs=((1, 2, "mse", 0.5), (2, 3, "cosine", 1.0)), teacher=EVEN),
    ),
    "maps, PP2+virtual, recompute attention": (2, Setting(VIRTUAL, "selective", pairs=MAPS)),
    "maps, TP4 on 2 KV heads": (4, Setting({"tensor": 4}, pairs=MAPS)),
    "maps, CP2xPP2": (4, Setting({"context": 2, **PP2}, "full", pairs=MAPS)),
    "maps, TP2+sequence x PP2, recompute": (4, Setting({**SEQUENCE, **PP2}, "full", pairs=MAPS)),
    "features alone, PP2": (2, Setting(PP2, ce_weight=0.0, kd_weight=0.0)),
    "features alone, not of the last stage": (
        2, Setting(PP2, pairs=PAIRS[:1], ce_weight=0.0, kd_weight=0.0),
    ),
    # A teacher of another tokenizer is compared at the ends of chunks.
    "own tokens, CP2, recompute": (2, Setting({"context": 2}, "full", 2, tokens="own")),
    "own tokens, TP2+sequence x PP2": (4, Setting({**SEQUENCE, **PP2}, tokens="own")),
    "own tokens, CP2xTP2+sequence, MLP": (
        4, Setting({"context": 2, **SEQUENCE}, projector="mlp", tokens="own"),
    ),
    "own tokens, PP2+virtual": (2, Setting(VIRTUAL, "full", tokens="own")),
    "own tokens, DP2, micro-batch 2": (2, Setting(micro_batch_size=2, tokens="own")),
    # One tokenizer in chunks of one token: plain losses of the positions that end one.
    "chunks of one token": (1, Setting(micro_batch_size=2, kd_weight=0.0, tokens="chunks")),
}  # fmt: skip

_ANSWERS: dict[Any, Answer] = {}


def oracle(setting: Setting, found: list[Found]) -> Answer:
    """The float64 answer for a setting's losses, whatever its layout."""
    wide = setting.teacher["hidden_size"]
    key = (wide, setting.teacher["num_layers"], setting.pairs, setting.projector, setting.shared)
    key = (*key, setting.ce_weight, setting.tokens)
    if key not in _ANSWERS:
        heads = TEACHER_HEADS if wide == 40 else Heads(queries=4, groups=2, size=8)
        _ANSWERS[key] = solve(
            (_whole([shard.weights for shard in found]), STUDENT_HEADS),
            (_whole([shard.teacher_weights for shard in found]), heads),
            trained(setting),
            setting.pairs,
            found[0].projectors,
            ce_weight=setting.ce_weight,
            kd_weight=setting.kd_weight,
        )
    return _ANSWERS[key]


def assert_close(ours: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Compare gradients, each to its largest entry; exact zeros must stay zero."""
    assert ours.keys() >= other.keys()
    for name, gradient in other.items():
        bound = 2e-5 * float(gradient.abs().max())
        torch.testing.assert_close(
            ours[name].double(), gradient, atol=bound, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


QUICK = (
    "PP2+virtual, recompute", "CP2", "DP2, recompute", "MLP, PP2xTP2+sequence",
    "maps, TP2+sequence x PP2, recompute", "own tokens, CP2, recompute",
    "own tokens, TP2+sequence x PP2", "chunks of one token",
)  # fmt: skip


@pytest.mark.parametrize("case", quick_and_slow(CASES, QUICK))
def test_values_and_gradients_are_those_of_the_definition(pool: Pool, case: str) -> None:
    world, setting = CASES[case]
    found = pool.run(world, take_step, setting)
    expected = oracle(setting, found)
    for shard in found:
        values = shard.values
        assert values == found[0].values, "ranks differ"
        assert values["ce"] == pytest.approx(expected.ce, rel=1e-5)
        if setting.kd_weight:
            assert values["kd"] == pytest.approx(setting.kd_weight * expected.kd, rel=1e-5)
        names = [f"feature_{loss}_{a}_{b}" for a, b, loss, _ in setting.pairs]
        assert [values[name] for name in names] == pytest.approx(expected.features, rel=1e-5)
        weighted = sum(
            pair[3] * value for pair, value in zip(setting.pairs, expected.features, strict=True)
        )
        assert values["features_loss"] == pytest.approx(weighted, rel=1e-5)
        assert values["total"] == pytest.approx(expected.total, rel=1e-5)
        assert_close(shard.projector_gradients, expected.projector_gradients)
        for name, tensor in shard.projector_gradients.items():
            assert torch.equal(tensor, found[0].projector_gradients[name]), "ranks differ"
    gradients = _whole([shard.gradients for shard in found])
    assert_close(gradients, expected.gradients)


def test_a_forward_pass_alone_reports_the_same_and_adds_nothing(pool: Pool) -> None:
    setting = Setting({**SEQUENCE, **PP2}, "full")
    trained_step = pool.run(4, take_step, setting)
    found = pool.run(4, take_step, replace(setting, forward_only=True))
    assert found[0].values["norm"] == 0.0
    for shard, other in zip(found, trained_step, strict=True):
        for name, value in other.values.items():
            assert name == "norm" or shard.values[name] == value, name
        assert not any(gradient.any() for gradient in shard.gradients.values())
        assert not any(gradient.any() for gradient in shard.projector_gradients.values())


def test_weights_of_a_step_scale_the_gradient_and_not_the_report(pool: Pool) -> None:
    # Balancing replaces the objective's weights of the pairs from step to step.
    plain = Setting(ce_weight=0.0, kd_weight=0.0, pairs=PAIRS[:1])
    (one,) = pool.run(1, take_step, plain)
    (other,) = pool.run(1, take_step, replace(plain, factor=2.0))
    assert other.values["feature_mse_1_5"] == one.values["feature_mse_1_5"]
    assert other.values["features_loss"] == pytest.approx(2 * one.values["features_loss"])
    for name, gradient in one.projector_gradients.items():
        torch.testing.assert_close(other.projector_gradients[name], 2 * gradient)
    moved = [(place, gradient) for place, gradient in one.gradients.items() if gradient.any()]
    assert moved
    for place, gradient in moved:
        torch.testing.assert_close(other.gradients[place], 2 * gradient)
