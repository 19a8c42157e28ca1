"""Rules on several teachers: names, routing, and what cannot be combined with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.config import aligned_role, check_layout
from tests.support.sample_configs import ARCHITECTURE, MINIMAL, TAUGHT, complaints, load_tree

SEVERAL = MINIMAL | {
    "teachers": {"math": {"architecture": ARCHITECTURE}, "code": {"architecture": ARCHITECTURE}}
}
TO_MATH = "data.sources.0.teacher=math"
DRAWN = "objective.routing_weights={math: 1, code: 3}"
MIXED = "objective.terms=[{teachers: {math: 1, code: 2}}]"
NAMED = "objective.terms=[{teacher: math}, {teacher: code}]"


@pytest.mark.parametrize(
    "overrides",
    [
        (DRAWN,),
        (MIXED,),
        (NAMED,),
        (TO_MATH, "objective.terms=[{}, {teachers: [math, code], mixture: lowest_loss}]"),
        (
            "objective.terms=[{teachers: [math, code], score: entropy}, {teachers: [math, code]}, "
            "{teachers: [math, code], score: entropy, score_alpha: 2, mixture: geometric}]",
        ),
        ("data.sources=[{format: jsonl, paths: x, teacher_field: domain}]",),
    ],
)
def test_several_teachers_load(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = load_tree(tmp_path, SEVERAL, *overrides)
    check_layout(config, 1)
    assert set(config.models) == {"student", "teachers.math", "teachers.code"}
    assert len(config.objective.terms) >= 1


REFUSED = {
    "teachers.math.hf": ("teacher={hf: x}", DRAWN, "both given"),
    "no routing": ("seed=1", "data.sources.0: objective.terms.0 names no teacher"),
    "unknown source": ("data.sources.0.teacher=law", "'law' is none of the teachers"),
    "unknown term": ("objective.terms=[{teacher: law}]", "objective.terms.0.teacher: 'law'"),
    "unknown weight": ("objective.routing_weights={math: 1, law: 1}", "'law' is none"),
    "negative": ("objective.terms=[{teachers: {math: 2, code: -1}}]", "must be 0 or more"),
    "two": ("objective.terms=[{teacher: math, teachers: {code: 1}}]", "set only one of the two"),
    "unequal": (
        "objective.terms=[{teachers: {math: 2, code: 1}, mixture: lowest_loss}]",
        "no weight is used",
    ),
    "score of a choice": (
        "objective.terms=[{teachers: [math, code], mixture: lowest_loss, score: entropy}]",
        "one teacher is chosen and no weight is used; remove objective.terms.0.score",
    ),
    "same scores": (
        "objective.terms=[{teachers: [math, code], score: entropy}, "
        "{weight: 2, teachers: [math, code], score: entropy}]",
        "objective.terms.1 differs from objective.terms.0 in its weight at most",
    ),
    "no alpha": (
        "objective.terms=[{teachers: [math, code], score: entropy, score_alpha: 0}]",
        "score_alpha",
    ),
    "unused": (TO_MATH, "teachers.code: no term, source or routing weight uses this teacher"),
    "field of text": ("data.sources.0.teacher_field=domain", "has no rows with fields"),
    "features": (DRAWN, "objective.features=[{match: last}]", "those of one teacher"),
    "own heads": (
        DRAWN,
        "teachers.math.parallel={tensor: 3}",
        "teachers.math.parallel.tensor = 3: does not divide teachers.math.architecture",
    ),
    "own length": (
        DRAWN,
        "teachers.code.parallel={context: 2}",
        "data.sequence_length=30",
        "with teachers.code.parallel.context = 2",
    ),
    "virtual stages": (
        DRAWN,
        "teachers.math.parallel.virtual_pipeline=2",
        "teachers.math.parallel.virtual_pipeline = 2: a teacher runs forward only",
    ),
    "own layout at rest": (
        DRAWN,
        "teachers.math.parallel={tensor: 1}",
        "teachers.math.offload=true",
        "keeps its weights on the GPU",
    ),
    "no terms": ("objective.terms=[]", "serve distillation terms only"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_named(tmp_path: Path, case: str) -> None:
    *overrides, expected = REFUSED[case]
    assert any(expected in text for text in complaints(load_tree, tmp_path, SEVERAL, *overrides))


def test_a_misspelt_name_is_reported_alone(tmp_path: Path) -> None:
    typo = "objective.terms=[{teachers: {maths: 1, code: 2}}]"
    (found,) = complaints(load_tree, tmp_path, SEVERAL, typo)
    assert found.startswith("objective.terms.0.teachers: 'maths' is none of the teachers"), found


TWO_TOKENIZERS = "teachers.code.sequence_length=32"
ALIGNED = "objective.terms=[{teacher: math}, {alignment: uld, teacher: code}]"


@pytest.mark.parametrize(
    "overrides",
    [
        (ALIGNED,),
        (TWO_TOKENIZERS, DRAWN, "objective.terms=[{}, {alignment: uld}]"),
        (DRAWN, "objective.terms=[{}, {alignment: uld}, {alignment: common, teacher: code}]"),
        (TO_MATH, "objective.terms=[{}, {alignment: uld, teachers: {code: 2}}]"),
        (ALIGNED, "teachers.math.parallel={tensor: 1}", "teachers.code.parallel={tensor: 1}"),
    ],
)
def test_one_of_several_has_a_tokenizer_of_its_own(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    config = load_tree(tmp_path, SEVERAL, *overrides)
    check_layout(config, 1)
    assert aligned_role(config) == "teachers.code"


UNALIGNED = {
    "mean": (
        "objective.terms=[{}, {alignment: uld, teachers: {math: 1, code: 1}}]", TO_MATH,
        "a mean or choice of teachers is defined within one vocabulary",
    ),
    "scores of two vocabularies": (
        "objective.terms=[{}, {alignment: uld, teachers: [math, code], score: entropy}]", TO_MATH,
        "a mean or choice of teachers is defined within one vocabulary",
    ),
    "mean of two vocabularies": (
        "objective.terms=[{teachers: {math: 1, code: 1}}, {alignment: uld, teacher: code}]",
        "code has another tokenizer than the student",
    ),
    "two of them": (
        "objective.terms=[{alignment: uld, teacher: math}, {alignment: uld, teacher: code}]",
        "teachers.code, teachers.math: have tokenizers of their own",
    ),
    "two of them on their own ranks": (
        "objective.terms=[{alignment: uld, teacher: math}, {alignment: uld, teacher: code}]",
        "teachers.math.ranks=1", "teachers.code.ranks=1",
        "samples are aligned with one of them; give one of them a run of its own, under teacher",
    ),
    "unaligned term": (
        "objective.terms=[{teacher: code}, {alignment: uld, teacher: code}, {teacher: math}]",
        "objective.terms.0.alignment = null: teacher 'code' has a tokenizer of its own",
    ),
    "no such teacher": (
        DRAWN, "objective.terms=[{}, {alignment: uld}]", "no teacher has a tokenizer of its own",
    ),
    "no aligned term": (NAMED, TWO_TOKENIZERS, "teachers.code.sequence_length is set, but no term"),
    "samples of no aligned term": (
        DRAWN, "objective.terms=[{}, {alignment: uld, teacher: code}]",
        "objective.routing_weights: gives samples to teacher 'code'",
    ),
    "samples of no plain term": (
        TO_MATH, TWO_TOKENIZERS, "objective.terms=[{teacher: math}, {alignment: uld}]",
        "data.sources.0.teacher: gives samples to teacher 'math'",
    ),
    "tokens of one tokenizer": (
        ALIGNED, "data.sources=[{format: megatron, paths: x}]", "its tokens are of one tokenizer",
    ),
    "store": (
        ALIGNED, "teachers.code={store: x, sequence_length: 32}",
        "objective.terms.1.alignment = 'uld': needs whole distributions, and teachers.code.store",
    ),
    "length in its own layout": (
        ALIGNED, "teachers.code={sequence_length: 30, parallel: {context: 2}}",
        "teachers.code.sequence_length = 30: with teachers.code.parallel.context = 2",
    ),
    "length": (
        ALIGNED, "teachers.code.sequence_length=31", "parallel.context=2",
        "teachers.code.sequence_length = 31",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNALIGNED)
def test_terms_that_do_not_fit_the_tokenizers_are_refused(tmp_path: Path, case: str) -> None:
    *overrides, expected = UNALIGNED[case]
    found = complaints(load_tree, tmp_path, SEVERAL, *overrides)
    assert any(expected in text for text in found), found


STORE = "teachers.math={store: x}"
SCHEDULED = "objective.balance.mode=schedule"
BOTH = (STORE, "teachers.code={store: y}")


@pytest.mark.parametrize(
    "overrides",
    [
        (DRAWN, STORE),
        (DRAWN, *BOTH),
        (MIXED, STORE),
        (STORE, "objective.terms=[{teachers: {math: 1, code: 2}, mixture: geometric, "
         "support: renormalized}]"),
        (*BOTH, "objective.terms=[{teachers: [math, code], mixture: lowest_loss, top_k: 4}]"),
        (STORE, "objective.terms=[{teachers: {math: 1, code: 2}, score: cross_entropy}]"),
        (STORE, "objective.terms=[{alignment: common, top_k: 4, teacher: math}, {teacher: code}]"),
        (STORE, "objective.terms=[{teacher: math}, {alignment: uld, teacher: code}]"),
        # The schedule is of the terms of code, which is no store.
        (DRAWN, STORE, SCHEDULED, "teachers.math.sequence_length=32",
         "objective.terms=[{alignment: likelihood}, {temperature_schedule: {to: 2, steps: 3}}]"),
    ],
)  # fmt: skip
def test_stores_among_several_teachers_load(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = load_tree(tmp_path, SEVERAL, *overrides)
    check_layout(config, 1)
    assert config.teachers["math"].store is not None
    # A support of recorded ids stays as it is given.
    assert config.objective.terms[0].support in ("tail", "renormalized")
    assert ("renormalized" in str(overrides)) == (
        config.objective.terms[0].support == "renormalized"
    )


REFUSED_STORES = {
    "entries": (DRAWN, "teachers.math={store: [x, y]}", "teachers.math.store has 2 entries"),
    "two in a mean": (MIXED, *BOTH, "none has probabilities of another's ids"),
    "the same gradient": (MIXED, *BOTH, "own with the same gradient"),
    "geometric": (
        STORE, "objective.terms=[{teachers: {math: 1, code: 2}, mixture: geometric}]",
        "set objective.terms.0.support=renormalized",
    ),
    "lowest of all": (
        STORE, "objective.terms=[{teachers: [math, code], mixture: lowest_loss}]",
        "set objective.terms.0.top_k for all of them",
    ),
    "score of all ids": (
        STORE, "objective.terms=[{teachers: [math, code], score: top_probability}]",
        "Set score to cross_entropy or entropy",
    ),
    "field": (
        STORE, "data.sources=[{format: jsonl, paths: x, teacher_field: domain}]",
        "packs each teacher's rows apart",
    ),
    "a tokenizer of its own": (
        "objective.terms=[{alignment: common, teacher: math}, {teacher: code}]", STORE,
        "objective.terms.0.top_k = null: compares all common tokens, and teachers.math.store has",
    ),
    "scheduled": (
        DRAWN, STORE, SCHEDULED, "objective.terms=[{temperature_schedule: {to: 2, steps: 3}}]",
        "a store has the temperatures of its capture only",
    ),
    "scheduled mean": (
        STORE, SCHEDULED,
        "objective.terms=[{teachers: {math: 1, code: 2}, support: renormalized, "
        "temperature_schedule: {to: 2, steps: 3}}]",
        "an arithmetic mean needs probabilities",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_STORES)
def test_terms_that_stores_cannot_serve_are_named(tmp_path: Path, case: str) -> None:
    *overrides, expected = REFUSED_STORES[case]
    found = complaints(load_tree, tmp_path, SEVERAL, *overrides)
    assert any(expected in text for text in found)
    assert sum("tokenizer" in text for text in found) <= 1  # one reason for one store


def test_a_term_without_teachers_cannot_name_one(tmp_path: Path) -> None:
    (text,) = complaints(load_tree, tmp_path, TAUGHT, "objective.terms=[{teacher: math}]")
    assert "there is no teacher of that name" in text


def test_teachers_are_declined_as_a_teacher_is(tmp_path: Path) -> None:
    config = load_tree(tmp_path, SEVERAL, NAMED, "teachers=null")
    assert config.objective.terms == ()
    assert not config.has_teacher


def test_an_unknown_key_of_a_teacher_is_found(tmp_path: Path) -> None:
    problems = complaints(load_tree, tmp_path, SEVERAL, DRAWN, "teachers.math.ofload=true")
    assert problems == ["teachers.math.ofload: unknown key; did you mean teachers.math.offload?"]
