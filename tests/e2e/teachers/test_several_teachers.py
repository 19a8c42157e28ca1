"""Runs with several teachers: routed, mixed and chosen, in every layout, and resumed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.e2e.runs import (
    QUANTITIES,
    STUDENT,
    TEACHER,
    Inputs,
    assembled,
    assert_same_course,
    course,
    failure,
    layout,
    one_of_several,
    records,
    run,
    step_records,
)

STEPS = "train.steps=6"
NAMES = ("math", "code", "law")
TERMS = """\
    - {divergence: forward_kl}
    - {divergence: reverse_kl, weight: 0.3, temperature: 2.0, teachers: {math: 0.7, code: 0.3},
       score: cross_entropy, score_alpha: 0.5}
    - {divergence: js_divergence, weight: 0.3, teachers: {math: 1, law: 3}, mixture: geometric}
    - {divergence: forward_kl, weight: 0.2, teachers: [code, law], mixture: lowest_loss}
    - {divergence: forward_kl, weight: 0.1, top_k: 8, teacher: law}"""
ROUTED = "objective.terms=[{divergence: forward_kl}]"


def teachers_section() -> str:
    """The section of three teachers, the first of another width."""
    first, *others = NAMES
    return "teachers:\n" + one_of_several(first, width=48) + "".join(map(one_of_several, others))


def write_several(inputs: Inputs) -> Path:
    """Write three teachers; rows of one file name two of them, those of another are drawn."""
    rows = [json.loads(line) for line in inputs.corpus.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["domain"] = "math" if number % 3 else "code"
    path = inputs.folder / "domains.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"    - {{format: jsonl, paths: {path}, teacher_field: domain}}\n"
    return inputs.write(
        "several", STUDENT, teachers_section(), steps=6, terms=TERMS,
        changes={
            "  sources:\n": f"  sources:\n{source}",
            "objective:\n": "objective:\n  routing_weights: {law: 1, math: 2}\n",
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def config(inputs: Inputs) -> Path:
    """See `write_several`."""
    return write_several(inputs)


COMPARED = (*QUANTITIES, "top1_agreement")


@pytest.fixture(scope="module")
def whole(pool: Pool, config: Path, inputs: Inputs) -> list[dict[str, Any]]:
    """The run of one rank."""
    return run(pool, 1, config, inputs.folder / "several-1", *_HELD_OUT)


_HELD_OUT = ("validation.samples=4", "validation.interval=6")
# Own layouts of teachers, by the student's.
LAYOUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("TP2+sequence", "DP2", "PP2", "CP2"), ()),
    "one rank, one sample at a time": ("train.micro_batch_size=1",),
    "DP2, of TP2 and PP2": (
        "teachers.code.parallel={tensor: 2, sequence: true}", "teachers.law.parallel={pipeline: 2}",
    ),
    "TP2+sequence, of TP1 and CP2": (
        "teachers.code.parallel={tensor: 1}", "teachers.math.parallel={context: 2}",
    ),
    "PP2, of TP2 and DP2": (
        "teachers.law.parallel={tensor: 2}", "teachers.code.parallel={tensor: 1}",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", LAYOUTS)
def test_the_layout_changes_nothing(
    pool: Pool, config: Path, whole: list[dict[str, Any]], tmp_path: Path, case: str
) -> None:
    world, overrides = layout(case)
    found = run(pool, world, config, tmp_path / "run", *overrides, *LAYOUTS[case])
    assert_same_course(found, whole, COMPARED)


OWN: dict[str, tuple[str, ...]] = {
    "d2": ("teachers.law.parallel={tensor: 2}", "teachers.math.parallel={pipeline: 2}"),
    "p2": ("parallel.pipeline=2", "teachers.law.parallel={tensor: 2}"),
    "experts": ("teachers.law.architecture.moe={num_experts: 4}", "parallel.tensor=2",
                "teachers.law.architecture.moe.ffn_hidden_size=24", "parallel.sequence=true",
                "teachers.law.parallel={expert: 2}"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", OWN)
def test_teachers_with_own_layouts_run_for_their_samples(
    pool: Pool, config: Path, tmp_path: Path, case: str
) -> None:
    routed = (ROUTED, "train.micro_batch_size=1")
    own = [one for one in OWN[case] if ".parallel=" in one]
    shared = [one for one in OWN[case] if one not in own]
    expected = run(pool, 2, config, tmp_path / "shared", *routed, *shared)
    found = run(pool, 2, config, tmp_path / "own", *routed, *shared, *own)
    assert_same_course(found, expected, COMPARED)


@pytest.mark.slow
def test_a_teacher_with_experts_on_several_replicas_runs_on_all_of_them(
    pool: Pool, config: Path, tmp_path: Path
) -> None:
    # Its samples are on one replica or the other, and its experts on both.
    overrides = (
        ROUTED, "train.micro_batch_size=1", "teachers.law.architecture.moe={num_experts: 4}",
        "teachers.law.architecture.moe.ffn_hidden_size=24",
    )  # fmt: skip
    expected = run(pool, 1, config, tmp_path / "one", *overrides)
    found = run(pool, 2, config, tmp_path / "two", *overrides, "parallel.expert=2")
    assert_same_course(found, expected, COMPARED)


@pytest.mark.slow
def test_the_log_has_every_teacher(whole: list[dict[str, Any]], inputs: Inputs) -> None:
    for record in whole:
        teachers = record["teachers"]
        assert set(teachers) == {"math", "code", "law", "code+math", "law+math"}
        labels = teachers["code+math"]["kd_tokens"]
        # Each label counts for its own teacher, for the chosen one and for the one of the top-k
        # term, which is one target with the first where it is the same.
        own = sum(teachers[name]["kd_tokens"] for name in NAMES)
        assert 2 * labels <= own <= 3 * labels
        assert teachers["law+math"]["kd_tokens"] == labels > 0
        weights = [teachers["code+math"][f"weight_{name}"] for name in ("code", "math")]
        assert sum(weights) == pytest.approx(1, rel=1e-5)
        assert abs(weights[1] - 0.7) > 1e-3  # the scores differ
        kd = sum(one.get("kd_loss", 0.0) * one["kd_tokens"] / labels for one in teachers.values())
        assert kd == pytest.approx(record["kd_loss"], rel=1e-5)
        assert teachers["math"]["top1_agreement"] <= 1
    validation = records(inputs.folder / "several-1")[-1]["validation"]
    assert set(validation["teachers"]) == set(whole[0]["teachers"])


@pytest.mark.slow
def test_routing_to_one_teacher_is_the_run_of_that_teacher(
    pool: Pool, inputs: Inputs, config: Path, tmp_path: Path
) -> None:
    single = inputs.write("single", STUDENT, TEACHER, steps=6)
    expected = course(run(pool, 1, single, tmp_path / "single"))
    only = f"teachers:\n{one_of_several('only')}"
    for name, changes in (
        ("source", {"{format: jsonl,": "{format: jsonl, teacher: only,"}),
        ("drawn", {"objective:\n": "objective:\n  routing_weights: {only: 2}\n"}),
    ):
        written = inputs.write(f"only_{name}", STUDENT, only, steps=6, changes=changes)
        found = run(pool, 1, written, tmp_path / name)
        assert course(found) == expected
        assert found[0]["teachers"]["only"]["kd_loss"] == pytest.approx(found[0]["kd_loss"])


def passes_and_samples(
    rank: int, world: int, config: Path, overrides: Sequence[str]
) -> list[dict[str, tuple[int, int]]]:
    """Forward passes of each teacher in each step, and the step's samples of it."""
    from megatron_distill.train.teachers.live import OnlineTeacher
    from megatron_distill.train.teachers.own_layout import OwnLayout
    from megatron_distill.train.teachers.several import SeveralTeachers

    with assembled(rank, world, config, overrides) as (_, parts):
        assert isinstance(parts.teacher, SeveralTeachers)
        passes: Counter[str] = Counter()
        for name, teacher in parts.teacher.teachers.items():
            assert isinstance(teacher, OnlineTeacher | OwnLayout)
            teacher.model.register_forward_hook(
                lambda *_, name=name: passes.update([name])  # type: ignore[misc]
            )
        found = []
        for step in range(1, 9):
            passes.clear()
            batches = parts.loader.take(step).micro_batches
            for signal in parts.teacher.signals(batches):
                assert signal is not None
            names = list(parts.teacher.teachers)
            samples = Counter(names[n] for batch in batches for n in batch.teacher_numbers)
            in_micro_batches = Counter(names[n] for one in batches for n in one.teachers_of_all)
            samples |= {n: in_micro_batches[n] * world for n in names if n in parts.teacher.joint}
            found.append({name: (passes[name], samples[name]) for name in names})
        return found


