"""A store of a teacher with another tokenizer, beside a live teacher of the student's: routed, on
every sample, in layouts, and resumed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.e2e.captures import KnownStores, write_capture
from tests.e2e.runs import (
    SAVE,
    SECOND_SIZES,
    STUDENT,
    Course,
    Inputs,
    KnownRuns,
    assert_same_course,
    course,
    layout,
    one_of_several,
    resumed,
    run,
)

STEPS, ROWS, K = 3, 8, 64
# Of the samples' teachers; of one teacher on all samples.
ROUTED = (
    "{divergence: forward_kl}",
    "{alignment: likelihood, divergence: js_divergence, temperature: 6.0}",
    "{alignment: common, divergence: reverse_kl, weight: 0.25, top_k: 5}",
)
NAMED = (
    "{divergence: reverse_kl, weight: 0.5, top_k: 8, teacher: near}",
    "{alignment: common, weight: 0.5, temperature: 2.0, top_k: 8, "
    "scale_by_temperature_squared: true, teacher: far}",
)
OF_ROUTED = ("forward_kl", "likelihood_js_divergence_t6", "common_reverse_kl_top5")
OF_NAMED = ("reverse_kl_top8_near", "common_forward_kl_t2_top8_far")
FIGURES = ("total_loss", "ce_loss", "kd_loss", "grad_norm")


@pytest.fixture(scope="module")
def config(inputs: Inputs) -> Path:
    """The configuration of live teachers."""
    return write_config(inputs)


def write_config(inputs: Inputs) -> Path:
    """Two live teachers; `far` is the first of them, with the weights of a capture."""
    tokenizer = inputs.second_tokenizer(max(SECOND_SIZES))
    own = f"    sequence_length: 24\n    tokenizer: {{path: {tokenizer}}}\n"
    teachers = f"teachers:\n{one_of_several('near', width=48)}{one_of_several('far')}{own}"
    return inputs.write(
        "aligned_among", STUDENT, teachers, steps=STEPS,
        terms="\n".join(f"    - {term}" for term in ROUTED + NAMED),
        changes={"objective:\n": "objective:\n  routing_weights: {near: 2, far: 1}\n"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def train(pool: Pool, inputs: Inputs, config: Path) -> Callable[..., Course]:
    return partial(KnownRuns(pool, inputs, "aligned-among", "schedule.warmup_steps=1"), config.stem)


@pytest.fixture(scope="module")
def capture(pool: Pool, inputs: Inputs) -> Callable[..., Path]:
    """Stores of the run's samples in both tokenizations."""
    return KnownStores(
        pool, inputs, "store-aligned-among",
        write_capture(inputs, "aligned-among-capture", samples=STEPS * ROWS),
        "capture.aligned=true", f"store.k={K}", "teacher.sequence_length=24",
        f"teacher.tokenizer.path={inputs.second_tokenizer(max(SECOND_SIZES))}",
    )  # fmt: skip


def of_store(store: Path) -> tuple[str, ...]:
    """A teacher without a model: the store has its tokenizer."""
    return (
        "teachers.far.architecture=null", "teachers.far.tokenizer=null",
        f"teachers.far.store={store}",
    )  # fmt: skip


def assert_same(found: Course, expected: Course, names: tuple[str, ...]) -> None:
    assert_same_course(found, expected, (*FIGURES, *names), first=5e-6)
    for name in ("chunks", "aligned_labels", "tokens"):
        assert [record[name] for record in found] == [record[name] for record in expected], name
    assert min(found[0][name] for name in names) > 1e-3
    far = found[0]["teachers"]["far"]
    assert far["chunks"] > 0
    assert 0.05 < far["topk_mass"] < 1


CASES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "one rank": ("one rank", (), OF_ROUTED + OF_NAMED),
    "TP2+sequence": ("TP2+sequence", (), OF_ROUTED + OF_NAMED),
    "CP2, routed alone, one sample at a time": (
        "CP2", (f"objective.terms=[{', '.join(ROUTED)}]", "train.micro_batch_size=1"), OF_ROUTED,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_store_of_another_tokenizer_is_the_live_teacher(
    train: Callable[..., Course], capture: Callable[..., Path], case: str
) -> None:
    name, given, names = CASES[case]
    world, overrides = layout(name)
    assert_same(train(world, *given, *of_store(capture()), *overrides), train(1, *given), names)


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_bits(
    pool: Pool, config: Path, capture: Callable[..., Path], train: Callable[..., Course],
    tmp_path: Path,
) -> None:  # fmt: skip
    given = ("schedule.warmup_steps=1", *of_store(capture()))
    found, expected = resumed(pool, 1, config, tmp_path, *given, stop_after=1)
    assert course(found) == course(expected)
    # A live teacher may have trained the steps before.
    live = ("schedule.warmup_steps=1", SAVE)
    run(pool, 1, config, tmp_path / "live", *live, stop_after=1)
    found = run(pool, 1, config, tmp_path / "live", *live, *of_store(capture()))
    assert_same_course(found, train(1), (*FIGURES, *OF_ROUTED), first=1e-6)
