"""Stores among several teachers: routed, mixed and chosen, in every layout, and resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.e2e.captures import run_in, write_capture
from tests.e2e.runs import (
    QUANTITIES,
    SAVE,
    STUDENT,
    Course,
    Inputs,
    KnownRuns,
    course,
    failure,
    layout,
    one_of_several,
    quick_and_slow,
    run,
    step_records,
)
from tests.e2e.teachers.roles import apart

STEPS, ROWS, K = 6, 8, 12
TERMS = f"""\
    - {{divergence: forward_kl, top_k: {K}}}
    - {{divergence: reverse_kl, weight: 0.3, top_k: 5}}
    - {{divergence: js_divergence, weight: 0.3, top_k: 6, support: renormalized}}"""
NAMED = (
    "objective.terms=[{divergence: forward_kl, top_k: 12}, "
    "{divergence: reverse_kl, top_k: 4, teacher: code}]"
)
# Live means and choices have all ids, or the top-k of the chosen teacher.
MIXED = (
    "objective.terms=[{divergence: forward_kl, teachers: {code: 0.7, law: 0.3}}, "
    "{divergence: reverse_kl, weight: 0.3, temperature: 2.0, teachers: {code: 1, law: 3}}, "
    "{divergence: js_divergence, weight: 0.3, top_k: 4, teachers: [code, law], "
    "mixture: lowest_loss}]"
)
DRAWN = ("objective.routing_weights={code: 2, law: 1}", "data.sources.0.teacher=null",
         "data.sources.1.teacher=null")  # fmt: skip
NAMES = ("total_loss", *QUANTITIES)


@pytest.fixture(scope="module")
def config(inputs: Inputs) -> Path:
    """Two live teachers, each of one source; the first has the weights of a capture."""
    lines = inputs.corpus.read_text().splitlines(keepends=True)
    (inputs.folder / "second.jsonl").write_text("".join(lines[1::2]))
    only = f"    - {{format: jsonl, paths: {inputs.corpus}}}\n"
    both = (
        f"    - {{format: jsonl, paths: {inputs.corpus}, teacher: code, weight: 2}}\n"
        f"    - {{format: jsonl, paths: {inputs.folder / 'second.jsonl'}, teacher: law}}\n"
    )
    teachers = f"teachers:\n{one_of_several('code')}{one_of_several('law')}"
    return inputs.write(
        "stores_among", STUDENT, teachers, steps=STEPS, terms=TERMS, changes={only: both}
    )


@pytest.fixture(scope="module")
def capture(pool: Pool, inputs: Inputs) -> Callable[..., str]:
    """Capture `code` on both sources, or on the first alone; returns the override of its store."""
    known: dict[tuple[bool, tuple[str, ...]], str] = {}
    written = write_capture(inputs, "among", samples=STEPS * ROWS)
    first = f"{{format: jsonl, paths: {inputs.corpus}, weight: 2}}"
    second = f"{{format: jsonl, paths: {inputs.folder / 'second.jsonl'}}}"

    def captured(*overrides: str, whole: bool = True) -> str:
        key = (whole, overrides)
        if key not in known:
            sources = f"data.sources=[{first}{f', {second}' if whole else ''}]"
            folder = inputs.folder / f"among-store-{len(known)}"
            assert run_in(pool, 1, written, folder, sources, *overrides) is True
            known[key] = f"teachers.code={{store: {folder}}}"
        return known[key]

    return captured


@pytest.fixture(scope="module")
def train(pool: Pool, inputs: Inputs, config: Path) -> Callable[..., Course]:
    return partial(KnownRuns(pool, inputs, "among"), config.stem)


def assert_same(found: Course, expected: Course, *, first: float, last: float) -> None:
    assert len(found) == len(expected) == STEPS
    for ours, other in zip(found, expected, strict=True):
        tolerance = first if ours["step"] == 1 else last
        for name in NAMES:
            assert ours[name] == pytest.approx(other[name], rel=tolerance), (ours["step"], name)
        for name, figures in ours["teachers"].items():
            wanted = {key: other["teachers"][name][key] for key in figures}
            assert figures == pytest.approx(wanted, rel=10 * tolerance), name


ROUTES: dict[str, tuple[bool, tuple[str, ...]]] = {
    "by source": (True, ()),
    "store of the source": (False, ()),
    "drawn": (True, DRAWN),
    "one sample at a time": (False, ("train.micro_batch_size=1",)),
}


@pytest.mark.parametrize("route", quick_and_slow(ROUTES, ("store of the source",)))
def test_a_routed_store_is_the_live_teacher(
    train: Callable[..., Course], capture: Callable[..., str], route: str
) -> None:
    whole, overrides = ROUTES[route]
    live = train(1, *overrides)
    stored = train(1, *overrides, capture(whole=whole))
    for ours, other in zip(stored, live, strict=True):
        # A store of a source's samples alone was captured in batches of other samples, for which
        # some processors sum in another order.
        expected = (lambda one: one) if whole else partial(pytest.approx, rel=1e-6)
        for name in NAMES:
            assert ours[name] == expected(other[name]), (ours["step"], name)
        assert ours["teachers"].keys() == other["teachers"].keys()
        for teacher, figures in other["teachers"].items():
            assert ours["teachers"][teacher] == expected(figures), (ours["step"], teacher)
        for name in ("teacher_ce_loss", "teacher_entropy", "student_entropy"):
            assert ours[name] == pytest.approx(other[name], rel=1e-6)


@pytest.mark.slow
def test_a_term_takes_a_store_on_every_sample(
    train: Callable[..., Course], capture: Callable[..., str]
) -> None:
    found, live = train(1, NAMED, capture()), train(1, NAMED)
    assert_same(found, live, first=1e-6, last=1e-5)
    for ours, other in zip(found, live, strict=True):
        # Of the teacher of each sample, though the store is read for all of them.
        for name in ("teacher_ce_loss", "teacher_entropy"):
            assert ours[name] == pytest.approx(other[name], rel=1e-5)


@pytest.mark.slow
def test_drawn_ids_are_one_of_several(
    train: Callable[..., Course], capture: Callable[..., str]
) -> None:
    term = "objective.terms=[{divergence: forward_kl}]"
    drawn = capture("store.mode=sampled", "store.k=200", "store.temperatures=[]")
    found, live = train(1, term, drawn), train(1, term)
    for ours, other in zip(found, live, strict=True):
        code, law = ours["teachers"]["code"], ours["teachers"]["law"]
        assert "top1_agreement" not in {*code, *ours}
        assert law["kd_loss"] == pytest.approx(other["teachers"]["law"]["kd_loss"], rel=1e-2)
        # Draws give the cross-entropy of the student under the teacher: KL and entropy.
        entropy = code["kd_loss"] - other["teachers"]["code"]["kd_loss"]
        assert entropy == pytest.approx(4.9, abs=0.3)


@pytest.mark.slow
def test_a_mean_and_a_choice_with_a_store_of_all_ids_are_the_live_ones(
    train: Callable[..., Course], capture: Callable[..., str]
) -> None:
    live = train(1, MIXED)
    stored = train(1, MIXED, capture("store.k=301"))
    assert_same(stored, live, first=1e-5, last=1e-4)
    assert stored[0]["teachers"].keys() == {"code", "law", "code+law"}


MEAN = f"objective.terms=[{{divergence: forward_kl, top_k: {K}}}, {{divergence: reverse_kl, \
top_k: 5, temperature: 2.0, teachers: {{code: 0.7, law: 0.3}}}}]"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["TP2+sequence", "DP2", "PP2", "CP2"])
def test_the_layout_changes_nothing(
    train: Callable[..., Course], capture: Callable[..., str], case: str
) -> None:
    world, overrides = layout(case)
    common = (MEAN, capture(), "validation.samples=4", f"validation.interval={STEPS}")
    expected = train(1, *common)
    assert_same(train(world, *common, *overrides), expected, first=1e-6, last=1e-4)


@pytest.mark.slow
def test_a_resumed_run_reads_the_records_that_follow(
    pool: Pool, config: Path, capture: Callable[..., str], tmp_path: Path
) -> None:
    store = capture(whole=False)
    expected = course(run(pool, 1, config, tmp_path / "whole", SAVE, store))
    for name, before in (("stored", (store,)), ("live", ())):
        run(pool, 1, config, tmp_path / name, SAVE, *before, stop_after=3)
        run(pool, 1, config, tmp_path / name, SAVE, store)
        found = course(step_records(tmp_path / name))
        if name == "stored":
            assert found == expected
        # A live teacher answers batches of other sizes than the store's capture did, whose
        # products some processors sum in another order.
        for ours, other in zip(found, expected, strict=True):
            assert ours == pytest.approx(other, rel=1e-6)


SCORED = (
    "objective.terms=[{divergence: forward_kl, top_k: 12, teachers: {code: 0.5, law: 0.3, "
    "math: 0.2}, score: cross_entropy, score_alpha: 2}, {divergence: reverse_kl, weight: 0.3, "
    "top_k: 5, support: renormalized, teachers: [code, law], mixture: geometric, score: entropy}, "
    "{divergence: js_divergence, weight: 0.2, temperature: 2.0, teachers: [law, math], "
    "score: top_probability, score_alpha: 4}]",
    "teachers.math.architecture={num_layers: 1, hidden_size: 48, ffn_hidden_size: 64, "
    "num_attention_heads: 4, norm: rmsnorm, activation: swiglu, positions: rope, init_std: 0.2}",
    "train.steps=2",
    "schedule.warmup_steps=1",
)


@pytest.mark.slow
def test_scored_teachers_on_their_own_ranks_and_a_store_resume_the_course_of_shared_ranks(
    pool: Pool,
    config: Path,
    train: Callable[..., Course],
    capture: Callable[..., str],
    tmp_path: Path,
) -> None:
    given = (*SCORED, capture())
    expected = train(1, *given)
    for ranks in ("law", "math"):
        given = (*given, f"teachers.{ranks}.ranks=1")
    apart(pool, 3, config, tmp_path, SAVE, *given, stop_after=1)
    found = apart(pool, 3, config, tmp_path, SAVE, *given)
    assert course(found) == course(expected)
    for ours, other in zip(found, expected, strict=True):
        assert ours["teachers"] == other["teachers"]
        weights = {name: mean["weight_law"] for name, mean in ours["teachers"].items()}
        assert weights.keys() == {"code+law+math", "code+law", "law+math"}
        fixed = {"code+law+math": 0.3, "code+law": 0.5, "law+math": 0.5}
        assert all(abs(weights[name] - share) > 1e-3 for name, share in fixed.items())


def refusals(store: Callable[..., str]) -> Sequence[tuple[str, tuple[str, ...]]]:
    return (
        ("train.steps = 60", (store(), "train.steps=60")),
        ("reads 320", (store(whole=False), "train.steps=60")),
        (
            "has the samples of data.sources.0 alone, and objective.terms.1 takes teachers.code",
            (store(whole=False), NAMED),
        ),
        (
            "alone, and data.sources.1.teacher names teachers.code as well",
            (store(whole=False), "data.sources.1.teacher=code", "objective.routing_weights=null",
             "objective.terms=[{top_k: 12}, {divergence: reverse_kl, teacher: law}]"),
        ),
        ("nor those of one of its sources", (store(), "data.sources.0.weight=5")),
    )  # fmt: skip


@pytest.mark.slow
def test_a_store_of_other_samples_or_terms_is_refused_by_name(
    pool: Pool, config: Path, capture: Callable[..., str], tmp_path: Path
) -> None:
    for expected, overrides in refusals(capture):
        text = failure(pool, 1, config, tmp_path / "run", *overrides)
        assert expected in text, text


@pytest.mark.slow
def test_a_live_teacher_beside_a_store_has_ranks_of_its_own(
    pool: Pool,
    config: Path,
    train: Callable[..., Course],
    capture: Callable[..., str],
    tmp_path: Path,
) -> None:
    store = capture(whole=False)
    found = apart(pool, 2, config, tmp_path / "run", store, "teachers.law.ranks=1")
    assert course(found) == course(train(1, store))
