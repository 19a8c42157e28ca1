"""Models of all supported families train in other layouts as on one rank, over twenty steps.

Students and teachers are folders as `transformers` writes them: windows shorter than a sample of
several documents, soft caps of scores and logits, norms after blocks, rotated parts of heads,
stretched wavelengths, learned positions, experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.hugging_face_models import MODELS, WITH_EXPERTS, save_model
from tests.distributed.pool import Pool
from tests.e2e.runs import (
    EXPERT,
    STEPS,
    VIRTUAL,
    Course,
    Inputs,
    KnownRuns,
    assert_same_course,
    layout,
    run,
)

pytestmark = pytest.mark.slow

# A student's name in MODELS, its teacher's, and changes of the student.
STUDENTS: dict[str, tuple[str, dict[str, Any]]] = {
    # Windows on the first and third layer, caps small enough to bend most scores and logits.
    "gemma2": ("gemma3", {"num_hidden_layers": 4, "attn_logit_softcapping": 1.5}),
    "gemma3": ("gemma2", {}),
    # Biases of queries, keys and values; a window on all layers but the first; a tied head.
    "qwen2, windows": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3": ("qwen2, windows", {}),
    # A window, and half of each head rotated.
    "phi3": ("qwen3", {}),
    # A dense layer, then shared experts and those of a sigmoid with a bias; half rotated.
    "glm4_moe": ("qwen3", {}),
    "llama3.1": ("qwen3", {}),
    "mistral": ("qwen3", {}),
    # Its default dropout draws other numbers in other layouts.
    "gpt2": ("qwen3", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "mixtral": ("qwen3", {}),
    "qwen2_moe": ("qwen3", {}),
    "qwen3_moe": ("qwen3", {}),
}
SHORT = ("train.global_batch_size=4",)
# Each family in each kind of layout, and some in two kinds at a time.
CASES = (
    *((student, case) for student in STUDENTS for case in ("TP2+sequence", "PP2", "CP2")),
    *((student, "EP2") for student in WITH_EXPERTS),
    ("gemma2", "TP2xPP2+sequence"),
    ("gemma2", "TP2xCP2"),
    ("gemma3", "TP2xCP2+sequence"),
    ("qwen2, windows", "TP2xPP2"),
    ("qwen3", "TP2xCP2+sequence"),
    ("phi3", "TP2xPP2+sequence"),
    ("glm4_moe", "CP2xPP2, EP2"),
    *((student, "PP2+virtual") for student in ("gemma2", "phi3", "glm4_moe")),
    *((student, "DP2") for student in ("gemma2", "gpt2", "qwen3_moe")),
)


def test_every_family_is_here() -> None:
    from megatron_distill.models.hugging_face.family import families

    assert {MODELS[student][0] for student, _ in CASES} == set(families())


def written(inputs: Inputs, name: str, label: str, **changes: Any) -> Path:
    """A folder of a model whose vocabulary is the session's tokenizer's."""
    folder = inputs.folder / f"hf {label}"
    return folder if folder.exists() else save_model(folder, name, vocab_size=301, **changes)


def configured(inputs: Inputs, student: str, *, label: str | None = None, **others: Any) -> str:
    """Write a student, its teacher and their configuration; returns the configuration's name."""
    teacher, changes = STUDENTS[student]
    label = label or student
    ours = written(inputs, student, f"{label} student", **{**changes, **others})
    theirs = written(inputs, teacher, f"{teacher} teacher")
    inputs.write(label, f"student: {{hf: '{ours}'}}\n", f"teacher: {{hf: '{theirs}'}}\n")
    return label


@pytest.fixture(scope="module")
def train(pool: Pool, inputs: Inputs) -> KnownRuns:
    """Train a named configuration; the reference of a family is trained once."""
    return KnownRuns(pool, inputs, "family", *SHORT)


@pytest.mark.parametrize(("student", "case"), CASES)
def test_twenty_steps_of_a_family_are_those_of_one_rank(
    train: KnownRuns, inputs: Inputs, student: str, case: str
) -> None:
    world, overrides = layout(case)
    more = (EXPERT,) if case.endswith("EP2") else ()
    # Each of two virtual stages of two ranks has a layer.
    deeper = {"label": f"{student} deeper", "num_hidden_layers": 4} if VIRTUAL in overrides else {}
    name = configured(inputs, student, **deeper)
    expected = train(name, 1)
    assert len(expected) == STEPS
    assert expected[0]["kd_loss"] > 0.1
    # The steps matter: a wrong gradient would be far outside of the tolerance.
    assert abs(expected[-1]["ce_loss"] / expected[0]["ce_loss"] - 1) > 0.01
    assert_same_course(train(name, world, *overrides, *more), expected)


# Four layers, so that each of two virtual stages of two ranks has one.
DEEP: dict[str, Any] = {"num_hidden_layers": 4}
DEEP_OF = {"gemma3": {"layer_types": ["sliding_attention", "full_attention"] * 2}}
# Each family in layouts above that some have, and on four ranks that mostly share two KV heads.
TWO_STEPS = [
    (student, case)
    for student in STUDENTS
    for case in ("PP2+virtual", "DP2", "TP2xPP2+sequence", "TP4+sequence")
    if not {(student, case), (student, case.removesuffix("+sequence"))} & set(CASES)
]


@pytest.fixture(scope="module")
def train_two_steps(pool: Pool, inputs: Inputs) -> KnownRuns:
    two = ("train.steps=2", "schedule.warmup_steps=1")
    return KnownRuns(pool, inputs, "two steps of a family", *SHORT, *two)


@pytest.mark.parametrize(("student", "case"), TWO_STEPS)
def test_two_steps_of_a_family_are_those_of_one_rank(
    train_two_steps: KnownRuns, inputs: Inputs, student: str, case: str
) -> None:
    world, overrides = layout(case)
    more = DEEP | DEEP_OF.get(student, {})
    name = configured(inputs, student, label=f"{student} of four layers", **more)
    expected = train_two_steps(name, 1)
    assert expected[0]["kd_loss"] > 0.1
    assert_same_course(train_two_steps(name, world, *overrides), expected)


WITHOUT: dict[str, dict[str, Any]] = {
    "windows": {"sliding_window": 64},
    "caps of scores": {"attn_logit_softcapping": None},
    "caps of logits": {"final_logit_softcapping": None},
}


@pytest.mark.parametrize("feature", WITHOUT)
def test_windows_and_caps_change_the_compared_values(
    pool: Pool, inputs: Inputs, train: KnownRuns, tmp_path: Path, feature: str
) -> None:
    given: Course = train(configured(inputs, "gemma2"), 1)
    name = configured(inputs, "gemma2", label=f"gemma2 without {feature}", **WITHOUT[feature])
    config = inputs.folder / f"{name}.yaml"
    (other,) = run(pool, 1, config, tmp_path, *SHORT, "train.steps=1", "schedule.warmup_steps=0")
    assert other["ce_loss"] != pytest.approx(given[0]["ce_loss"], rel=1e-4)
    assert other["grad_norm"] != pytest.approx(given[0]["grad_norm"], rel=1e-3)
