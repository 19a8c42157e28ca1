"""The figures of each source in a run of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_distill.runtime.batch import LabelCounts, StepBatches
from megatron_distill.train.metrics import LabelTotals, OnChunks, step_figures
from tests.distributed.pool import Pool
from tests.e2e.runs import (
    Inputs,
    assembled,
    evaluate_here,
    layout,
    quick_and_slow,
    records,
    resumed,
    run,
    step_records,
)

STEPS = 4
SHORT = (f"train.steps={STEPS}", "schedule.warmup_steps=1")
HELD_OUT = ("validation.samples=11", "validation.interval=2", "data.validation_fraction=0.2")
TERMS = "objective.terms=[{divergence: forward_kl}, {divergence: reverse_kl, weight: 0.5}]"
NAMES = ("corpus", "letters", "code")


@pytest.fixture(scope="module")
def blend(inputs: Inputs) -> tuple[str, ...]:
    """Three sources of very different text."""
    letters = inputs.folder / "letters.txt"
    lines = [f"{chr(97 + i % 26) * (5 + i % 40)} {i}" for i in range(600)]
    letters.write_text("\n".join(lines))
    code = inputs.folder / "code"
    code.mkdir()
    for number in range(40):
        function = f"def scaled_{number}(value: int) -> int:\n    return {number} * value\n\n\n"
        (code / f"{number}.py").write_text(function * (8 + number % 7))
    sources = (
        f"data.sources=[{{format: jsonl, paths: {inputs.corpus}, weight: 2}}, "
        f"{{format: text, paths: {letters}, documents: line}}, "
        f"{{format: text, paths: '{code}/*.py', name: code, weight: 2.5}}]"
    )
    return (*SHORT, TERMS, sources)


def without(step: StepBatches, source: int) -> StepBatches:
    """The step with the labels of that source alone, as a step of one source has them."""
    batches = []
    for batch in step.micro_batches:
        assert batch.sources_b is not None
        is_mine = (batch.sources_b == source).unsqueeze(1)
        own = replace(
            batch,
            ce_mask_bs=batch.ce_mask_bs & is_mine,
            kd_mask_bs=batch.kd_mask_bs & is_mine,
            trained_rows_n=None,
        )
        batches.append(own.with_trained_rows())
    counts = step.by_source[source]
    return StepBatches(tuple(batches), counts.ce, counts.kd, step.positions)


def figures_of_sources(
    rank: int, world: int, config: Path, overrides: Sequence[str]
) -> tuple[list[dict[str, float]], list[dict[str, float]], dict[str, Any]]:
    """Each source's figures as reported, and those of a batch of its labels alone."""
    with assembled(rank, world, config, overrides) as (_, parts):
        from megatron_distill.train.step import run_student
        from megatron_distill.train.validation import validate

        student, objective = parts.state.student, parts.objective
        assert objective.source_names == NAMES
        alone = replace(objective, source_names=())

        def means(step: StepBatches, how: Any) -> dict[str, float]:
            assert parts.teacher is not None
            signals = parts.teacher.signals(step.micro_batches)
            with torch.no_grad():
                objectives = [how] * len(signals)
                found = run_student(student, signals, objectives, step, forward_only=True)
            return {name: float(value) for name, value in found.items()}

        step = parts.loader.take(1)
        whole = means(step, objective)
        plain = means(step, alone)
        assert {name: whole[name] for name in plain} == plain
        totals = LabelTotals.of([step], NAMES)
        reported, separate = [], []
        for index, name in enumerate(NAMES):
            reported.append(
                {
                    key: whole[f"{key}@{name}"]
                    * (step.ce_tokens if key in ("ce", "teacher_ce") else step.kd_tokens)
                    / totals.behind(f"{key}@{name}")
                    for key in plain
                    if key != "total"
                }
            )
            separate.append(means(without(step, index), alone))
        held = parts.held_out
        measured, by_source = validate(student, held)
        same, none = validate(student, replace(held, objective=alone))
        assert (measured, none) == (same, {})
        return reported, separate, {"overall": measured, "sources": by_source}


