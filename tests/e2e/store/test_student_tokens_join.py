"""A store in the student's tokens serves plain terms beside a teacher with another tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.e2e.captures import KnownStores, write_capture
from tests.e2e.runs import (
    SECOND_SIZES,
    STUDENT,
    Course,
    Inputs,
    KnownRuns,
    assert_same_course,
    course,
    failure,
    layout,
    one_of_several,
    resumed,
)
from tests.e2e.store.test_document_join import LENGTH, OF_TEACHER, write_whole_samples
from tests.e2e.teachers.roles import apart

STEPS, K = 3, 12
TERMS = (
    f"{{divergence: forward_kl, top_k: {K}}}",
    "{alignment: likelihood, divergence: js_divergence, temperature: 6.0}",
    "{divergence: reverse_kl, weight: 0.5, top_k: 8, teacher: base}",
    "{alignment: common, weight: 0.5, top_k: 8, teacher: far}",
)
FIGURES = (
    "total_loss", "ce_loss", "kd_loss", "grad_norm", "forward_kl_top12",
    "likelihood_js_divergence_t6", "reverse_kl_top8_base", "common_forward_kl_top8_far",
)  # fmt: skip
Train = Callable[..., Course]


@pytest.fixture(scope="module")
def corpus(inputs: Inputs) -> Path:
    return write_whole_samples(inputs)


@pytest.fixture(scope="module")
def config(inputs: Inputs, corpus: Path) -> Path:
    """Two live teachers; `base` is the first of them, with the weights of a capture."""
    tokenizer = inputs.second_tokenizer(max(SECOND_SIZES))
    own = f"    sequence_length: {OF_TEACHER}\n    tokenizer: {{path: {tokenizer}}}\n"
    teachers = f"teachers:\n{one_of_several('base')}{one_of_several('far', width=48)}{own}"
    return inputs.write(
        "student_tokens", STUDENT, teachers, steps=STEPS,
        terms="\n".join(f"    - {term}" for term in TERMS),
        changes={
            "objective:\n": "objective:\n  routing_weights: {base: 2, far: 1}\n",
            str(inputs.corpus): str(corpus),
        },
    )  # fmt: skip


GIVEN = (
    "schedule.warmup_steps=1", "data.validation_fraction=0", f"data.sequence_length={LENGTH}",
)  # fmt: skip


@pytest.fixture(scope="module")
def train(pool: Pool, inputs: Inputs, config: Path) -> Train:
    return partial(KnownRuns(pool, inputs, "student-tokens", *GIVEN), config.stem)


@pytest.fixture(scope="module")
def capture(pool: Pool, inputs: Inputs, corpus: Path) -> Callable[..., Path]:
    """Stores of several epochs in the student's tokens, cut at other places in each."""
    return KnownStores(
        pool, inputs, "store-student-tokens", write_capture(inputs, "student-tokens", samples=40),
        f"data.sources=[{{format: jsonl, paths: {corpus}}}]", "data.sequence_length=384",
        "data.validation_fraction=0", "data.shuffle_samples=20",
    )  # fmt: skip


def of_store(store: Path) -> tuple[str, ...]:
    return "teachers.base.architecture=null", f"teachers.base.store={store}"


CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "one rank": ("one rank", ()),
    "DP2": ("DP2", ()),
    "TP2xPP2": ("TP2xPP2", ()),
    "CP2, one sample at a time": ("CP2", ("train.micro_batch_size=1",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_where_contexts_are_the_same_losses_are_those_of_the_live_teacher(
    train: Train, capture: Callable[..., Path], case: str
) -> None:
    name, given = CASES[case]
    world, overrides = layout(name)
    stored = of_store(capture())
    found, live = train(world, *given, *stored, *overrides), train(1, *given)
    assert_same_course(found, live, FIGURES, first=5e-6)
    assert_same_course(found, train(1, *given, *stored), FIGURES, first=1e-6)
    assert min(found[0][name] for name in FIGURES) > 1e-3
    for name in ("chunks", "aligned_labels", "tokens"):
        assert [record[name] for record in found] == [record[name] for record in live], name


@pytest.mark.slow
def test_both_teachers_are_stores_and_a_stopped_run_goes_on_with_the_same_bits(
    pool: Pool, config: Path, train: Train, capture: Callable[..., Path], tmp_path: Path
) -> None:
    """The second store is one of the other teacher alone, with other weights than the live one."""
    far = capture(
        f"data.tokenizer.path={tokenizer_of(config)}", f"store.k={OF_TEACHER}", "seed=8",
    )  # fmt: skip
    stores = (
        *of_store(capture()), "teachers.far.architecture=null", "teachers.far.tokenizer=null",
        f"teachers.far.store={far}",
    )  # fmt: skip
    parts, whole = resumed(pool, 2, config, tmp_path, *GIVEN, *stores, stop_after=1)
    assert course(parts) == course(whole)
    live = train(1)
    for ours, other in zip(whole, live, strict=True):
        for name in ("chunks", "aligned_labels", "tokens"):
            assert ours[name] == other[name]
    for name in ("forward_kl_top12", "reverse_kl_top8_base"):
        assert whole[0][name] == pytest.approx(live[0][name], rel=5e-6)


def tokenizer_of(config: Path) -> str:
    return config.read_text().partition("tokenizer: {path: ")[2].partition("}")[0]


@pytest.mark.slow
def test_labels_without_a_record_are_in_no_plain_term(
    train: Train, capture: Callable[..., Path]
) -> None:
    part = (*of_store(capture("store.samples=2")), "data.max_unaligned=1")
    found, whole = train(1, *part), train(1, *of_store(capture()))
    for ours, other in zip(found, whole, strict=True):
        own, all_labels = (one["teachers"]["base"]["kd_tokens"] for one in (ours, other))
        assert 0 < own < 0.8 * all_labels
        assert ours["teachers"]["far"]["chunks"] == other["teachers"]["far"]["chunks"]
    for world, overrides in map(layout, ("DP2", "TP2xPP2")):
        assert_same_course(train(world, *part, *overrides), found, FIGURES, first=1e-6)


@pytest.mark.slow
def test_drawn_ids_serve_a_forward_kl(train: Train, capture: Callable[..., Path]) -> None:
    terms = (
        "objective.terms=[{teacher: base}, {alignment: likelihood, teacher: far}]",
        "objective.routing_weights=null",
    )
    drawn = of_store(capture("store.mode=sampled", "store.k=200", "store.temperatures=[]"))
    exact = of_store(capture("store.k=301"))
    found, whole = train(2, *terms, *drawn), train(1, *terms, *exact)
    for ours, other in zip(found, whole, strict=True):
        # Draws give the cross-entropy of the student under the teacher: KL and entropy.
        own, kl = (one["teachers"]["base"] for one in (ours, other))
        assert own["kd_tokens"] == kl["kd_tokens"]
        entropy = own["kd_loss"] - kl["kd_loss"]
        assert entropy == pytest.approx(other["teacher_entropy"], rel=0.05)


@pytest.mark.slow
def test_live_teachers_have_ranks_of_their_own(
    pool: Pool, config: Path, train: Train, capture: Callable[..., Path], tmp_path: Path
) -> None:
    """Their ranks read the samples without the store, and labels that it lacks."""
    given = (
        *of_store(capture("store.samples=2")), "data.max_unaligned=1",
        "teachers.law={architecture: {num_layers: 1, hidden_size: 48, ffn_hidden_size: 64, "
        "num_attention_heads: 4, norm: rmsnorm, activation: swiglu, positions: rope}}",
        "objective.routing_weights={base: 2, far: 1, law: 2}",
    )  # fmt: skip
    ranks = ("teachers.far.ranks=1", "teachers.law.ranks=1")
    found = apart(pool, 3, config, tmp_path / "run", *GIVEN, *given, *ranks)
    assert course(found) == course(train(1, *given))


@pytest.mark.slow
def test_a_store_that_does_not_fit_is_refused(
    pool: Pool, inputs: Inputs, config: Path, capture: Callable[..., Path], tmp_path: Path
) -> None:
    unlisted = shutil.copytree(capture(), tmp_path / "unlisted")
    for path in (unlisted / "shards").glob("documents-*"):
        path.unlink()
    source = f"{{format: jsonl, paths: {inputs.corpus}}}"
    chat = f"{{format: jsonl, paths: {inputs.corpus}, conversation: {{}}}}"
    cases = (
        ((*of_store(unlisted),), "has no lists of documents, by which samples that are packed"),
        ((*of_store(unlisted),), "or set teachers.base.hf in place of its store"),
        ((*of_store(capture()), f"data.sources=[{source}]"), "teachers.base.store does not have 2"),
        ((*of_store(capture()), f"data.sources=[{chat}]"), "conversation is set. Remove this"),
    )
    for overrides, expected in cases:
        text = failure(pool, 1, config, tmp_path / "run", *GIVEN, *overrides)
        assert expected in text, text
