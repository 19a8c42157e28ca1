"""Layout changes nothing: losses and gradient norms per step are those of a single rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.e2e.runs import (
    EXPERT,
    MEANS_NAMES,
    MEANS_TERMS,
    QUANTITIES,
    SECOND_SIZES,
    Course,
    Inputs,
    KnownRuns,
    assert_same_course,
    layout,
    quick_and_slow,
    run,
)

LAST = 1e-4
SHORT = "train.steps=8"

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


LAYOUTS = (
    "TP2+sequence", "PP2+virtual", "DP2", "CP2", "TP2xPP2", "TP4, on 2 KV heads", "EP2",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", LAYOUTS)
def test_twenty_steps_are_those_of_one_rank(train: Runner, case: str) -> None:
    name = "moe" if case == "EP2" else "dense"
    world, overrides = layout(case)
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

# The model, the changes that one rank makes as well, and those of the other run.
COMBINATIONS: dict[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "TP2+sequence": ("dense", (), ()),
    "one rank, no accumulation": ("dense", (), ("train.micro_batch_size=8",)),
    "DP2, whole optimizer on every rank": ("dense", (), ("optimizer.distributed=false",)),
    "one rank, recompute attention": ("dense", (), ("train.recompute=selective",)),
    "TP2+sequence, recompute layers": ("dense", (), ("train.recompute=full",)),
    "TP2, teacher padded otherwise": (
        "dense", (), ("teacher.architecture.vocab_divisible_by=8",),
    ),
    "CP2, documents see each other": ("dense", ("data.isolate_documents=false",), ()),
    "CP2, six terms": ("dense", (TERMS,), ("train.micro_batch_size=4",)),
    "TP2xPP2+sequence, six terms": ("dense", (TERMS,), ()),
    "CP2xPP2": ("dense", (), ()),
    "PP2, GPT-like": ("gpt", (), ()),
    "CP2, experts EP2": ("moe", (), (EXPERT,)),
    "TP2xDP2+sequence, mixture EP2": ("mixture", (), (EXPERT,)),
    "EP2xPP2, mixture": ("mixture", (), ()),
    "one rank, mixture, feed-forward recomputed": (
        "mixture", (), ("train.recompute=selective", "train.recompute_modules=[mlp]"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", quick_and_slow(COMBINATIONS, ["TP2+sequence"]))
def test_combinations_are_those_of_one_rank(train: Runner, case: str) -> None:
    name, common, own = COMBINATIONS[case]
    world, overrides = layout(case)
    expected = train(name, 1, SHORT, *common)
    assert_same_course(train(name, world, SHORT, *common, *overrides, *own), expected)


AUXILIARY = "student.architecture.moe.aux_loss_coefficient=0.2"


BALANCED = ("one rank, micro-batch 1", "EP2", "CP2", "PP2", "TP2+sequence", "one rank, recompute")


@pytest.mark.slow
@pytest.mark.parametrize("case", BALANCED)
def test_the_auxiliary_loss_of_experts_is_that_of_one_rank(train: Runner, case: str) -> None:
    world, overrides = layout(case)
    own = {"micro-batch 1": "train.micro_batch_size=1", "recompute": "train.recompute=full"}
    overrides = (*overrides, *(own[one] for one in case.split(", ")[1:]))
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
ODD = (f"{ARCHITECTURE}moe={{num_experts: 4, top_k: 2, ffn_hidden_size: 25}}",)
# Windows, norms, caps of scores: test_family_layouts.py, and gradients in test_model_layouts.py.
FAMILIES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "PP2+virtual, tied": (TIED, ()),
    "TP2, capped logits": (CAPPED, ()),
    "PP2, layers per stage": (
        UNEVEN, ("parallel.layers_per_stage={student: [1, 4], teacher: [1, 2]}",),
    ),
    "PP2+virtual, layers per stage": (
        UNEVEN, ("parallel.layers_per_stage.student=[1, 1, 2, 1]",),
    ),
    "EP2, one expert each": (SWITCH, ()),
    # Tensor ranks have whole experts then.
    "TP2xDP2+sequence, experts of odd width": (ODD, (EXPERT,)),
}  # fmt: skip


@pytest.mark.parametrize("case", quick_and_slow(FAMILIES, []))
def test_families_are_those_of_one_rank_from_random_weights(train: Runner, case: str) -> None:
    architecture, own = FAMILIES[case]
    world, overrides = layout(case)
    random = (SHORT, "student.checkpoint=null", *architecture)
    assert_same_course(train("dense", world, *random, *overrides, *own), train("dense", 1, *random))


# Chunks of two tokenizers: a vocabulary that is smaller or larger than the student's, a head of
# its own or that of the embedding, samples of other lengths. A quick layout of these losses is in
# tests/e2e/tokenizers/test_several_tokenizers.py.
OF_REMARK = {
    "smaller": "teacher.tokenizer.path={smaller}",
    "tied": "teacher.architecture.tied_embeddings=true",
    "longer teacher": "teacher.sequence_length=48",
}
ALIGNED = (
    "TP2+sequence, tied", "PP2+virtual, micro-batch 1", "CP2, longer teacher",
    "DP2, smaller, micro-batch 4", "TP2xPP2, tied", "TP2xCP2+sequence",
    "one rank, micro-batch 1, no cache",
)  # fmt: skip
ALIGNED_NAMES = (
    "likelihood_js_divergence_t6", "common_forward_kl_t2", "common_reverse_kl_top8", "topk_mass",
)  # fmt: skip


def runs_of_two_tokenizers(
    train: Runner, inputs: Inputs, case: str, *terms: str
) -> tuple[Course, Course]:
    """The run in the layout of a case, and that of one rank."""
    world, overrides = layout(case)
    remarks = case.split(", ")[1:]
    smaller = inputs.second_tokenizer(min(SECOND_SIZES))
    common = [OF_REMARK[one].format(smaller=smaller) for one in remarks if one in OF_REMARK]
    sizes = [one.split()[-1] for one in remarks if one.startswith("micro-batch ")]
    own = [f"train.micro_batch_size={size}" for size in sizes]
    own += ["data.document_cache_gib=0"] if "no cache" in remarks else []
    found = train("aligned", world, *terms, *common, *overrides, *own)
    return found, train("aligned", 1, *terms, *common)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALIGNED)
def test_a_teacher_of_another_tokenizer_gives_the_losses_of_one_rank(
    train: Runner, inputs: Inputs, case: str
) -> None:
    found, expected = runs_of_two_tokenizers(train, inputs, case, SHORT)
    assert min(expected[0][name] for name in (*QUANTITIES, *ALIGNED_NAMES)) > 0.005
    assert_same_course(found, expected, (*QUANTITIES, *ALIGNED_NAMES))
    for name in ("chunks", "aligned_labels", "coverage"):
        assert [record[name] for record in found] == [record[name] for record in expected]
    assert expected[0]["coverage"]["student_bytes"] > 0.8


MEANS = (
    "CP2xPP2, micro-batch 4", "PP2+virtual", "DP2, micro-batch 4", "TP2xCP2+sequence",
    "one rank, micro-batch 1",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", MEANS)
def test_losses_on_chunk_means_are_those_of_one_rank(
    train: Runner, inputs: Inputs, case: str
) -> None:
    found, expected = runs_of_two_tokenizers(train, inputs, case, SHORT, MEANS_TERMS)
    assert min(expected[0][name] for name in MEANS_NAMES) > 0.01
    assert_same_course(found, expected, (*QUANTITIES, *MEANS_NAMES))


# Layers of both models at the ends of chunks, from both stages of either model.
CHUNK_FEATURES = (
    "objective.features=[{match: uniform, weight: 0.5}, {student: 1, teacher: 2, loss: cosine}]"
)
FEATURE_NAMES = (
    "features_loss", "feature_mse_4_2", "feature_cosine_1_2", "projector_grad_norm",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["DP2, micro-batch 4", "TP2+sequence", "PP2", "CP2, longer teacher"]
)
def test_losses_between_layers_of_two_tokenizers_are_those_of_one_rank(
    train: Runner, inputs: Inputs, case: str
) -> None:
    found, expected = runs_of_two_tokenizers(train, inputs, case, SHORT, CHUNK_FEATURES)
    assert min(expected[0][name] for name in FEATURE_NAMES) > 0.01
    assert_same_course(found, expected, (*QUANTITIES, *FEATURE_NAMES))


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Pool]:
    """Eight gloo workers, for tensor, pipeline and context parallelism together."""
    workers = Pool(8)
    yield workers
    workers.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "terms", "names"),
    [
        ("TP2xPP2xCP2+sequence", (), ALIGNED_NAMES),
        ("TP4xPP2", (MEANS_TERMS,), MEANS_NAMES),
        ("TP4xCP2", (), ALIGNED_NAMES),
    ],
)
def test_losses_between_tokenizers_on_eight_ranks_are_those_of_one(
    eight_ranks: Pool,
    train: Runner,
    weights: Callable[[str], str],
    inputs: Inputs,
    tmp_path: Path,
    case: str,
    terms: tuple[str, ...],
    names: tuple[str, ...],
) -> None:
    world, overrides = layout(case)
    assert world == 8
    given = (weights("aligned"), SHORT, *terms)
    found = run(eight_ranks, 8, inputs.folder / "aligned.yaml", tmp_path, *given, *overrides)
    expected = train("aligned", 1, SHORT, *terms)
    assert min(expected[0][name] for name in names) > 0.005
    assert_same_course(found, expected, (*QUANTITIES, *names))


@pytest.mark.slow
def test_losses_between_tokenizers_on_sixteen_ranks_are_those_of_one(
    train: Runner, weights: Callable[[str], str], inputs: Inputs, tmp_path: Path
) -> None:
    world, overrides = layout("TP4xPP2xCP2+sequence")
    further = (
        "{alignment: likelihood}, {alignment: common, top_k: 8}, "
        "{alignment: common, divergence: adaptive_kl}, "
    )
    every = MEANS_TERMS.replace("[", f"[{further}", 1)
    given = (weights("aligned"), "train.steps=2", "schedule.warmup_steps=1", every)
    config = inputs.folder / "aligned.yaml"
    with closing(Pool(world)) as sixteen_ranks:
        found = run(sixteen_ranks, world, config, tmp_path, *given, *overrides)
    expected = train("aligned", 1, *given[1:])
    of_pairs = ("common_forward_kl_top8", "common_adaptive_kl")
    names = ("likelihood_forward_kl", *of_pairs, *MEANS_NAMES)
    assert min(expected[0][name] for name in names) > 0.001
    assert_same_course(found, expected, (*QUANTITIES, *names))


@pytest.mark.slow
def test_bf16_is_close_to_fp32(train: Runner) -> None:
    world, overrides = layout("TP2+sequence")
    exact = train("dense", 1)
    rounded = train("dense", world, "train.precision=bf16", *overrides)
    assert exact[0]["ce_loss"] != rounded[0]["ce_loss"]
    for ours, other in zip(rounded, exact, strict=True):
        for name, tolerance in (("ce_loss", 0.01), ("kd_loss", 0.02), ("grad_norm", 0.1)):
            assert ours[name] == pytest.approx(other[name], rel=tolerance), (ours["step"], name)
