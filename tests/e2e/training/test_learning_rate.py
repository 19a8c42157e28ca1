"""The learning rate of each step is Megatron's: that of the updates before it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.e2e.runs import assembled, checkpoints, course, run

PEAK, FLOOR = 0.003, 0.0006
STEPS, WARMUP, WSD = 6, 2, 3
COMMON = (
    f"train.steps={STEPS}",
    f"schedule.warmup_steps={WARMUP}",
    f"schedule.min_learning_rate={FLOOR}",
)
# The share of the way from the floor to the peak, by the share of the decay that is done.
FORMS = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
    "exponential": lambda done: 2 * 0.5**done - 1,
    "minus_sqrt": lambda done: 1 - math.sqrt(done),
}


def rate(updates: int, form: str, *, warmup: int = WARMUP, decay: int | None = None) -> float:
    """The rate after so many updates, by hand; the decay takes all steps after the warm-up."""
    if updates < warmup:
        return PEAK * updates / warmup
    decay = decay or STEPS - warmup
    done = max(0, updates - (STEPS - decay)) / decay
    return PEAK if form == "constant" else FLOOR + FORMS[form](done) * (PEAK - FLOOR)


def test_a_step_has_the_rate_of_the_updates_before_it(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    found = run(pool, 1, dense, tmp_path, *COMMON, "schedule.decay=cosine")
    expected = [rate(updates, "cosine") for updates in range(STEPS)]
    assert [one["learning_rate"] for one in found] == pytest.approx(expected, rel=1e-9)
    assert expected[0] == 0
    assert expected[-1] > FLOOR


def rates_of(rank: int, world: int, config: Path, cases: list[list[str]]) -> list[list[float]]:
    """The rates that each case's assembled schedule gives its steps; to be called in the pool."""
    found = []
    for overrides in cases:
        with assembled(rank, world, config, overrides) as (settings, parts):
            rates = []
            for _ in range(settings.train.steps):
                rates.append(parts.state.optimizer.param_groups[0]["lr"])
                parts.state.schedule.step(1)
            found.append(rates)
    return found


@pytest.mark.slow
def test_the_forms_of_warm_ups_and_decays(pool: Pool, dense: Path, tmp_path: Path) -> None:
    wsd = ["schedule.decay=wsd", f"schedule.wsd_decay_steps={WSD}"]
    by_form = {
        **{form: [f"schedule.decay={form}"] for form in ("linear", "constant")},
        **{f"wsd {form}": [*wsd, f"schedule.wsd_decay_form={form}"]
           for form in ("cosine", "exponential", "minus_sqrt")},
        "wsd linear": wsd,  # left out, the form is linear
    }  # fmt: skip
    cases = [[*COMMON, *changes] for changes in by_form.values()]
    expected = [
        [rate(updates, form.split()[-1], decay=WSD if "wsd" in form else None)
         for updates in range(STEPS)]
        for form in by_form
    ]  # fmt: skip
    # A warm-up as long as the run is cut at its end.
    cases += [[f"train.steps={steps}", "schedule.warmup_steps=4"] for steps in (3, 4)]
    expected += [[PEAK * updates / 4 for updates in range(steps)] for steps in (3, 4)]
    given = [[f"output={tmp_path / str(number)}", *case] for number, case in enumerate(cases)]
    (found,) = pool.run(1, rates_of, dense, given)
    assert found == [pytest.approx(rates, rel=1e-9) for rates in expected]
    first = [f"output={tmp_path / 'first'}", *COMMON, "schedule.initial_learning_rate=0.001"]
    ((rates,),) = pool.run(1, rates_of, dense, [first])
    assert rates[:3] == pytest.approx([0.001, 0.002, 0.003], rel=1e-9)


def weights_of(rank: int, world: int, config: Path, overrides: list[str]) -> list[bytes]:
    """The bits of an assembled run's parameters."""
    with assembled(rank, world, config, overrides) as (_, parts):
        chunks = parts.state.student.chunks
        return [p.detach().numpy().tobytes() for chunk in chunks for p in chunk.parameters()]


def test_a_run_of_one_step_trains(pool: Pool, dense: Path, tmp_path: Path) -> None:
    one = ("train.steps=1", "schedule.warmup_steps=0", "checkpoint.save=true")
    (before,) = pool.run(1, weights_of, dense, [f"output={tmp_path / 'none'}", *one])
    (record,) = run(pool, 1, dense, tmp_path / "run", *one)
    assert record["learning_rate"] == PEAK
    (after,) = pool.run(1, weights_of, dense, [f"output={tmp_path / 'run'}", *one])
    assert all(ours != other for ours, other in zip(after, before, strict=True))


# The gradient's square is infinite until two steps are done.
TWO_BAD = (
    "objective.balance.mode=schedule",
    "objective.ce_weight=1e30",
    "objective.ce_weight_schedule={to: 1, kind: constant, start_step: 2}",
    "train.max_bad_steps=2",
    "schedule.decay=linear",
    "checkpoint.save=true",
)


@pytest.mark.slow
def test_a_step_that_was_not_applied_does_not_advance_the_rate(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    common = (*COMMON, *TWO_BAD)
    whole = run(pool, 1, dense, tmp_path / "whole", *common)
    assert [one.get("skipped", False) for one in whole] == [True, True, *[False] * 4]
    expected = [rate(updates, "linear") for updates in (0, 0, 0, 1, 2, 3)]
    assert [one["learning_rate"] for one in whole] == pytest.approx(expected, rel=1e-9)
    run(pool, 1, dense, tmp_path / "cut", *common, stop_after=3)
    assert course(run(pool, 1, dense, tmp_path / "cut", *common))[2:] == course(whole)[2:]


OLD_KEYS = {
    "step", "tokens", "bad_steps", "architecture", "tokenizer", "layout", "data", "balance",
    "features",
}  # fmt: skip


def test_a_checkpoint_of_an_older_release_goes_on_after_its_updates(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    # Older releases counted every step, were one ahead, and wrote no more than these keys.
    common = (*COMMON, *TWO_BAD)
    run(pool, 1, dense, tmp_path, *common, stop_after=4)
    assert checkpoints(tmp_path) == ["step_0000004"]
    file = tmp_path / "checkpoints" / "step_0000004" / "description.json"
    description = json.loads(file.read_text())
    assert description["bad_steps"] == 2
    file.write_text(json.dumps({key: description[key] for key in OLD_KEYS}))
    found = run(pool, 1, dense, tmp_path, *common)
    expected = [rate(updates, "linear") for updates in (2, 3)]
    assert [one["learning_rate"] for one in found[4:]] == pytest.approx(expected, rel=1e-9)
