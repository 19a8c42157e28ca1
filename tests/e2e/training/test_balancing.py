"""Balanced runs: the layout changes nothing, a resumed run is the run, nothing becomes infinite."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.e2e.captures import run_in, write_capture
from tests.e2e.failing import call
from tests.e2e.runs import (
    PIPELINE,
    TENSOR,
    Course,
    Inputs,
    KnownRuns,
    course,
    failure,
    layout,
    quick_and_slow,
    records,
    resumed,
    run,
    validations,
)

LAST = 1e-4
SHORT = ("train.steps=6", "schedule.warmup_steps=2")
MAGNITUDE = ("objective.balance={mode: magnitude, alpha: 0.5}",)
PREVIOUS = ("objective.balance={mode: magnitude, raw_losses: previous}",)
NORMS = ("objective.balance={mode: gradient_norm}",)
# A weight from nothing, a temperature on its way down, alpha on its way up.
CHANGING = (
    """objective.terms=[
    {divergence: forward_kl, weight: 0, weight_schedule: {to: 1, steps: 3}},
    {divergence: reverse_kl, temperature: 4, scale_by_temperature_squared: true,
     temperature_schedule: {to: 2, kind: cosine, steps: 4, start_step: 1}}]""",
    "objective.ce_weight_schedule={to: 0.5, kind: constant, start_step: 3}",
    "objective.balance.alpha_schedule={to: 0.2, steps: 5}",
)
SCHEDULE = ("objective.balance.mode=schedule", *CHANGING)
FEATURES = "objective.features=[{match: uniform}, {student: 2, teacher: 2, loss: cosine}]"
DROPOUT = tuple(f"student.architecture.{kind}_dropout=0.1" for kind in ("attention", "hidden"))


@pytest.fixture(scope="module")
def train(pool: Pool, inputs: Inputs) -> KnownRuns:
    return KnownRuns(pool, inputs, "balancing", *SHORT)


def assert_same_balance(found: Course, expected: Course) -> None:
    for ours, other in zip(found, expected, strict=True):
        assert ours["total_loss"] == pytest.approx(other["total_loss"], rel=LAST)
        assert ours["balance"] == pytest.approx(other["balance"], rel=LAST)


def test_the_total_is_that_of_the_formula_at_every_step(train: KnownRuns) -> None:
    found = train("dense", 1, *MAGNITUDE)
    for record in found:
        balance = record["balance"]
        assert balance["kd_scale"] == pytest.approx(record["ce_loss"] / record["kd_loss"], rel=1e-6)
        assert balance["forward_kl_weight"] == 0.5 * balance["kd_scale"]
        assert record["total_loss"] == pytest.approx(1.5 * record["ce_loss"], rel=1e-6)
    scales = [record["balance"]["kd_scale"] for record in found]
    assert max(scales) > 1.01 * min(scales)


@pytest.mark.slow
def test_previous_losses_are_those_of_the_step_before(train: KnownRuns) -> None:
    found = train("dense", 1, *PREVIOUS)
    ratios = [record["ce_loss"] / record["kd_loss"] for record in found]
    scales = [record["balance"]["kd_scale"] for record in found]
    # The first step has none before it and measures.
    assert scales == pytest.approx([ratios[0], *ratios[:-1]], rel=1e-6)


def test_schedules_by_hand(train: KnownRuns) -> None:
    found = train("dense", 1, *SCHEDULE)
    half = math.sqrt(0.5)
    temperatures = [4, 4, 3 + half, 3, 3 - half, 2]
    alphas = [1.0 - 0.16 * done for done in range(6)]
    weights = [0, 1 / 3, 2 / 3, 1, 1, 1]
    tasks = [1.0] * 3 + [0.5] * 3
    second = "reverse_kl_t4to2"
    for step, record in enumerate(found):
        assert record["balance"] == pytest.approx(
            {
                "alpha": alphas[step],
                "ce_weight": tasks[step],
                "forward_kl_weight": alphas[step] * weights[step],
                f"{second}_weight": alphas[step],
                f"{second}_temperature": temperatures[step],
            }
        )
        kd = weights[step] * record["forward_kl"] + record[second]
        assert record["kd_loss"] == pytest.approx(kd, rel=1e-6)
        total = tasks[step] * record["ce_loss"] + alphas[step] * kd
        assert record["total_loss"] == pytest.approx(total, rel=1e-6)


@pytest.mark.slow
def test_a_schedule_that_changes_nothing_is_the_fixed_mode(train: KnownRuns) -> None:
    fixed = train("dense", 1)
    assert all("balance" not in record for record in fixed)
    same = train("dense", 1, "objective.balance.mode=schedule")
    assert course(same) == course(fixed)
    halved = train("dense", 1, "objective.balance.alpha=0.5")
    weighted = train("dense", 1, "objective.terms.0.weight=0.5")
    for ours, other in zip(halved, weighted, strict=True):
        assert ours["grad_norm"] == other["grad_norm"]
        assert ours["kd_loss"] == pytest.approx(2 * other["kd_loss"], rel=1e-6)


# Between two tokenizers: a weight from nothing, a temperature on its way down, and one as it is.
# The names of these losses are behind.
OF_CHUNKS: dict[str, tuple[str, Sequence[str]]] = {
    "tokens": (
        """objective.terms=[
        {alignment: likelihood, divergence: js_divergence, weight: 0,
         weight_schedule: {to: 1, steps: 3}},
        {alignment: common, temperature: 4, scale_by_temperature_squared: true,
         temperature_schedule: {to: 2, steps: 4, start_step: 1}}]""",
        ("likelihood_js_divergence", "common_forward_kl_t4to2"),
    ),
    "means": (
        """objective.terms=[
        {alignment: projection, divergence: js_divergence, top_k: 8, weight: 0,
         weight_schedule: {to: 1, steps: 3}},
        {alignment: gold, temperature: 4, scale_by_temperature_squared: true, uncommon_top_k: 32,
         temperature_schedule: {to: 2, steps: 4, start_step: 1}},
        {alignment: uld, weight: 0.25, uncommon_top_k: 32}]""",
        (
            "projection_js_divergence_top8",
            "gold_forward_kl_uncommon32_t4to2",
            "uld_uncommon32",
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_CHUNKS)
def test_losses_between_tokenizers_have_schedules_and_a_balance(
    train: KnownRuns, case: str
) -> None:
    terms, (first, second, *others) = OF_CHUNKS[case]
    found = train("aligned", 1, *MAGNITUDE, terms)
    weights, temperatures = [0, 1 / 3, 2 / 3, 1, 1, 1], [4, 4, 3.5, 3, 2.5, 2]
    for step, record in enumerate(found):
        factors = {first: weights[step], second: 1.0, **dict.fromkeys(others, 0.25)}
        kd = sum(factor * record[name] for name, factor in factors.items())
        assert record["kd_loss"] == pytest.approx(kd, rel=1e-6)
        balance, scale = record["balance"], record["ce_loss"] / kd
        assert balance["kd_scale"] == pytest.approx(scale, rel=1e-5)
        for name, factor in factors.items():
            assert balance[f"{name}_weight"] == pytest.approx(0.5 * scale * factor, rel=1e-5)
            assert record[name] > 1e-5
        assert balance[f"{second}_temperature"] == pytest.approx(temperatures[step])
        assert record["total_loss"] == pytest.approx(1.5 * record["ce_loss"], rel=1e-5)


@pytest.mark.slow
def test_the_one_micro_batch_of_a_step_has_the_balance_of_the_step(train: KnownRuns) -> None:
    terms = OF_CHUNKS["tokens"][0]
    whole = train("aligned", 1, *MAGNITUDE, terms)
    given = ("objective.balance={mode: magnitude, alpha: 0.5, per_microbatch: true}", terms)
    one = train("aligned", 1, *given, "train.micro_batch_size=8")
    assert_same_balance(one, whole)
    several = train("aligned", 2, *given, "train.micro_batch_size=2", PIPELINE)
    scales = [record["balance"]["kd_scale"] for record in several]
    expected = [record["balance"]["kd_scale"] for record in whole]
    assert scales == pytest.approx(expected, rel=0.2)
    assert all(abs(ours - other) > 1e-5 for ours, other in zip(scales, expected, strict=True))


BALANCES = {"magnitude": MAGNITUDE, "gradient norms": NORMS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("terms", "balance", "name"),
    [("tokens", balance, name) for balance in BALANCES for name in ("TP2", "PP2", "DP2")]
    + [("means", "magnitude", "PP2"), ("means", "gradient norms", "TP2")],
)
def test_the_balance_of_losses_between_tokenizers_is_that_of_one_rank(
    train: KnownRuns, terms: str, balance: str, name: str
) -> None:
    (world, overrides), given = layout(name), (*BALANCES[balance], OF_CHUNKS[terms][0])
    expected = train("aligned", 1, *given)
    assert_same_balance(train("aligned", world, *given, *overrides), expected)
    assert min(record["balance"]["kd_scale"] for record in expected) > 0


CLAMPED: dict[str, Sequence[str]] = {
    "magnitude, TP2": ("objective.balance={mode: magnitude, clamp: 1.01}", TENSOR),
    "per micro-batch, DP2": (
        "objective.balance={mode: magnitude, per_microbatch: true, clamp: 1.01}",
    ),
}


@pytest.mark.parametrize("case", quick_and_slow(CLAMPED, []))
def test_a_balance_that_sits_at_its_clamp_is_warned_of_once(
    pool: Pool, dense: Path, tmp_path: Path, case: str
) -> None:
    few = ("train.steps=24", "train.global_batch_size=4", "objective.terms.0.weight=0.1")
    endings = call(pool, dense, tmp_path, *few, *CLAMPED[case])
    assert [ending.status for ending in endings] == [0, 0], endings[0].stderr
    scales = [one["balance"]["kd_scale"] for one in records(tmp_path)]
    assert all(scale == pytest.approx(1.01, rel=1e-6) for scale in scales)
    text = [
        ending.stderr.count("objective.balance.clamp = 1.01: kd_scale was") for ending in endings
    ]
    assert text == [1, 0]
    assert "in each of the last 20 steps" in endings[0].stderr


AVERAGED = "objective.balance.ema=0.7"
RESUMED: dict[str, tuple[int, Sequence[str]]] = {
    "previous, averaged, dropout, DP2": (2, (*PREVIOUS, AVERAGED, *CHANGING, *DROPOUT)),
    "exact, averaged, dropout, PP2": (2, (*MAGNITUDE, AVERAGED, PIPELINE, *DROPOUT)),
    "gradient norms, averaged, TP2": (2, (*NORMS, AVERAGED, TENSOR)),
    "schedule": (1, SCHEDULE),
    "features, averaged, PP2": (2, (*MAGNITUDE, AVERAGED, FEATURES, PIPELINE)),
    "features, gradient norms, TP2": (2, (*NORMS, FEATURES, TENSOR)),
}
KEPT = (
    "validation.samples=8",
    "validation.interval=3",
    "data.validation_fraction=0.2",
)


@pytest.mark.parametrize("case", quick_and_slow(RESUMED, []))
def test_a_resumed_run_is_the_run_to_the_bit(
    pool: Pool, dense: Path, tmp_path: Path, case: str
) -> None:
    world, overrides = RESUMED[case]
    common = (*SHORT, *KEPT, *overrides)
    found, expected = resumed(pool, world, dense, tmp_path, *common, stop_after=4)
    assert course(found) == course(expected)
    assert [one["balance"] for one in found] == [one["balance"] for one in expected]
    ours = validations(tmp_path / "cut")
    assert ours == validations(tmp_path / "whole")
    # One set of names at temperatures of a run's end, all through.
    assert [one["step"] for one in ours] == [3, 6]
    assert ours[0]["validation"].keys() == ours[1]["validation"].keys()


@pytest.mark.slow
def test_another_layout_goes_on_with_the_same_balance(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    common = (*SHORT, "checkpoint.save=true", *MAGNITUDE, AVERAGED)
    expected = run(pool, 1, dense, tmp_path / "whole", *common)
    run(pool, 1, dense, tmp_path / "cut", *common, stop_after=3)
    found = run(pool, 4, dense, tmp_path / "cut", *common, TENSOR, PIPELINE)
    assert_same_balance(found, expected)


def test_a_bad_step_leaves_the_running_means_alone(pool: Pool, dense: Path, tmp_path: Path) -> None:
    # The first update throws the weights away; every step after it is not finite.
    run(
        pool, 1, dense, tmp_path, "train.steps=3", *MAGNITUDE, AVERAGED,
        "checkpoint.save=true", "checkpoint.interval=1", "checkpoint.keep=5",
        "schedule.warmup_steps=0", "schedule.decay=constant", "optimizer.learning_rate=1e30",
        "optimizer.clip_grad_norm=0", "train.max_bad_steps=5",
    )  # fmt: skip
    folders = [tmp_path / "checkpoints" / f"step_000000{step}" for step in (1, 2, 3)]
    descriptions = [json.loads((one / "description.json").read_text()) for one in folders]
    assert [one["bad_steps"] for one in descriptions] == [0, 1, 2]
    states = [one["balance"] for one in descriptions]
    assert states[0] == states[1] == states[2]
    assert states[0]["count"] == 1
    found = records(tmp_path)
    assert [one.get("skipped", False) for one in found] == [False, True, True]
    assert all(math.isfinite(one["balance"]["kd_scale"]) for one in found)

    descriptions[2]["balance"] = {"count": 3}
    (folders[2] / "description.json").write_text(json.dumps(descriptions[2]))
    text = failure(pool, 1, dense, tmp_path, "train.steps=5", "checkpoint.save=true")
    assert text.startswith(
        f"CheckpointError: {folders[2]}: `balance` in its description is damaged"
    )


@pytest.mark.slow
def test_a_resumed_run_of_another_measure_begins_its_means_anew(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    saved = "checkpoint.save=true"
    run(pool, 1, dense, tmp_path, *SHORT, saved, *MAGNITUDE, AVERAGED, stop_after=3)
    run(pool, 1, dense, tmp_path, *SHORT, saved, *NORMS, AVERAGED)
    (path,) = (tmp_path / "checkpoints").glob("step_0000006/description.json")
    balance = json.loads(path.read_text())["balance"]
    assert (balance["measure"], balance["count"]) == ("gradient_norm", 3)


@pytest.mark.slow
def test_a_store_serves_a_changing_temperature_of_renormalized_probabilities(
    pool: Pool, inputs: Inputs, train: KnownRuns
) -> None:
    config, folder = write_capture(inputs, "balancing", samples=48), inputs.folder / "balanced"
    assert run_in(pool, 1, config, folder) is True
    terms = """objective.terms=[{divergence: forward_kl, top_k: 8, support: renormalized,
        temperature: 3, temperature_schedule: {to: 0.7, steps: 5}}]"""
    online = train("dense", 1, *MAGNITUDE, terms)
    offline = train("dense", 1, *MAGNITUDE, terms, f"teacher.store={folder}")
    assert_same_balance(offline, online)
    temperatures = [
        one["balance"]["forward_kl_t3to0.7_top8_renormalized_temperature"] for one in offline
    ]
    assert temperatures == pytest.approx([3, 2.54, 2.08, 1.62, 1.16, 0.7])
