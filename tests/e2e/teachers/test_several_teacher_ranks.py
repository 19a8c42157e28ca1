"""Several teachers, some on ranks of their own, train the course of the run on shared ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.e2e.runs import (
    SECONDS,
    Course,
    Inputs,
    KnownRuns,
    assert_same_course,
    course,
    evaluate_here,
    quick_and_slow,
    run,
    step_records,
)
from tests.e2e.teachers.roles import apart, passes_in_roles
from tests.e2e.teachers.test_several_teachers import COMPARED, ROUTED, write_several

HELD_OUT = ("validation.samples=4", "validation.interval=6")
ONE_SAMPLE = "train.micro_batch_size=1"
SHARDED = "teachers.law.shard_weights=true"


@pytest.fixture(scope="module")
def config(inputs: Inputs) -> Path:
    return write_several(inputs)


@pytest.fixture(scope="module")
def shared(pool: Pool, inputs: Inputs, config: Path) -> Callable[..., Course]:
    """Every record of the run of one rank that runs all models."""
    return partial(KnownRuns(pool, inputs, "several-shared", validations=True), config.stem, 1)


def steps(found: Course) -> Course:
    return [record for record in found if "validation" not in record]


LAW, CODE, MATH = (f"teachers.{name}.ranks=1" for name in ("law", "code", "math"))
# Ranks of the launch, and the layouts.
LAYOUTS: dict[str, tuple[int, Sequence[str]]] = {
    "1, 1 and 1, 0 and 2 ahead, gloo and ipc": (
        3, (LAW, CODE, "teachers.law.steps_ahead=0", "teachers.code.steps_ahead=2",
            "teachers.code.transfer.backend=gloo"),
    ),
    "TP2+sequence, and PP2": (
        4, ("teachers.law.ranks=2", "teachers.law.parallel={pipeline: 2}", "parallel.tensor=2",
            "parallel.sequence=true"),
    ),
    "DP2, 1 and 1": (4, (LAW, CODE)),
    "DP2 beside an own layout, and 1": (3, ("teachers.law.parallel={tensor: 2}", CODE)),
}  # fmt: skip


@pytest.mark.parametrize("case", quick_and_slow(LAYOUTS, []))
def test_the_course_is_that_of_shared_ranks(
    pool: Pool, config: Path, shared: Callable[..., Any], tmp_path: Path, case: str
) -> None:
    world, layout = LAYOUTS[case]
    found = apart(pool, world, config, tmp_path / "run", *HELD_OUT, *layout)
    expected = shared(*HELD_OUT)
    assert_same_course(steps(found), steps(expected), COMPARED)
    assert_same_held_out(found, expected, ["kd_loss"])
    if case.startswith("1, "):
        assert course(steps(found)) == course(steps(expected))
        for ours, other in zip(found, expected, strict=True):
            ours, other = ours.get("validation", ours), other.get("validation", other)
            assert ours["teachers"] == other["teachers"]


def assert_same_held_out(found: Course, expected: Course, names: Sequence[str]) -> None:
    """Compare the losses of the last validation, and whose teachers it has."""
    ours, theirs = (one[-1]["validation"] for one in (found, expected))
    for name in names:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3), name
    assert ours["teachers"].keys() == theirs["teachers"].keys()


def sent(name: str, k: int = 12) -> str:
    return f"teachers.{name}.transfer={{what: top_k, k: {k}}}"


TOP_K = (
    "objective.terms=[{top_k: 12}, {top_k: 8, temperature: 2.0, divergence: reverse_kl}, "
    "{top_k: 6, temperature: 3.0, support: renormalized, weight: 0.3}, "
    "{top_k: 5, divergence: js_divergence, weight: 0.2, teacher: law}]"
)
# Ranks of the launch, settings of both runs, and of this one.
OF_TOP_K: dict[str, tuple[int, Sequence[str], Sequence[str]]] = {
    "1, and 1 for each": (
        4, (), (LAW, CODE, MATH, sent("law"), sent("code"), sent("math", 20),
                "teachers.code.transfer.backend=gloo"),
    ),
    "1, and 1, one sample at a time": (2, (ONE_SAMPLE,), (CODE, sent("code"))),
    "TP2+sequence, and PP2": (
        4, (), ("teachers.law.ranks=2", "teachers.law.parallel={pipeline: 2}", sent("law"),
                "parallel.tensor=2", "parallel.sequence=true"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", quick_and_slow(OF_TOP_K, []))
def test_a_sent_top_k_gives_the_course_of_live_teachers(
    pool: Pool, config: Path, shared: Callable[..., Any], tmp_path: Path, case: str
) -> None:
    world, common, own = OF_TOP_K[case]
    given = (*HELD_OUT, TOP_K, *common)
    found, expected = apart(pool, world, config, tmp_path, *given, *own), shared(*given)
    assert_same_course(steps(found), steps(expected), COMPARED)
    assert_same_held_out(found, expected, ["kd_loss"])
    assert found[-1]["validation"]["teachers"].keys() == {"law", "code", "math"}


# All 301 ids, so that a mean on those of one teacher is that of all teachers' logits.
MIXED = (
    "objective.terms=[{top_k: 301, teachers: {code: 0.7, law: 0.3}}, {top_k: 301, weight: 0.3, "
    "temperature: 2.0, divergence: reverse_kl, teachers: {code: 1, law: 3}}, {top_k: 301, "
    "temperature: 2.0, support: renormalized, teachers: {code: 1, law: 3}, mixture: geometric}, "
    "{top_k: 4, weight: 0.3, divergence: js_divergence, teachers: [law, math], "
    "mixture: lowest_loss}]"
)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [(), (CODE, MATH)], ids=["shared ranks", "own ranks"])
def test_a_sent_top_k_is_in_means_and_choices(
    pool: Pool, config: Path, shared: Callable[..., Any], tmp_path: Path, beside: Sequence[str]
) -> None:
    own = (LAW, sent("law", 301), *beside)
    found = apart(pool, 2 + len(beside), config, tmp_path, MIXED, *own)
    expected = shared(MIXED)
    assert len(found) == len(expected) == 6
    for ours, other in zip(found, expected, strict=True):
        assert ours["teachers"].keys() == other["teachers"].keys() == {"code+law", "law", "math"}
        for name in ("ce_loss", "kd_loss", "grad_norm"):
            tolerance = 1e-5 if ours["step"] == 1 else 1e-4
            assert ours[name] == pytest.approx(other[name], rel=tolerance), (ours["step"], name)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["DP2 and 1", "1 and DP2", "1 and DP2, sharded"])
def test_a_teacher_runs_for_its_samples_alone(
    pool: Pool, config: Path, shared: Callable[..., Any], tmp_path: Path, case: str
) -> None:
    students, teachers = (2, 1) if case.startswith("DP2") else (1, 2)
    own = [f"teachers.law.ranks={teachers}", "teachers.law.parallel={tensor: 1}"]
    own += [SHARDED] if "sharded" in case else []
    given = [f"output={tmp_path}", ROUTED, ONE_SAMPLE, *own]
    counts = pool.run(students + teachers, passes_in_roles, config, given, timeout=SECONDS)
    passes, left_out = (sum(one[place] for one in counts[students:]) for place in (0, 1))
    read = sum(one[2] for one in counts[:students])
    units = 6 * 8
    assert 0 < read < units
    assert read + left_out == units
    # With its weights on both replicas it runs where one of the two has a sample of it.
    assert (read < passes < units) if "sharded" in case else (passes == read)
    assert_same_course(step_records(tmp_path), steps(shared(ROUTED, ONE_SAMPLE)), COMPARED)


@pytest.mark.slow
def test_it_resumes_with_other_ranks(
    pool: Pool, config: Path, shared: Callable[..., Any], tmp_path: Path
) -> None:
    saved = ("checkpoint.save=true", ONE_SAMPLE)
    apart(pool, 2, config, tmp_path, *saved, LAW, stop_after=2)
    run(pool, 1, config, tmp_path, *saved, stop_after=2)
    found = apart(pool, 3, config, tmp_path, *saved, CODE, MATH)
    assert course(steps(found)) == course(steps(shared(*saved)))


@pytest.mark.slow
def test_one_process_evaluates_the_run(pool: Pool, config: Path, tmp_path: Path) -> None:
    law = ("teachers.law.ranks=2", "teachers.law.parallel={tensor: 2}")
    code = ("teachers.code.parallel={pipeline: 2}", "checkpoint.save=true")
    expected = apart(pool, 4, config, tmp_path, *HELD_OUT, *law, *code)[-1]["validation"]
    (found,) = pool.run(1, evaluate_here, tmp_path, timeout=SECONDS)
    for name in ("ce_loss", "kd_loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4)
    for name, figures in expected["teachers"].items():
        assert found["teachers"][name] == pytest.approx(figures, rel=1e-3), name