def test_a_sources_figures_are_those_of_its_labels_alone(
    pool: Pool, dense: Path, blend: tuple[str, ...], tmp_path: Path
) -> None:
    arguments = [f"output={tmp_path}", *blend, *HELD_OUT]
    ((reported, separate, validation),) = pool.run(1, figures_of_sources, dense, arguments)
    for ours, expected in zip(reported, separate, strict=True):
        assert ours.keys() == expected.keys() - {"total"}
        for name, value in ours.items():
            assert value == pytest.approx(expected[name], rel=2e-6), name
    losses = [figures["ce"] for figures in reported]
    assert max(losses) - min(losses) > 1e-3, "the sources are too alike to be told apart"
    overall, sources = validation["overall"], validation["sources"]
    assert tuple(sources) == NAMES
    overall |= {"ce_loss": overall["ce"], "kd_loss": overall["kd"]}
    assert_whole(sources, overall, "top1_agreement", "teacher_entropy", "reverse_kl")


def assert_whole(
    sources: dict[str, dict[str, float]], overall: dict[str, float], *terms: str
) -> None:
    """Check that the mean of the sources' losses over their labels is the overall loss."""
    kinds = {"ce_loss": "ce", "kd_loss": "kd"} | dict.fromkeys(terms, "kd")
    for name, kind in kinds.items():
        known = [one for one in sources.values() if one[f"{kind}_tokens"]]
        total = sum(one[f"{kind}_tokens"] for one in known)
        merged = sum(one[f"{kind}_tokens"] * one[name] for one in known) / total
        assert merged == pytest.approx(overall[name], rel=2e-6), name


BALANCED: dict[str, tuple[int, tuple[str, ...]]] = {
    "schedule": (
        1, (
            "objective.balance={mode: schedule, alpha_schedule: {to: 0.2, steps: 3}}",
            "objective.terms.0.weight_schedule={to: 0.25, steps: 2}",
        ),
    ),
    "magnitude, DP2": (2, ("objective.balance={mode: magnitude, alpha: 0.9, clamp: 1000}",)),
    "magnitude per micro-batch, DP2": (
        2, ("objective.balance={mode: magnitude, per_microbatch: true}",)
    ),
    "gradient norms, TP2": (2, ("objective.balance.mode=gradient_norm", "parallel.tensor=2")),
}  # fmt: skip
QUICK_BALANCED = ("schedule", "magnitude, DP2")


@pytest.mark.parametrize("case", quick_and_slow(BALANCED, QUICK_BALANCED))
def test_a_balanced_loss_is_the_mean_of_its_sources(
    pool: Pool, dense: Path, blend: tuple[str, ...], tmp_path: Path, case: str
) -> None:
    world, balance = BALANCED[case]
    tracked = "logging.tensorboard=true"
    found = run(pool, world, dense, tmp_path, *blend, *balance, tracked)
    names = ("forward_kl", "reverse_kl")
    for record in found:
        assert_whole(record["sources"], record, *names)
        # The factors of the gradient are not those of the figures.
        scale = record["balance"]["alpha"] * record["balance"].get("kd_scale", 1.0)
        assert scale != 1 or record["step"] == 1
        first = 1.0
        if case == "schedule":
            first = max(0.25, 1 - 0.375 * (record["step"] - 1))
        for figures in (record, *record["sources"].values()):
            own = first * figures["forward_kl"] + 0.5 * figures["reverse_kl"]
            assert figures["kd_loss"] == pytest.approx(own, rel=2e-6)
    losses = [one["kd_loss"] for one in found[0]["sources"].values()]
    assert max(losses) > 1.01 * min(losses), "the sources are too alike to be told apart"
    scalars = EventAccumulator(str(tmp_path / "tensorboard"))
    scalars.Reload()
    for source, figures in found[-1]["sources"].items():
        tracked_kd = scalars.Scalars(f"train/sources/{source}/kd_loss")[-1]
        assert tracked_kd.value == pytest.approx(figures["kd_loss"], rel=1e-6)


