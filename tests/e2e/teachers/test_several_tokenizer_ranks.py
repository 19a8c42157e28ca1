"""Teachers of one and of another tokenizer on ranks of their own: the course of shared ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.e2e.runs import (
    QUANTITIES,
    SECOND_SIZES,
    Course,
    Inputs,
    KnownRuns,
    assert_same_course,
    course,
    quick_and_slow,
)
from tests.e2e.teachers.test_several_teacher_ranks import (
    apart,
    assert_same_held_out,
    sent,
    steps,
)
from tests.e2e.tokenizers.test_several_tokenizers import LOSSES, write_config

HELD_OUT = ("validation.samples=8", "validation.interval=6")
FAR, NEAR = "teachers.far.ranks=1", "teachers.near.ranks=1"


@pytest.fixture(scope="module")
def config(inputs: Inputs) -> Path:
    return write_config(inputs)


@pytest.fixture(scope="module")
def shared(pool: Pool, inputs: Inputs, config: Path) -> Callable[..., Course]:
    """Every record of the run of one rank that runs all models."""
    runs = KnownRuns(pool, inputs, "several-tokenizers-shared", validations=True)
    return partial(runs, config.stem, 1)


# Ranks of the launch, and the layouts.
LAYOUTS: dict[str, tuple[int, Sequence[str]]] = {
    "1, 1 and 1, 0 and 2 ahead, gloo and ipc": (
        3, (FAR, NEAR, "teachers.far.steps_ahead=2", "teachers.far.transfer.backend=gloo",
            "teachers.near.steps_ahead=0"),
    ),
    "TP2+sequence, and PP2": (
        4, ("teachers.far.ranks=2", "teachers.far.parallel={pipeline: 2}", "parallel.tensor=2",
            "parallel.sequence=true"),
    ),
    "CP2, and TP2+sequence": (
        4, ("teachers.far.ranks=2", "teachers.far.parallel={tensor: 2, sequence: true}",
            "parallel.context=2"),
    ),
    "PP2, and CP2 of one tokenizer": (
        4, ("teachers.near.ranks=2", "teachers.near.parallel={context: 2}", "parallel.pipeline=2"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", quick_and_slow(LAYOUTS, []))
def test_the_course_is_that_of_shared_ranks(
    pool: Pool, config: Path, shared: Callable[..., Any], tmp_path: Path, case: str
) -> None:
    world, layout = LAYOUTS[case]
    found, expected = apart(pool, world, config, tmp_path, *HELD_OUT, *layout), shared(*HELD_OUT)
    assert_same_course(steps(found), steps(expected), (*QUANTITIES, *LOSSES))
    assert_same_held_out(found, expected, ("ce_loss", "kd_loss", *LOSSES))
    if case.startswith("1, "):
        assert course(steps(found)) == course(steps(expected))
        for ours, other in zip(steps(found), steps(expected), strict=True):
            assert all(ours[name] == other[name] > 1e-3 for name in LOSSES), ours["step"]
            assert ours["teachers"] == other["teachers"]


# A common token may be any of all ids, so that a live teacher and all of its ids are the same.
OF_ALL_IDS = (
    "objective.terms=[{top_k: 8}, {alignment: likelihood, divergence: js_divergence, "
    "temperature: 6.0}, {divergence: reverse_kl, weight: 0.5, top_k: 8, teacher: near}, "
    "{alignment: common, weight: 0.5, temperature: 2.0, top_k: 8, teacher: far}]"
)
OF_TOP_K = ("forward_kl_top8", "likelihood_js_divergence_t6", "reverse_kl_top8_near")
SENT = sent("far", max(SECOND_SIZES))
WITH_TOP_K: dict[str, tuple[int, Sequence[str]]] = {
    "1, and 1 for each, gloo and ipc": (
        3, (FAR, NEAR, SENT, sent("near"), "teachers.far.transfer.backend=gloo"),
    ),
    "CP2, and TP2+sequence": (
        4, ("teachers.far.ranks=2", "teachers.far.parallel={tensor: 2, sequence: true}", SENT,
            "parallel.context=2"),
    ),
    "TP2+sequence, and 1 for each": (
        4, (FAR, NEAR, SENT, sent("near"), "teachers.far.parallel={tensor: 1}",
            "teachers.near.parallel={tensor: 1}", "parallel.tensor=2", "parallel.sequence=true"),
    ),
    "CP2, and TP2+sequence and PP2 on the same ranks": (
        2, ("teachers.far.parallel={tensor: 2, sequence: true}", SENT,
            "teachers.near.parallel={pipeline: 2}", sent("near"), "parallel.context=2"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", quick_and_slow(WITH_TOP_K, []))
def test_a_sent_top_k_gives_the_course_of_live_teachers(
    pool: Pool, config: Path, shared: Callable[..., Any], tmp_path: Path, case: str
) -> None:
    world, own = WITH_TOP_K[case]
    given = (*HELD_OUT, OF_ALL_IDS)
    found, expected = apart(pool, world, config, tmp_path, *given, *own), shared(*given)
    (common,) = [name for name in expected[0] if name.startswith("common_")]
    names = (*QUANTITIES, *OF_TOP_K, common)
    assert_same_course(steps(found), steps(expected), names)
    assert all(record[name] > 1e-3 for record in steps(found) for name in names)
    assert_same_held_out(found, expected, ("ce_loss", "kd_loss", *OF_TOP_K, common))
