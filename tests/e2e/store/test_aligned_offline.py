"""A store for a student with another tokenizer gives the losses of the live teacher."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.e2e.captures import KnownStores, run_in, write_capture
from tests.e2e.runs import (
    QUANTITIES,
    SECOND_SIZES,
    Course,
    Inputs,
    KnownRuns,
    assert_same_course,
    course,
    failure,
    layout,
    quick_and_slow,
    records,
    resumed,
    run,
)
from tests.e2e.teachers.roles import run_apart
from tests.e2e.teachers.test_teacher_ranks import of_roles, shared
from tests.e2e.training.test_conversations import write_chat, write_chat_tokenizers

STEPS, ROWS, K = 3, 8, 64
SHORT = (f"train.steps={STEPS}", "schedule.warmup_steps=1")
TERMS = """objective.terms=[
    {alignment: likelihood, divergence: js_divergence, temperature: 6.0},
    {alignment: common, weight: 0.5, temperature: 2.0, top_k: 8,
     scale_by_temperature_squared: true},
    {alignment: common, divergence: reverse_kl, weight: 0.25, top_k: 5}]"""
NAMES = ("likelihood_js_divergence_t6", "common_forward_kl_t2_top8", "common_reverse_kl_top5")
FIGURES = (*NAMES, "total_loss", "ce_loss", "kd_loss", "grad_norm")
OWN = "data.sources=[]"
Run = Callable[..., Course]


@pytest.fixture(scope="module")
def capture(pool: Pool, inputs: Inputs) -> Callable[..., Path]:
    """Stores of the teacher on its own tokens of the run's samples."""
    return KnownStores(
        pool, inputs, "store-aligned",
        write_capture(inputs, "aligned-offline", samples=STEPS * ROWS),
        "capture.aligned=true", f"store.k={K}", "teacher.sequence_length=24",
        f"teacher.tokenizer.path={inputs.second_tokenizer(max(SECOND_SIZES))}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def train(pool: Pool, inputs: Inputs) -> Run:
    """Train the student of another tokenizer."""
    return partial(KnownRuns(pool, inputs, "aligned-offline", *SHORT, TERMS), "aligned")


def of_store(store: Path) -> tuple[str, ...]:
    """A teacher without a model: the store has its tokenizer."""
    return ("teacher.architecture=null", "teacher.tokenizer=null", f"teacher.store={store}")


def assert_same(found: Course, expected: Course, first: float) -> None:
    for ours, other in zip(found, expected, strict=True):
        assert ours["chunks"] == other["chunks"] > 0
        assert ours["aligned_labels"] == other["aligned_labels"] > 0.8
        assert all(other[name] != 0 for name in FIGURES)
    assert_same_course(found, expected, FIGURES, first=first)


@pytest.mark.parametrize(
    "reader",
    quick_and_slow(["one rank", "DP2", "PP2", "TP2xCP2+sequence"], ["one rank"]),
)
def test_a_run_from_a_store_has_the_losses_of_the_live_teacher(
    capture: Callable[..., Path], train: Run, reader: str
) -> None:
    world, overrides = layout(reader)
    assert_same(train(world, *of_store(capture()), *overrides), train(1), first=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["TP2", "DP2xCP2"])
def test_no_layout_of_the_capture_changes_a_loss(
    capture: Callable[..., Path], train: Run, writer: str
) -> None:
    world, overrides = layout(writer)
    store = capture(*overrides, world=world)
    assert_same(train(1, *of_store(store)), train(1), first=5e-6)


SENT = f"teacher.transfer={{what: top_k, k: {K}}}"
# Layouts of the student and of the teacher, and other settings.
APART: dict[str, tuple[str, ...]] = {
    "1 and 1, 2 ahead, shared memory": (
        "teacher.steps_ahead=2", "teacher.transfer.backend=ipc",
    ),
    **dict.fromkeys(
        ("TP2+sequence and TP2+sequence", "PP2 and CP2", "CP2 and TP2+sequence"), (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", quick_and_slow(APART, []))
def test_a_sent_top_k_has_the_losses_of_a_store(
    pool: Pool,
    inputs: Inputs,
    tmp_path: Path,
    capture: Callable[..., Path],
    train: Run,
    case: str,
) -> None:
    students, teachers, layouts = of_roles(case)
    config, given = inputs.folder / "aligned.yaml", (*SHORT, TERMS, SENT, *layouts, *APART[case])
    found = run_apart(pool, students, teachers, config, tmp_path, *given)
    of_student = [one for one in layouts if one.startswith("parallel.")]
    expected = train(students, *of_store(capture()), *of_student)
    is_of_one_rank = case.partition(",")[0].endswith(("and 1", "and DP2"))
    for ours, other in zip(found, expected, strict=True):
        assert ours["chunks"] == other["chunks"] > 0
        for name in FIGURES:
            # A teacher of several ranks adds in another order.
            tolerance = 0.0 if is_of_one_rank else 1e-6 if ours["step"] == 1 else 1e-4
            assert ours[name] == pytest.approx(other[name], rel=tolerance, abs=0.0), name


@pytest.mark.slow
def test_a_sent_top_k_of_all_ids_has_the_losses_of_the_live_teacher(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    config = inputs.folder / "aligned.yaml"
    given = (*SHORT, TERMS, "validation.samples=8", f"validation.interval={STEPS}")
    whole = f"teacher.transfer={{what: top_k, k: {max(SECOND_SIZES)}}}"
    found = run_apart(pool, 1, 1, config, tmp_path / "apart", whole, *given)
    expected = shared(pool, 1, config, tmp_path / "shared", *given)
    assert_same(found[:STEPS], expected[:STEPS], first=1e-6)
    ours, other = (one[STEPS]["validation"] for one in (found, expected))
    assert ours.keys() == other.keys() == {"ce_loss", "kd_loss", "topk_mass", *NAMES}
    for name in ours:
        assert ours[name] == pytest.approx(other[name], rel=1e-4), name


@pytest.mark.slow
def test_draws_serve_the_likelihood_and_no_other_loss(
    pool: Pool, inputs: Inputs, capture: Callable[..., Path], train: Run, tmp_path: Path
) -> None:
    # The label's log-probability is a number of its own in a record, whatever is drawn.
    store = capture("store.mode=sampled", "store.k=4", "store.temperatures=[]")
    terms = TERMS.splitlines()[1].rstrip().rstrip(",")
    likelihood = f"objective.terms=[{terms.strip()}]"
    expected = train(1, likelihood)
    for world, overrides in map(layout, ("one rank", "CP2")):
        found = train(world, *of_store(store), likelihood, *overrides)
        assert [one["chunks"] for one in found] == [one["chunks"] for one in expected]
        assert all(one["chunks"] > 0 for one in found)
        assert_same_course(found, expected, (NAMES[0], "total_loss", *QUANTITIES), first=5e-6)
    common = "objective.terms=[{alignment: common, top_k: 4}]"
    text = failure(
        pool, 1, inputs.folder / "aligned.yaml", tmp_path, *SHORT, *of_store(store), common
    )
    assert "objective.terms.0" in text
    assert "likelihood" in text


@pytest.mark.slow
def test_conversations_from_a_store_have_the_losses_of_the_live_teacher(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    pool.run(1, write_chat_tokenizers, tmp_path)
    corpus = write_chat(tmp_path / "chat.jsonl", weights=False)
    shared = (
        f"data.sources=[{{format: jsonl, paths: {corpus}, conversation: {{}}}}]",
        f"data.tokenizer.path={tmp_path / 'student'}",
        f"teacher.tokenizer.path={tmp_path / 'teacher'}",
        f"data.cache={tmp_path / 'cache'}",
        "data.sequence_length=160", "teacher.sequence_length=200",
    )  # fmt: skip
    config = write_capture(inputs, "aligned-chat", samples=STEPS * ROWS)
    store = tmp_path / "store"
    taken = run_in(pool, 1, config, store, "capture.aligned=true", f"store.k={K}", *shared)
    assert taken is True
    aligned = inputs.folder / "aligned.yaml"
    given = (*SHORT, TERMS, *shared)
    live = run(pool, 1, aligned, tmp_path / "live", *given)
    assert min(record["chunks"] for record in live) > 100
    joined = run(
        pool, 2, aligned, tmp_path / "joined", *given, *of_store(store), "parallel.tensor=2"
    )
    for name in ("chunks", "aligned_labels"):
        assert [one[name] for one in joined] == [one[name] for one in live], name
    assert_same_course(joined, live, FIGURES, first=5e-6)
    # The store's own samples have the masks of their conversations too.
    own = (*given, *of_store(store), OWN)
    alone = run(pool, 1, aligned, tmp_path / "own", *own)
    for record in alone:
        assert record["chunks"] > 100
        assert 0.5 < record["aligned_labels"] <= 1
        assert min(record[name] for name in NAMES) > 0


@pytest.mark.slow
@pytest.mark.parametrize("own_samples", [False, True], ids=["joined", "own"])
def test_a_stopped_run_goes_on_with_the_same_bits(
    pool: Pool, inputs: Inputs, capture: Callable[..., Path], tmp_path: Path, own_samples: bool
) -> None:
    given = [*SHORT, TERMS, *of_store(capture())]
    if own_samples:  # two epochs, with samples held out
        given += [OWN, "train.steps=6", "validation={samples: 8, interval: 3}"]
    config = inputs.folder / "aligned.yaml"
    parts, whole = resumed(pool, 2, config, tmp_path, *given, stop_after=2)
    assert course(parts) == course(whole)
    assert all(record["chunks"] > 0 for record in whole)
    if own_samples:
        validation = records(tmp_path / "whole")[-1]["validation"]
        assert validation.keys() == {"ce_loss", "kd_loss", "topk_mass", *NAMES}


@pytest.mark.slow
def test_samples_of_the_store_are_those_of_the_stream(
    capture: Callable[..., Path], inputs: Inputs
) -> None:
    """In the order of the store they are the samples that a run with the live teacher reads."""
    from dataclasses import replace

    import numpy as np

    from megatron_distill.config import load_config
    from megatron_distill.data.sources import open_training
    from megatron_distill.data.stored import Share, read_held_out_numbers
    from megatron_distill.data.tokenizers.open import Vocabulary
    from megatron_distill.store import StoreSet
    from megatron_distill.train.assemble.alignment import read_teacher
    from megatron_distill.train.assemble.sources import (
        data_options,
        read_tokenizer,
        source_specs,
    )

    config = load_config(inputs.folder / "aligned.yaml", [])
    options = data_options(config.data, inputs.folder)
    tokenizer = read_tokenizer(config, options)
    reading = read_teacher(config, Vocabulary.of(tokenizer))
    stream = open_training(
        source_specs(config.data.sources),
        tokenizer=tokenizer,
        options=replace(options, teacher=reading),
        seed=config.seed,
    )
    stores = StoreSet.open([str(capture())])
    numbers = range(stores.samples)
    assert len(numbers) == STEPS * ROWS
    stored = read_held_out_numbers(stores, [Share(numbers, 1.0)], numbers)
    for sample in stored.samples:
        expected = stream.next_sample()
        assert sample.teacher is not None
        assert expected.teacher is not None
        for ours, other in ((sample, expected), (sample.teacher, expected.teacher)):
            for name, values in vars(other).items():
                if isinstance(values, np.ndarray):
                    np.testing.assert_array_equal(getattr(ours, name), values, err_msg=name)
    stores.close()


LIKELIHOOD = "objective.terms=[{alignment: likelihood}]"
# overrides -> what the message must hold
WRONG: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "another student's tokenizer": (
        ("data.tokenizer.path={smaller}", LIKELIHOOD),
        ("captured for a student with the tokenizer", "set data.tokenizer to that of the capture"),
    ),
    "another teacher's tokenizer": (
        ("teacher.tokenizer={path: {smaller}}", LIKELIHOOD),
        ("its tokenizer is", "Remove teacher.tokenizer to use that of the store"),
    ),
    "another length": (
        ("teacher.sequence_length=16", LIKELIHOOD),
        ("32 positions of the student and 24 of the teacher, this run's 32 and 16",),
    ),
    "no alignment": (
        (
            "objective.terms=[{top_k: 5}]", "teacher.sequence_length=null",
            "data.tokenizer.path={larger}", "data.sequence_length=24",
        ),
        ("captured for a student with a tokenizer of its own", "Set alignment of"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", quick_and_slow(WRONG, []))
def test_a_store_that_does_not_fit_is_refused(
    pool: Pool, inputs: Inputs, capture: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    overrides, parts = WRONG[case]
    store = capture()
    names = {
        "{smaller}": str(inputs.second_tokenizer(min(SECOND_SIZES))),
        "{larger}": str(inputs.second_tokenizer(max(SECOND_SIZES))),
    }
    given = list(overrides)
    for name, value in names.items():
        given = [override.replace(name, value) for override in given]
    config = inputs.folder / "aligned.yaml"
    text = failure(pool, 2, config, tmp_path, *SHORT, *of_store(store), *given)
    for part in parts:
        assert part in text, text
