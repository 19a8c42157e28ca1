"""Layout changes nothing: losses and gradient norms per step are those of a single rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.e2e.runs import (
    CONTEXT,
    EXPERT,
    FOUR,
    MEANS_NAMES,
    MEANS_TERMS,
    PIPELINE,
    SECOND_SIZES,
    SEQUENCE,
    TENSOR,
    VIRTUAL,
    Inputs,
    KnownRuns,
    quick_and_slow,
    run,
)

FIRST = 1e-6
LAST = 1e-4
QUANTITIES = ("ce_loss", "kd_loss", "grad_norm")
SHORT = "train.steps=8"

Course = list[dict[str, Any]]
Runner = Callable[..., Course]


@pytest.fixture(scope="module")
def weights(pool: Pool, inputs: Inputs) -> Callable[[str], str]:
    """An override that starts a run of a configuration from one checkpoint."""

    @cache
    def made(name: str) -> str:
        folder = inputs.folder / f"initial-{name}"
        run(
            pool, 1, inputs.folder / f"{name}.yaml", folder,
            "train.steps=2", "schedule.warmup_steps=1", "checkpoint.save=true",
        )  # fmt: skip
        return f"student.checkpoint={folder}"

    return made


@pytest.fixture(scope="module")
def train(pool: Pool, inputs: Inputs, weights: Callable[[str], str]) -> Runner:
    """Train a named configuration from its initial checkpoint."""
    runs = KnownRuns(pool, inputs, "run")
    return lambda name, world, *overrides: runs(name, world, weights(name), *overrides)


def assert_same_course(
    found: Course, expected: Course, quantities: Sequence[str] = QUANTITIES
) -> None:
    """Compare every step, the first one to rounding and the last one to what Adam makes of it."""
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    for ours, other in zip(found, expected, strict=True):
        tolerance = FIRST if ours["step"] == 1 else LAST
        for name in quantities:
            assert ours[name] == pytest.approx(other[name], rel=tolerance), (ours["step"], name)


LAYOUTS: dict[str, tuple[str, int, Sequence[str]]] = {
    "TP2+sequence": ("dense", 2, (TENSOR, SEQUENCE)),
    "PP2": ("dense", 2, (PIPELINE,)),
    "PP2+virtual": ("dense", 2, (PIPELINE, VIRTUAL)),
    "DP2": ("dense", 2, ()),
    "CP2": ("dense", 2, (CONTEXT,)),
    "TP2xPP2": ("dense", 4, (TENSOR, PIPELINE)),
    "TP4 on 2 KV heads": ("dense", 4, (FOUR,)),
    "EP2": ("moe", 2, (EXPERT,)),
    "no accumulation": ("dense", 1, ("train.micro_batch_size=8",)),
}


QUICK_LAYOUTS = ("TP2+sequence",)


@pytest.mark.parametrize("layout", quick_and_slow(LAYOUTS, QUICK_LAYOUTS))
def test_twenty_steps_are_those_of_one_rank(train: Runner, layout: str) -> None:
    name, world, overrides = LAYOUTS[layout]
    expected = train(name, 1)
    assert len(expected) == 20
    assert_same_course(train(name, world, *overrides), expected)


@pytest.mark.slow
def test_the_course_is_one_that_a_wrong_gradient_would_leave(train: Runner) -> None:
    # The tolerances above mean something only where the losses move by much more.
    course = train("dense", 1)
    halved = train("dense", 1, "objective.terms.0.weight=0.5")
    assert course[0]["kd_loss"] > 0.5
    assert abs(halved[-1]["ce_loss"] - course[-1]["ce_loss"]) > 20 * LAST * course[-1]["ce_loss"]


TERMS = """objective.terms=[
    {divergence: js_divergence, weight: 0.5, temperature: 2.0, scale_by_temperature_squared: true},
    {divergence: skewed_reverse_kl, skew_lambda: 0.3},
    {divergence: adaptive_kl, weight: 0.2},
    {divergence: forward_kl, top_k: 16, temperature: 2.0},
    {divergence: reverse_kl, top_k: 8, support: renormalized, weight: 0.1},
    {divergence: total_variation, top_k: 8, support: raw, weight: 0.1}]"""

# The changes that one rank makes as well, and those of the layout.
COMBINATIONS: dict[str, tuple[str, int, Sequence[str], Sequence[str]]] = {
    "overlapped parameter gather": ("dense", 2, (), ("optimizer.overlap_param_gather=true",)),
    "overlapped parameter gather, virtual": (
        "dense", 4, (), ("optimizer.overlap_param_gather=true", PIPELINE, VIRTUAL),
    ),
    "whole optimizer on every rank": ("dense", 2, (), ("optimizer.distributed=false",)),
    "recompute attention": ("dense", 1, (), ("train.recompute=selective",)),
    "recompute layers": ("dense", 2, (), ("train.recompute=full", TENSOR, SEQUENCE)),
    "teacher padded otherwise": (
        "dense", 2, (), (TENSOR, "teacher.architecture.vocab_divisible_by=8"),
    ),
    "documents see each other": ("dense", 2, ("data.isolate_documents=false",), (CONTEXT,)),
    "six terms CP2": ("dense", 2, (TERMS,), (CONTEXT, "train.micro_batch_size=4")),
    "six terms TP2xPP2": ("dense", 4, (TERMS,), (TENSOR, SEQUENCE, PIPELINE)),
    "CP2xTP2": ("dense", 4, (), (CONTEXT, TENSOR, SEQUENCE)),
    "CP2xPP2": ("dense", 4, (), (CONTEXT, PIPELINE)),
    "GPT-like TP2+sequence": ("gpt", 2, (), (TENSOR, SEQUENCE)),
    "GPT-like PP2": ("gpt", 2, (), (PIPELINE,)),
    "experts TP2xEP2": ("moe", 4, (), (TENSOR, SEQUENCE, EXPERT)),
    "experts EP2xCP2": ("moe", 2, (), (CONTEXT, EXPERT)),
    "experts EP2xPP2": ("moe", 4, (), (EXPERT, PIPELINE)),
    "mixture TP2xEP2": ("mixture", 4, (), (TENSOR, SEQUENCE, EXPERT)),
    "mixture EP2xPP2": ("mixture", 4, (), (EXPERT, PIPELINE)),
    "mixture, feed-forward recomputed": (
        "mixture", 1, (), ("train.recompute=selective", "train.recompute_modules=[mlp]"),
    ),
}  # fmt: skip


QUICK_COMBINATIONS = ("mixture EP2xPP2",)


@pytest.mark.parametrize("combination", quick_and_slow(COMBINATIONS, QUICK_COMBINATIONS))
def test_combinations_are_those_of_one_rank(train: Runner, combination: str) -> None:
    name, world, common, layout = COMBINATIONS[combination]
    expected = train(name, 1, SHORT, *common)
    assert_same_course(train(name, world, SHORT, *common, *layout), expected)


AUXILIARY = "student.architecture.moe.aux_loss_coefficient=0.2"


BALANCED: dict[str, tuple[int, Sequence[str]]] = {
    "micro-batch 1": (1, ("train.micro_batch_size=1",)),
    "EP2": (2, (EXPERT,)),
    "CP2": (2, (CONTEXT,)),
    "PP2": (2, (PIPELINE,)),
    "TP2+sequence": (2, (TENSOR, SEQUENCE)),
    "recompute": (1, ("train.recompute=full",)),
}


@pytest.mark.parametrize("layout", quick_and_slow(BALANCED, []))
def test_the_auxiliary_loss_of_experts_is_that_of_one_rank(train: Runner, layout: str) -> None:
    world, overrides = BALANCED[layout]
    expected = train("moe", 1, SHORT, AUXILIARY)
    without = train("moe", 1, "train.steps=5")[0]["grad_norm"]
    assert expected[0]["grad_norm"] != pytest.approx(without, rel=1e-2)
    assert_same_course(train("moe", world, SHORT, AUXILIARY, *overrides), expected)


ARCHITECTURE = "student.architecture."
TIED = (f"{ARCHITECTURE}tied_embeddings=true",)
CAPPED = (
    f"{ARCHITECTURE}logit_softcap=3.0",
    f"{ARCHITECTURE}logit_scale=0.5",
    "teacher.architecture.logit_softcap=5.0",
    "teacher.architecture.logit_scale=1.5",
)
# Five layers on two stages; the teacher's three on as many, whatever the student's are.
UNEVEN = (f"{ARCHITECTURE}num_layers=5", "teacher.architecture.num_layers=3")
SWITCH = (
    f"{ARCHITECTURE}moe={{num_experts: 4, top_k: 1, ffn_hidden_size: 24, renormalize: false}}",
)
# Windows, norms, caps of scores, shared heads and uneven stages: test_model_layouts.py.
FAMILIES: dict[str, tuple[int, Sequence[str], Sequence[str]]] = {
    "tied PP2+virtual": (2, TIED, (PIPELINE, VIRTUAL)),
    "capped logits TP2": (2, CAPPED, (TENSOR,)),
    "layers per stage PP2": (
        2,
        UNEVEN,
        (PIPELINE, "parallel.layers_per_stage={student: [1, 4], teacher: [1, 2]}"),
    ),
    "layers per stage PP2+virtual": (
        2,
        UNEVEN,
        (PIPELINE, VIRTUAL, "parallel.layers_per_stage.student=[1, 1, 2, 1]"),
    ),
    "one expert each EP2": (2, SWITCH, (EXPERT,)),
}
QUICK_FAMILIES = ("layers per stage PP2",)


@pytest.mark.parametrize("family", quick_and_slow(FAMILIES, QUICK_FAMILIES))
def test_families_are_those_of_one_rank_from_random_weights(train: Runner, family: str) -> None:
    world, architecture, layout = FAMILIES[family]
    random = (SHORT, "student.checkpoint=null", *architecture)
    assert_same_course(train("dense", world, *random, *layout), train("dense", 1, *random))


# Chunks of two tokenizers: a vocabulary that is smaller or larger than the student's, a head of
# its own or that of the embedding, samples of other lengths.
SMALLER = "teacher.tokenizer.path={smaller}"
ALIGNED: dict[str, tuple[int, Sequence[str], Sequence[str]]] = {
    "TP2": (2, (), (TENSOR,)),
    "TP2+sequence, tied": (2, ("teacher.architecture.tied_embeddings=true",), (TENSOR, SEQUENCE)),
    "TP4, smaller": (4, (SMALLER,), (FOUR,)),
    "PP2, smaller": (2, (SMALLER,), (PIPELINE,)),
    "PP2+virtual": (2, (), (PIPELINE, VIRTUAL)),
    "CP2, longer teacher": (2, ("teacher.sequence_length=48",), (CONTEXT,)),
    "DP2, smaller": (2, (SMALLER,), ()),
    "TP2xPP2, tied": (4, ("teacher.architecture.tied_embeddings=true",), (TENSOR, PIPELINE)),
    "TP2xCP2": (4, (), (TENSOR, SEQUENCE, CONTEXT)),
    "PP2xCP2": (4, (), (PIPELINE, CONTEXT)),
    "micro-batch 1": (1, (), ("train.micro_batch_size=1",)),
}
# tests/e2e/tokenizers/test_several_tokenizers.py has a quick layout of these losses.
QUICK_ALIGNED = ()
ALIGNED_QUANTITIES = (
    *QUANTITIES,
    "likelihood_js_divergence_t6",
    "common_forward_kl_t2",
    "common_reverse_kl_top8",
)


@pytest.mark.parametrize("layout", quick_and_slow(ALIGNED, QUICK_ALIGNED))
def test_a_teacher_of_another_tokenizer_gives_the_losses_of_one_rank(
    train: Runner, inputs: Inputs, layout: str
) -> None:
    world, common, overrides = ALIGNED[layout]
    smaller = inputs.second_tokenizer(min(SECOND_SIZES))
    common = [override.format(smaller=smaller) for override in common]
    expected = train("aligned", 1, *common)
    assert len(expected) == 20
    assert min(expected[0][name] for name in ALIGNED_QUANTITIES) > 0.005
    found = train("aligned", world, *common, *overrides)
    assert_same_course(found, expected, ALIGNED_QUANTITIES)
    for name in ("chunks", "aligned_labels", "coverage"):
        assert [record[name] for record in found] == [record[name] for record in expected]
    assert expected[0]["coverage"]["student_bytes"] > 0.8


MEANS: dict[str, tuple[int, Sequence[str], Sequence[str]]] = {
    "TP2+sequence": (2, (), (TENSOR, SEQUENCE)),
    "TP4, smaller": (4, (SMALLER,), (FOUR,)),
    "CP2": (2, (), (CONTEXT,)),
    "PP2+virtual": (2, (), (PIPELINE, VIRTUAL)),
    "DP2": (2, (), ()),
    "TP2xCP2": (4, (), (TENSOR, SEQUENCE, CONTEXT)),
    "micro-batch 1": (1, (), ("train.micro_batch_size=1",)),
}


@pytest.mark.parametrize("layout", quick_and_slow(MEANS, ()))
def test_losses_on_chunk_means_are_those_of_one_rank(
    train: Runner, inputs: Inputs, layout: str
) -> None:
    world, common, overrides = MEANS[layout]
    smaller = inputs.second_tokenizer(min(SECOND_SIZES))
    common = [SHORT, MEANS_TERMS, *(override.format(smaller=smaller) for override in common)]
    expected = train("aligned", 1, *common)
    assert min(expected[0][name] for name in MEANS_NAMES) > 0.01
    found = train("aligned", world, *common, *overrides)
    assert_same_course(found, expected, (*QUANTITIES, *MEANS_NAMES))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), (TENSOR, SEQUENCE)], ids=["one rank", "TP2+sequence"])
def test_bf16_is_close_to_fp32(train: Runner, layout: Sequence[str]) -> None:
    exact = train("dense", 1)
    rounded = train("dense", 2 if layout else 1, "train.precision=bf16", *layout)
    assert exact[0]["ce_loss"] != rounded[0]["ce_loss"]
    for ours, other in zip(rounded, exact, strict=True):
        for name, tolerance in (("ce_loss", 0.01), ("kd_loss", 0.02), ("grad_norm", 0.1)):
            assert ours[name] == pytest.approx(other[name], rel=tolerance), (ours["step"], name)
