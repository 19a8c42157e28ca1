"""Several teachers in one objective: routed, named, mixed and chosen, against a float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import Term, TermTeachers, fused_linear_objective
from megatron_distill.losses.teacher_scores import TeacherScores
from megatron_distill.losses.terms import Mixture, TeacherScore
from megatron_distill.ops import VocabShard
from megatron_distill.ops.fused_linear import Partition
from megatron_distill.signals import DenseLogits, HiddenState
from tests.support.several_teachers import LENGTH, Inputs, on_shard, shares, solve

MIXED = {"math": 0.7, "code": 0.3}
NAMES = ("math", "code", "code", "law")


def teachers(mixture: Mixture = "arithmetic", **weights: float) -> TermTeachers:
    return TermTeachers.of(weights, mixture)


def scored(
    score: TeacherScore, alpha: float, mixture: Mixture = "arithmetic", **weights: float
) -> TermTeachers:
    return TermTeachers.of(weights, mixture, score=score, alpha=alpha)


TERMS = {
    "routed": [Term(), Term("reverse_kl", 0.5, temperature=2.0)],
    "named": [Term(teachers=teachers(math=1)), Term(teachers=teachers(code=1))],
    "arithmetic": [
        Term(temperature=2.0, scale_by_temperature_squared=True, teachers=teachers(**MIXED)),
        Term("reverse_kl", 0.5, teachers=teachers(**MIXED)),
        Term("js_divergence", 0.3, teachers=teachers(math=1, code=2, law=3)),
    ],
    "geometric": [
        Term(temperature=2.0, teachers=teachers("geometric", **MIXED)),
        Term("total_variation", 0.5, teachers=teachers("geometric", **MIXED)),
    ],
    "lowest": [
        Term(teachers=teachers("lowest_loss", math=1, code=1, law=1)),
        Term("reverse_kl", teachers=teachers("lowest_loss", math=1, law=1)),
    ],
    "scored": [
        Term(temperature=2.0, teachers=scored("cross_entropy", 2.0, math=1, code=1, law=1)),
        Term("reverse_kl", 0.5, teachers=scored("entropy", 3.0, "geometric", **MIXED)),
        Term("js_divergence", 0.3, teachers=scored("top_probability", 9.0, math=1, law=2)),
    ],
    "all": [
        Term(),
        Term("reverse_kl", 0.4, teachers=scored("cross_entropy", 1.0, **MIXED)),
        Term("reverse_kl", teachers=teachers("geometric", **MIXED)),
        Term(temperature=3.0, teachers=teachers(**MIXED)),
        Term("squared_hellinger", teachers=teachers("lowest_loss", math=1, code=1)),
        Term("js_divergence", teachers=teachers(law=1)),
    ],
}


def test_a_metric_is_that_of_the_first_term_that_has_it() -> None:
    whole = Term(teachers=teachers(math=1))
    ranked = Term("reverse_kl", top_k=4, teachers=teachers(code=1))
    inputs = Inputs.random()
    alone = on_shard(0, 1, inputs, [ranked], NAMES).report["topk_mass"]
    for terms in ([whole, ranked], [ranked, whole]):
        assert on_shard(0, 1, inputs, terms, NAMES).report["topk_mass"] == alone > 0


@pytest.mark.parametrize("kind", TERMS)
def test_values_and_gradients_are_those_of_the_oracle(kind: str) -> None:
    inputs = Inputs.random()
    ours = on_shard(0, 1, inputs, TERMS[kind], NAMES)
    oracle = solve(inputs, TERMS[kind], NAMES)
    for name, value in oracle.report.items():
        assert float(ours.report[name]) == pytest.approx(float(value), rel=1e-11), name
    assert float(ours.total) == pytest.approx(float(oracle.total), rel=1e-11)
    torch.testing.assert_close(ours.hidden_gradient, oracle.hidden_gradient, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(
        ours.weight_gradient[: len(oracle.weight_gradient)],
        oracle.weight_gradient,
        rtol=1e-10,
        atol=1e-13,
    )


# Scores of two teachers, and their weights by softmax(alpha score).
KNOWN_SHARES = [(1.0, (0.377541, 0.622459)), (4.0, (0.119203, 0.880797))]


@pytest.mark.parametrize(("alpha", "expected"), KNOWN_SHARES)
@pytest.mark.parametrize("mixture", ["arithmetic", "geometric"])
def test_scores_of_known_values_weigh_as_they_should(
    alpha: float, expected: tuple[float, float], mixture: Mixture
) -> None:
    # Cross-entropies 2.5 and 1.5 on one label, 1.5 twice on another: means 2 and 1.5.
    labels = torch.zeros(2, dtype=torch.int64)
    signals = {
        name: DenseLogits(_with_label_loss(torch.tensor(losses, dtype=torch.float64)))
        for name, losses in (("code", [2.5, 1.5]), ("math", [1.5, 1.5]))
    }
    scores = TeacherScores(
        signals, labels, torch.ones(2), torch.arange(2), Partition(torch.zeros(2).long(), 1),
        None, VocabShard(3, 0, 3), None, 1,
    )  # fmt: skip
    found = scores.shares(scored("cross_entropy", alpha, mixture, code=1, math=1))
    assert found.tolist() == [pytest.approx(expected, abs=5e-7)] * 2


def _with_label_loss(losses_N: Tensor) -> Tensor:
    """Logits ``[N, 3]`` with these cross-entropies on id 0; the last id is impossible."""
    odds = losses_N.expm1().log()
    return torch.stack([torch.zeros_like(odds), odds, torch.full_like(odds, -torch.inf)], 1)


def test_the_mean_weights_of_a_mixture_are_summed() -> None:
    inputs, own = Inputs.random(6), scored("cross_entropy", 2.0, math=1, code=1, law=1)
    terms = [Term(teachers=own), Term("reverse_kl", teachers=teachers(math=2, code=1, law=1))]
    found = on_shard(0, 1, inputs, terms, NAMES).sums["code+law+math"]
    of_samples = inputs.kd_weights_N.double().view(4, LENGTH).sum(1)
    expected = of_samples @ shares(inputs, own) + of_samples.sum() * torch.tensor([1, 1, 2]) / 4
    ours = [float(found.shares[name]) for name in ("code", "law", "math")]
    assert ours == pytest.approx(expected.tolist(), rel=1e-6)
    assert sum(ours) == pytest.approx(float(found.labels))


def test_a_large_alpha_chooses_the_best_teacher_of_each_sample() -> None:
    inputs = Inputs.random(3)
    chosen = scored("cross_entropy", 1e4, math=1, code=1, law=1)
    best = shares(inputs, replace(chosen, alpha=50.0)).argmax(1)
    assert len(set(best.tolist())) > 1
    ours = on_shard(0, 1, inputs, [Term(teachers=chosen)], NAMES)
    routed = on_shard(0, 1, inputs, [Term()], [chosen.names[number] for number in best])
    assert float(ours.total) == pytest.approx(float(routed.total), rel=1e-12)
    torch.testing.assert_close(ours.hidden_gradient, routed.hidden_gradient)


def test_samples_of_another_tokenizer_have_the_terms_that_name_a_teacher_alone() -> None:
    # Half of the samples have a teacher whose terms are computed elsewhere.
    inputs, terms = Inputs.random(5), [Term(), Term("reverse_kl", 0.5, teachers=teachers(math=1))]
    own = replace(inputs, kd_weights_N=inputs.kd_weights_N.clone())
    names = ("math", "far", "code", "far")
    is_elsewhere = torch.tensor([name == "far" for name in names]).repeat_interleave(LENGTH)
    own.kd_weights_N[is_elsewhere] = 0.0
    ours = on_shard(0, 1, inputs, terms, names, elsewhere=frozenset({"far"}))
    routed = solve(own, terms[:1], ("math", "math", "code", "code"))
    named = solve(inputs, terms[1:], names)
    for name, oracle in ((terms[0].name, routed), (terms[1].name, named), ("ce", named)):
        expected = float(oracle.report[name])
        assert float(ours.report[name]) == pytest.approx(expected, rel=1e-11), name
    labels = solve(inputs, [], names).hidden_gradient
    expected_gradient = routed.hidden_gradient + named.hidden_gradient - labels
    torch.testing.assert_close(ours.hidden_gradient, expected_gradient, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("mixture", ["arithmetic", "geometric", "lowest_loss"])
def test_equal_teachers_are_one_teacher(mixture: Mixture) -> None:
    inputs = Inputs.random(2)
    inputs = replace(inputs, teachers={**inputs.teachers, "code": inputs.teachers["math"]})
    one = on_shard(0, 1, inputs, [Term(teachers=teachers(math=1))], NAMES)
    both = on_shard(0, 1, inputs, [Term(teachers=teachers(mixture, **MIXED))], NAMES)
    assert float(both.total) == pytest.approx(float(one.total), rel=1e-12)
    torch.testing.assert_close(both.hidden_gradient, one.hidden_gradient, rtol=1e-10, atol=1e-14)
    if mixture == "lowest_loss":  # ties go to the first name
        assert float(both.sums["math"].labels) == 0.0
        assert float(both.sums["code"].labels) == pytest.approx(float(inputs.kd_weights_N.sum()))


@pytest.mark.parametrize(
    ("terms", "names"),
    [
        ([Term(temperature=2.0)], ("math",) * 4),
        ([Term(temperature=2.0, teachers=teachers(math=1.0, code=0.0))], NAMES),
        ([Term(temperature=2.0, teachers=teachers("geometric", math=3.0))], ()),
    ],
)
def test_one_teacher_is_the_plain_objective_to_the_bit(
    terms: list[Term], names: tuple[str, ...]
) -> None:
    inputs = Inputs.random(4)
    ours = on_shard(0, 1, inputs, terms, names, torch.float32)
    hidden = inputs.hidden_NH.float().requires_grad_()
    weight = torch.nn.functional.pad(inputs.weight_GH.float(), (0, 0, 0, 3)).requires_grad_()
    states, head = inputs.teachers["math"]
    total, report = fused_linear_objective(
        hidden,
        weight[:53],
        HiddenState(states.float(), head.float()),
        inputs.labels_N,
        ce_weights=inputs.ce_weights_N,
        kd_weights=inputs.kd_weights_N,
        terms=[Term(temperature=2.0)],
        chunk_tokens=5,
    )
    total.backward()
    assert torch.equal(ours.total, total)
    assert torch.equal(ours.hidden_gradient, hidden.grad)
    assert torch.equal(ours.report["kd"], report["kd"])
    assert torch.equal(ours.sums["math"].kd, report["kd"])
    assert float(ours.sums["math"].agreement) == float(report["top1_agreement"])


def test_sums_of_the_teachers_add_up() -> None:
    inputs = Inputs.random(5)
    ours = on_shard(0, 1, inputs, [Term()], NAMES)
    labels = inputs.kd_weights_N.view(4, LENGTH).sum(1)
    assert float(ours.sums["math"].labels) == pytest.approx(float(labels[0]))
    assert float(ours.sums["code"].labels) == pytest.approx(float(labels[1] + labels[2]))
    whole = sum(float(one.kd) for one in ours.sums.values())
    assert whole == pytest.approx(float(ours.report["kd"]), rel=1e-12)
    agreement = sum(float(one.agreement) for one in ours.sums.values())
    assert agreement == pytest.approx(float(ours.report["top1_agreement"]), rel=1e-12)


def test_a_mean_needs_positive_weights_and_names() -> None:
    with pytest.raises(ValueError, match="at least one teacher"):
        TermTeachers(())
    with pytest.raises(ValueError, match="sum one"):
        TermTeachers((("math", 0.7), ("code", 0.7)))
    with pytest.raises(ValueError, match="a choice has no weights"):
        scored("entropy", 1.0, "lowest_loss", math=1, code=1)
    with pytest.raises(ValueError, match=r"alpha 0\.0 must be positive"):
        scored("entropy", 0.0, math=1, code=1)
    assert scored("entropy", 4.0, code=1).score is None  # one teacher is its own mean
    assert scored("entropy", 4.0, **MIXED).label == "code0.3_math0.7_by_entropy4"
