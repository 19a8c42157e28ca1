"""One balanced step of whole models in every layout, against the formula by autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from megatron_distill.losses import BalanceMode, RatioBalance
from tests.distributed.balanced_steps import (
    ALPHA,
    CE_WEIGHT,
    SAMPLES,
    TERMS,
    WEIGHTS,
    Case,
    Found,
    Oracle,
    balanced,
    formula,
)
from tests.distributed.models.test_model_layouts import _whole
from tests.distributed.pool import Pool
from tests.e2e.runs import quick_and_slow


def assert_equal(found: list[Found], oracle: Oracle, *, tolerance: float = 3e-5) -> None:
    """Compare every rank's report and the whole model's gradients with the oracle."""
    for own in found:
        assert own.report["total"] == pytest.approx(oracle.total, rel=1e-6)
        # Every rank has the same floats, or replicated weights would drift apart.
        assert own.raw == found[0].raw
        assert own.logged == found[0].logged
    gradients, expected = (
        _whole([shard.gradients for shard in shards]) for shards in (found, [oracle])
    )
    assert gradients.keys() == expected.keys()
    for key, gradient in expected.items():
        bound = tolerance * float(gradient.abs().max())
        torch.testing.assert_close(
            gradients[key], gradient, atol=bound, rtol=0, msg=lambda m, n=key: f"{n}: {m}"
        )


SEQUENCE = (("tensor", 2), ("sequence", True))
PIPELINE = (("pipeline", 2),)
LAYOUTS: dict[str, tuple[int, Case]] = {
    "one rank": (1, Case()),
    "DP2, micro-batch 2": (2, Case(micro_batch=2)),
    "PP2+virtual, recompute": (
        2,
        Case(layout=(*PIPELINE, ("virtual_pipeline", 2)), recompute="full"),
    ),
    "CP2": (2, Case(layout=(("context", 2),), micro_batch=2)),
    "TP2+sequence x PP2": (4, Case(layout=(*SEQUENCE, *PIPELINE))),
    "TP2 x DP2": (4, Case(layout=(("tensor", 2),))),
    "PP2 x DP2": (4, Case(layout=PIPELINE)),
}


Solve = Callable[..., Oracle]
DEFAULT = Case()


@pytest.fixture(scope="module")
def oracle(pool: Pool) -> Solve:
    """The formula of a mode, for the whole batch or for parts of so many rows; solved once."""

    @cache
    def solved(case: Case = DEFAULT, rows: int | None = None) -> Oracle:
        starts = range(0, SAMPLES, rows or SAMPLES)
        parts = None if rows is None else [slice(start, start + rows) for start in starts]
        (found,) = pool.run(1, formula, case, parts)
        return found

    return solved


@pytest.fixture(scope="module")
def whole(oracle: Solve) -> Oracle:
    """The formula of the default mode."""
    return oracle()


QUICK = (
    "one rank",
    "DP2, micro-batch 2",
    "PP2+virtual, recompute",
    "CP2",
    "TP2+sequence x PP2",
)


@pytest.mark.parametrize("layout", quick_and_slow(LAYOUTS, QUICK))
def test_total_and_gradients_equal_the_formula_in_every_layout(
    pool: Pool, whole: Oracle, layout: str
) -> None:
    world, case = LAYOUTS[layout]
    found = pool.run(world, balanced, case)
    assert_equal(found, whole)
    assert found[0].raw == pytest.approx(whole.losses, rel=1e-6)
    # The balance is not one that a fixed total would have.
    assert not 0.9 < found[0].logged["kd_scale"] < 1.1


def test_the_clamp_is_in_value_and_gradient(pool: Pool, oracle: Solve, whole: Oracle) -> None:
    case = Case(ratios=RatioBalance(clamp=1.01))
    expected = oracle(case)
    assert expected.total != pytest.approx(whole.total, rel=0.01)
    assert_equal(pool.run(1, balanced, case), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layout", "micro_batch"),
    [(1, (), 2), (2, (), 1), (2, PIPELINE, 1), (4, (*SEQUENCE, *PIPELINE), 2), (2, SEQUENCE, 1)],
)
def test_per_micro_batch_is_the_published_form_of_each(
    pool: Pool, oracle: Solve, whole: Oracle, world: int, layout: Any, micro_batch: int
) -> None:
    case = Case(per_micro_batch=True, layout=layout, micro_batch=micro_batch)
    expected = oracle(Case(per_micro_batch=True, micro_batch=micro_batch), micro_batch)
    # Ratios of means are not means of ratios; and a micro-batch without labels scales nothing.
    assert expected.total != pytest.approx(whole.total, rel=1e-3)
    assert_equal(pool.run(world, balanced, case), expected)


def test_one_micro_batch_of_one_rank_is_the_whole_batch(pool: Pool, whole: Oracle) -> None:
    assert_equal(pool.run(1, balanced, Case(per_micro_batch=True, micro_batch=SAMPLES)), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layout", "micro_batch"),
    [(1, (), 4), (2, (), 1), (2, SEQUENCE, 2), (4, (("tensor", 2), *PIPELINE), 1)],
)
def test_gradient_norms_are_those_of_each_loss_alone(
    pool: Pool, oracle: Solve, whole: Oracle, world: int, layout: Any, micro_batch: int
) -> None:
    case = Case(mode="gradient_norm", layout=layout, micro_batch=micro_batch)
    expected = oracle(Case(mode="gradient_norm"))
    assert expected.total != pytest.approx(whole.total, rel=1e-3)
    assert_equal(pool.run(world, balanced, case), expected)


@pytest.mark.parametrize(
    ("mode", "per_micro_batch"),
    [("magnitude", False), ("magnitude", True), ("gradient_norm", False)],
)
def test_a_student_that_is_its_teacher_trains_on_the_labels_alone(
    pool: Pool, mode: BalanceMode, per_micro_batch: bool
) -> None:
    case = Case(mode=mode, per_micro_batch=per_micro_batch, same_teacher=True)
    (found,) = pool.run(1, balanced, case)
    assert found.report["kd"] == 0.0
    assert found.logged["kd_scale"] == 1.0
    assert found.report["total"] == pytest.approx(CE_WEIGHT * found.report["ce"], rel=1e-6)
    (labels_only,) = pool.run(1, balanced, replace(case, mode="fixed", per_micro_batch=False))
    for key, gradient in found.gradients.items():
        assert torch.equal(gradient, labels_only.gradients[key]), key
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("mode", ["magnitude", "gradient_norm"])
def test_without_labels_distillation_keeps_its_own_scale(pool: Pool, mode: BalanceMode) -> None:
    (found,) = pool.run(1, balanced, Case(mode=mode, labels=False))
    assert found.report["ce"] == 0.0
    assert found.logged["kd_scale"] == 1.0
    raw = sum(weight * found.report[term.name] for weight, term in zip(WEIGHTS, TERMS, strict=True))
    assert raw > 0.1
    assert found.report["total"] == pytest.approx(ALPHA * raw, rel=1e-6)


DROPPED: dict[str, tuple[int, tuple[tuple[str, Any], ...], str]] = {
    "one rank": (1, (), "none"),
    "TP2+sequence x PP2, recompute": (4, (*SEQUENCE, *PIPELINE), "full"),
}


@pytest.mark.parametrize("layout", DROPPED)
def test_the_pass_before_the_step_drops_the_same_tokens(pool: Pool, layout: str) -> None:
    world, groups, recompute = DROPPED[layout]
    case = Case(layout=groups, recompute=recompute, dropout=0.3)
    (dry,) = pool.run(1, balanced, Case())
    for found in pool.run(world, balanced, case):
        assert found.raw == tuple(found.report[name] for name in ("ce", *(t.name for t in TERMS)))
        assert found.report["ce"] != pytest.approx(dry.report["ce"], rel=1e-3)