def test_a_teacher_runs_for_its_samples_alone(pool: Pool, config: Path, tmp_path: Path) -> None:
    overrides = (
        f"output={tmp_path}", ROUTED, "train.steps=9", "train.micro_batch_size=1",
        "objective.routing_weights={law: 1, math: 4}",
    )  # fmt: skip
    (steps,) = pool.run(1, passes_and_samples, config, overrides)
    for step in steps:
        assert all(passes == samples for passes, samples in step.values())
        assert sum(passes for passes, _ in step.values()) == 8
    assert 0 in {passes for step in steps for passes, _ in step.values()}
    both = pool.run(2, passes_and_samples, config, [*overrides, "teachers.law.parallel.tensor=2"])
    for step in (step for steps in both for step in steps):
        # Its two ranks run the micro-batches that have a sample of it on either replica.
        assert all(passes == samples for passes, samples in step.values())
    assert {"law", "math", "code"} == {
        n for step in steps for n, (count, _) in step.items() if count
    }


@pytest.mark.slow
def test_a_resumed_run_routes_as_before(pool: Pool, config: Path, tmp_path: Path) -> None:
    saved = ("checkpoint.save=true", "train.micro_batch_size=1")
    expected = course(run(pool, 1, config, tmp_path / "whole", *saved))
    run(pool, 1, config, tmp_path / "cut", *saved, stop_after=3)
    run(pool, 2, config, tmp_path / "cut", *saved)
    found = course(step_records(tmp_path / "cut"))
    assert found[:3] == expected[:3]
    for ours, other in zip(found[3:], expected[3:], strict=True):
        assert ours == pytest.approx(other, rel=1e-5)


def test_a_row_of_no_teacher_ends_the_run(pool: Pool, config: Path, tmp_path: Path) -> None:
    rows = [{"text": "one two three", "domain": "math"}, {"text": "four", "domain": "biology"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"data.sources=[{{format: jsonl, paths: {path}, teacher_field: domain}}]"
    text = failure(pool, 1, config, tmp_path / "run", source)
    assert f"{path}:2" in text
    assert "'biology'" in text
    assert "code, law, math" in text
    path.write_text(json.dumps({"text": "no domain"}) + "\n")
    text = failure(pool, 1, config, tmp_path / "run", source)
    assert f"{path}:1 has no 'domain'" in text
