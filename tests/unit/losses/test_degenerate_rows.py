"""Rows on which shipped losses broke: ids twice or nowhere, probabilities that underflow, models
sure of one id, logits of minus infinity.

Rows that do not count: test_properties.py. More ids kept than a shard has columns, and ids on other
shards: tests/distributed/losses/test_divergences_tensor_parallel.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distill.losses import Term, fused_linear_objective
from megatron_distill.ops import VocabShard, vocab_parallel_topk
from megatron_distill.signals import DenseLogits, Sampled, TopK
from tests.reference.distillation import cross_entropy, row_error
from tests.reference.logits import logit_pair
from tests.support.divergence_runs import (
    KEPT_SUPPORTS,
    NAMES,
    PROPER,
    REPRESENTATIVE,
    SUPPORTS,
    differentiated,
    expected,
    signal_of,
    solved,
    value_of,
)

OF_EACH = pytest.mark.parametrize("name", NAMES)
# For laws that no formula decides.
OF_SOME = pytest.mark.parametrize("name", REPRESENTATIVE)
# With a forward KL, which is infinite where the teacher has a probability and the student none.
INFINITE_THERE = ("forward_kl", "adaptive_kl")
# Gradients below count as zero: to the formulas no probability is below the smallest normal number.
NOTHING = 1e-30


def each_support(*ks: int) -> list[tuple[str, int]]:
    """All ids, and so many kept ones on each support."""
    return [("dense", 1), *((support, k) for support in KEPT_SUPPORTS for k in ks)]


INFINITY = torch.inf


def assert_finite(found: tuple[Tensor, Tensor], support: str) -> None:
    value, gradient = found
    assert bool(value.isfinite().all())
    assert bool(gradient.isfinite().all())
    if support in PROPER:
        assert bool((value >= 0).all())


@OF_SOME
def test_defect_15_ids_on_no_shard(name: str) -> None:
    # Gathered with a clamped index, such an id would get the logit of a stranger.
    for support in KEPT_SUPPORTS:
        student, teacher = logit_pair(4, 30)
        shard = VocabShard(25, 0, 30)
        kept = signal_of(support, teacher, k=3, shard=shard)
        ids = kept.ids.clone()
        ids[0, 0], ids[1, 1], ids[2] = 30, -1, torch.tensor([25, 29, 2**40])
        given = {"divergence": name, "support": support, "shard": shard}
        found = solved(student, replace(kept, ids=ids), torch.ones(4), **given)
        assert_finite(found, support)
        # They are what the student cannot say: as if their logits were minus infinity.
        assert not found[1][:, 25:].any()
        there = solved(student, kept, torch.ones(4), **given)
        assert torch.equal(found[1][3], there[1][3])
        assert float(found[0][3]) == float(there[0][3])
        if support == "tail":
            assert float(found[0][0]) > float(there[0][0])


def test_defect_15_samples_on_no_shard_are_infinitely_unlikely() -> None:
    student, teacher = logit_pair(3, 30)
    ids = vocab_parallel_topk(teacher, 3).ids.clone()
    ids[0, 1], ids[1, 2] = 30, -7
    value, gradient = solved(
        student, Sampled(ids, torch.ones_like(ids)), torch.ones(3), divergence="forward_kl"
    )
    assert value.isinf().tolist() == [True, True, False]
    assert bool(gradient.isfinite().all())
    # Unless they were not drawn.
    counts = ((ids >= 0) & (ids < 30)).long()
    value, _ = solved(student, Sampled(ids, counts), torch.ones(3), divergence="forward_kl")
    assert bool(value.isfinite().all())


def test_defect_15_ids_drawn_twice_count_twice() -> None:
    student, _ = logit_pair(3, 30)
    ids = torch.tensor([[4, 4, 9, 4], [0, 0, 0, 0], [29, 1, 29, 1]])
    counts = torch.tensor([[1, 2, 1, 0], [1, 1, 1, 1], [3, 1, 1, 1]])
    upstream = torch.tensor([1.0, 2.0, 0.5])
    found = solved(student, Sampled(ids, counts), upstream, divergence="forward_kl")
    weights = torch.zeros(3, 30).double().scatter_add_(1, ids, counts.double())
    weights /= weights.sum(1, keepdim=True)
    value, gradient = differentiated(
        student, lambda leaf: -(weights * leaf.log_softmax(1)).sum(1), upstream
    )
    torch.testing.assert_close(found[0].double(), value, rtol=1e-6, atol=0)
    assert row_error(found[1], gradient) < 1e-6


@OF_SOME
def test_defect_15_repeated_top_k_ids_stay_finite(name: str) -> None:
    # A top-k has each id once. One that does not must not take the student's tail below nothing.
    for support in KEPT_SUPPORTS:
        student, teacher = logit_pair(4, 12, spread=8.0)
        kept = vocab_parallel_topk(teacher, 4)
        ids = kept.ids[:, [0, 0, 1, 0]]
        doubled = TopK(ids, kept.log_probs, kept.log_tail)
        found = solved(student, doubled, torch.ones(4), divergence=name, support=support)
        assert bool(found[0].isfinite().all())
        assert bool(found[1].isfinite().all())


@OF_EACH
def test_defect_15_probabilities_that_underflow(name: str) -> None:
    # q = 0 in fp32: log q and p/q of what has underflowed are not numbers.
    for support, k in each_support(1, 3, 12):
        sure, other = logit_pair(4, 12)
        sure[:, 2] += torch.tensor([120.0, 1e3, 1e4, 3e4])
        given = {"divergence": name, "support": support}
        for student, teacher in ((sure, other), (other, sure)):
            assert bool((student.softmax(1) == 0).any() or (teacher.softmax(1) == 0).any())
            found = solved(student, signal_of(support, teacher, k=k), torch.ones(4), **given)
            assert_finite(found, support)


def sure_student(gap: float) -> tuple[Tensor, Tensor]:
    """A student that leaves e^-gap to all but two ids, which the teacher likes best."""
    student, teacher = logit_pair(4, 12)
    student[:, [2, 5]] += gap
    teacher[:, [2, 5]] += 4.0
    return student, teacher


@OF_EACH
def test_defect_15_a_tail_that_the_student_hardly_has(name: str) -> None:
    # The slope of such a tail is p/q of it. Added to all ids and taken from the kept ones in fp32,
    # it leaves gradients of 1e3 at a gap of 30, where they should be less than one.
    for gap in (10.0, 20.0, 40.0, 60.0):
        student, teacher = sure_student(gap)
        signal = signal_of("tail", teacher, k=3)
        given = {"divergence": name, "support": "tail"}
        value, gradient = solved(student, signal, torch.ones(4), **given)
        oracle = expected(student, signal, torch.ones(4), **given)  # type: ignore[arg-type]
        torch.testing.assert_close(value.double(), oracle[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(gradient.double(), oracle[1], rtol=1e-5, atol=1e-6)
        assert float(gradient.sum(1).abs().max()) < 1e-6


@pytest.mark.parametrize("name", ["forward_kl", "squared_hellinger"])
def test_defect_15_a_tail_that_the_student_hardly_has_beside_other_terms(name: str) -> None:
    for gap in (10.0, 30.0, 60.0):
        student, teacher = sure_student(gap)
        labels, weights = torch.tensor([2, 5, 0, 11]), torch.tensor([0.5, 1.0, 0.0, 2.0])
        terms = [Term(name, top_k=k) for k in (2, 3, 6)]
        terms += [Term("js_divergence"), Term("reverse_kl", top_k=4, support="raw")]
        for chosen in (terms[:1], terms[:3], terms):
            leaf = student.detach().requires_grad_()
            total, _ = fused_linear_objective(
                leaf,
                torch.eye(12),
                DenseLogits(teacher),
                labels,
                ce_weights=weights.flip(0),
                kd_weights=weights,
                terms=chosen,
                chunk_tokens=3,
            )
            (gradient,) = torch.autograd.grad(total, leaf)
            exact = student.detach().double().requires_grad_()
            values = cross_entropy(exact, labels) * weights.flip(0).double()
            for term in chosen:
                values = values + weights.double() * value_of(term, exact, teacher)
            (oracle,) = torch.autograd.grad(values.sum(), exact)
            torch.testing.assert_close(gradient.double(), oracle, rtol=1e-5, atol=2e-6)


@OF_EACH
def test_defect_15_point_masses_that_agree(name: str) -> None:
    for support, k in each_support(1, 2, 12):
        student = torch.full((2, 12), -200.0)
        student[0, 3], student[1, 11] = 200.0, 200.0
        signal = signal_of(support, student.clone(), k=k)
        value, gradient = solved(student, signal, torch.ones(2), divergence=name, support=support)
        assert value.tolist() == [0.0, 0.0]
        assert not gradient.any()


@OF_EACH
def test_defect_15_point_masses_that_disagree(name: str) -> None:
    for support, k in each_support(1, 2, 12):
        student = torch.full((2, 12), -200.0)
        teacher = student.clone()
        student[:, 3] = 200.0
        teacher[0, 4], teacher[1, 11] = 200.0, 200.0
        signal = signal_of(support, teacher, k=k)
        found = solved(student, signal, torch.ones(2), divergence=name, support=support)
        assert_finite(found, support)
        # One id renormalised is all there is; and a raw sum sees the student where the teacher is.
        if support in ("dense", "tail") or (support == "renormalized" and k == 12):
            assert bool((found[0] > 0.2).all())


def test_defect_15_point_masses_have_the_value_of_their_logits() -> None:
    student, teacher = torch.zeros(2, 30), torch.zeros(2, 30)
    student[:, 3] = 300.0  # every other probability underflows
    teacher[0, 3] = 300.0
    teacher[1, 8] = 300.0
    value, gradient = solved(student, DenseLogits(teacher), torch.ones(2), divergence="forward_kl")
    assert value.tolist() == [0.0, 300.0]
    assert not gradient[0].any()
    assert gradient[1, [3, 8]].tolist() == [1.0, -1.0]


def rows_of_minus_infinity() -> tuple[Tensor, Tensor]:
    student, teacher = logit_pair(5, 12)
    student[0, 3:6], teacher[0, 3:6] = -INFINITY, -INFINITY  # the same columns
    student[1, 3], teacher[1, 5] = -INFINITY, -INFINITY  # one each
    student[2, :6], teacher[2, 6:] = -INFINITY, -INFINITY  # nothing in common
    student[3, :11], teacher[3, :11] = -INFINITY, -INFINITY  # all but one
    student[4, :], teacher[4, 1:] = -1.0, -INFINITY  # one-hot
    return student, teacher


@OF_EACH
def test_defect_16_minus_infinity_is_a_probability_of_zero_and_never_nan(name: str) -> None:
    # -inf - -inf is NaN before torch.where looks away, and times zero it still is.
    for support, k in each_support(1, 3, 8, 12):
        student, teacher = rows_of_minus_infinity()
        given = {"divergence": name, "support": support}
        signal = signal_of(support, teacher, k=k)
        found = solved(student, signal, torch.ones(5), **given)
        assert_finite(found, support)
        assert float(found[1][0, 3:6].abs().max()) < NOTHING
        # Both are sure of one id, whose two logits are rounded where they are compared.
        assert float(found[0][3]) < 1e-6
        assert float(found[1][3].abs().max()) < 1e-6
        chosen: dict[str, Any] = {} if support == "dense" else {"top_k": k}
        again = solved(student, DenseLogits(teacher), torch.ones(5), **given, **chosen)
        torch.testing.assert_close(again, found, rtol=1e-5, atol=1e-6)


@OF_SOME
def test_defect_16_columns_forbidden_to_both_count_for_nothing(name: str) -> None:
    for support in SUPPORTS:
        student, teacher = logit_pair(5, 40)
        student[:, 7:20], teacher[:, 7:20] = -INFINITY, -INFINITY
        rest = [*range(7), *range(20, 40)]
        given = {"divergence": name, "support": support}
        value, gradient = solved(student, signal_of(support, teacher), torch.ones(5), **given)
        short = solved(
            student[:, rest], signal_of(support, teacher[:, rest]), torch.ones(5), **given
        )
        torch.testing.assert_close((value, gradient[:, rest]), short, rtol=2e-6, atol=1e-7)
        assert float(gradient[:, 7:20].abs().max()) < NOTHING


def test_defect_16_student_without_probability_where_the_teacher_has_some() -> None:
    student, teacher = logit_pair(2, 10)
    student[0, 4] = -INFINITY
    value, gradient = solved(student, DenseLogits(teacher), torch.ones(2), divergence="forward_kl")
    assert float(value[0]) > 1e30
    assert torch.isfinite(gradient).all()
    assert float(gradient[0, 4]) == pytest.approx(-float(teacher[0].softmax(0)[4]), rel=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in INFINITE_THERE])
def test_defect_16_student_without_probability_adds_the_teacher_s_probability(name: str) -> None:
    for temperature in (0.5, 1.0):
        student, teacher = logit_pair(2, 50)
        student[:, 7:9] = -INFINITY
        given = {"divergence": name, "support": "dense", "temperature": temperature}
        found = solved(student, DenseLogits(teacher), torch.ones(2), **given)
        # In float64 a probability of e^-100 is one that adds nothing, and no infinity times zero.
        student[:, 7:9] = -100 * temperature
        exact = expected(student, DenseLogits(teacher), torch.ones(2), **given)  # type: ignore[arg-type]
        torch.testing.assert_close(found[0].double(), exact[0], rtol=1e-6, atol=0)
        assert row_error(found[1], exact[1]) < 1e-6
        assert float(found[1][:, 7:9].abs().max()) < 1e-15