def flat(output: Path) -> list[dict[str, float]]:
    """The figures of sources in each record, under one name each, with its step."""
    found = []
    for record in records(output):
        inner = record.get("validation", record)
        figures = {
            f"{source} {name}": value
            for source, values in inner["sources"].items()
            for name, value in values.items()
        }
        found.append({"step": record["step"], **figures})
    return found


@pytest.fixture(scope="module")
def alone(pool: Pool, inputs: Inputs, blend: tuple[str, ...]) -> Path:
    """The run of one rank that the others are compared with, from a checkpoint of its own."""
    output = inputs.folder / "blend-alone"
    config = inputs.folder / "dense.yaml"
    start = inputs.folder / "blend-start"
    begin = ("train.steps=1", "schedule.warmup_steps=0", "checkpoint.save=true")
    run(pool, 1, config, start, *begin)
    saved = ("checkpoint.save=true", f"student.checkpoint={start}")
    run(pool, 1, config, output, *blend, *HELD_OUT, *saved)
    return output


def test_the_log_has_every_source_and_their_mean_is_the_whole(alone: Path) -> None:
    found = records(alone)
    assert len(found) == STEPS + STEPS // 2
    for record in found:
        overall = record.get("validation", record)
        assert tuple(overall["sources"]) == NAMES
        assert_whole(overall["sources"], overall, "forward_kl", "reverse_kl")
    shares = [0.0, 0.0, 0.0]
    for record in step_records(alone):
        assert all(one.keys() <= STEP_KEYS for one in record["sources"].values())
        for index, one in enumerate(record["sources"].values()):
            shares[index] += one["ce_tokens"]
    assert shares[2] > shares[0] > shares[1] > 0
    last = found[-1]["validation"]["sources"]
    expected = {"ce_loss", "kd_loss", "teacher_ce_loss", "top1_agreement", "forward_kl"}
    assert all(expected <= one.keys() for one in last.values())


@pytest.mark.slow
def test_an_evaluation_reports_the_same_for_each_source(pool: Pool, alone: Path) -> None:
    expected = records(alone)[-1]["validation"]["sources"]
    for found in pool.run(2, evaluate_here, alone, ["parallel.tensor=2"]):
        assert tuple(found["sources"]) == NAMES
        for source, figures in expected.items():
            assert found["sources"][source] == pytest.approx(figures, rel=1e-5, abs=1e-7)


STEP_KEYS = {"ce_loss", "kd_loss", "ce_tokens", "kd_tokens", "forward_kl", "reverse_kl"}


@pytest.mark.parametrize(
    "case", quick_and_slow(("TP2xPP2+sequence+virtual", "CP2, 4", "DP2, 1"), ["DP2, 1"])
)
def test_no_layout_changes_the_report_of_a_source(
    pool: Pool, inputs: Inputs, blend: tuple[str, ...], alone: Path, tmp_path: Path, case: str
) -> None:
    world, overrides = layout(case)
    overrides += tuple(f"train.micro_batch_size={size}" for size in case.split(", ")[1:])
    start = f"student.checkpoint={inputs.folder / 'blend-start'}"
    config = inputs.folder / "dense.yaml"
    run(pool, world, config, tmp_path, *blend, *HELD_OUT, start, *overrides)
    for ours, expected in zip(flat(tmp_path), flat(alone), strict=True):
        assert ours.keys() == expected.keys()
        tolerance = 2e-6 if ours["step"] == 1 else 1e-4
        for name, value in expected.items():
            if name.endswith(("step", "tokens")):
                assert ours[name] == value, name
            elif "agreement" not in name:
                assert ours[name] == pytest.approx(value, rel=tolerance, abs=1e-7), name


@pytest.mark.slow
def test_a_blend_that_stops_goes_on_bit_by_bit(
    pool: Pool, dense: Path, blend: tuple[str, ...], tmp_path: Path
) -> None:
    resumed(pool, 2, dense, tmp_path, *blend, *HELD_OUT, stop_after=1)
    assert flat(tmp_path / "cut") == flat(tmp_path / "whole")


def test_own_held_out_corpora_are_distinguished_by_their_own_names(
    pool: Pool, inputs: Inputs, blend: tuple[str, ...], tmp_path: Path
) -> None:
    own = (
        f"data.validation_sources=[{{format: jsonl, paths: {inputs.corpus}, weight: 40}}, "
        f"{{format: text, paths: {__file__}, name: rare}}]"
    )
    one_source = f"data.sources=[{{format: jsonl, paths: {inputs.corpus}}}]"
    config = inputs.folder / "dense.yaml"
    held_out = ("validation.samples=9", "teacher=null", "objective.terms=[]")
    run(pool, 1, config, tmp_path, *blend, one_source, own, *held_out)
    *steps, last = records(tmp_path)
    assert not any("sources" in record for record in steps)
    sources = last["validation"]["sources"]
    # A source too light for a sample has no figures.
    assert sources["rare"] == {"ce_tokens": 0}
    assert sources["corpus"]["ce_loss"] == pytest.approx(last["validation"]["ce_loss"], rel=1e-6)
    assert sources["corpus"].keys() == {"ce_loss", "ce_tokens"}


def test_counts_of_no_source_are_not_figures() -> None:
    counts = (LabelCounts(6, 0), LabelCounts(0, 0))
    step = StepBatches((), 6, 0, 8, by_source=counts)
    values = {"ce": 3.0, "ce@a": 3.0, "ce@b": 0.0, "kd@a": 0.0, "kd@b": 0.0, "kd": 0.0}
    assert step_figures(values, step, ("a", "b")) == {
        "a": {"ce_tokens": 6, "ce_loss": 3.0, "kd_tokens": 0},
        "b": {"ce_tokens": 0, "kd_tokens": 0},
    }
    assert values == {"ce": 3.0, "kd": 0.0}


def test_losses_of_chunks_are_means_over_a_sources_chunks() -> None:
    counts = (LabelCounts(6, 5, chunks=4, pairs=3), LabelCounts(2, 1, chunks=1, pairs=0))
    step = StepBatches((), 8, 6, 8, chunks=5, pairs=3, by_source=counts)
    shares = {"all@a": 0.8, "all@b": 0.1, "pairs@a": 2.0, "pairs@b": 0.0, "kd@a": 9.0, "kd@b": 9.0}
    shares |= {"tokens@a": 1.0, "tokens@b": 0.5}  # of a teacher with the student's tokenizer
    on_chunks = OnChunks(
        {"all": 1.0, "pairs": 0.5, "tokens": 2.0},
        frozenset({"all", "pairs"}),
        frozenset({"pairs"}),
    )
    found = step_figures(
        dict(shares), step, ("a", "b"), terms=["all", "pairs", "tokens"], on_chunks=on_chunks
    )
    assert found == {
        "a": {"kd_tokens": 5, "kd_loss": 4.4, "all": 1.0, "pairs": 2.0, "tokens": 1.2},
        "b": {"kd_tokens": 1, "kd_loss": 6.5, "all": 0.5, "tokens": 3.0},
    }


def test_a_source_without_a_chunk_of_one_token_has_the_other_terms_alone() -> None:
    from megatron_distill.losses import ChunkTerm, LossWeights
    from megatron_distill.ops import LogitRule, VocabShard
    from megatron_distill.train.balancing import _sources_with_own_weights
    from megatron_distill.train.objective import TokenObjective

    nothing: Any = None
    objective = TokenObjective(
        1.0, (ChunkTerm("likelihood", weight=6.0), ChunkTerm("common", weight=9.0)), (), None,
        VocabShard(8, 0, 8), LogitRule(), nothing,
    )  # fmt: skip
    own = LossWeights(1.0, (2.0, 3.0))
    rare = {"kd_tokens": 2.0, "kd_loss": 3.0, "likelihood_forward_kl": 0.5}
    found = _sources_with_own_weights(objective, own, {"rare": rare})
    assert found["rare"] == {**rare, "kd_loss": 1.0}
