"""Weights of the gradient identity: what each temperature, label, blend and kept id gets; NaN in
unused rows stays there."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_distill.ops import VocabShard
from megatron_distill.ops.divergences import WeightedDivergence, divergence_named
from megatron_distill.ops.softmax_gradient import (
    SoftmaxWeights,
    TailWeight,
    scale_rows_,
    scale_softmax_,
    softmax_weights,
)
from megatron_distill.ops.statistics import StatisticsSpec
from megatron_distill.ops.topk_divergence import IdTerm, IdTermGradient, SolvedIdTerm

KL = divergence_named("forward_kl")
MODELS = ("student", "teacher")


def test_temperatures_share_nothing_and_labels_belong_to_temperature_one() -> None:
    terms = tuple(WeightedDivergence(KL, value, 3.0) for value in (2.0, 1.0))
    spec = StatisticsSpec(MODELS, terms, full=True)
    kd, ce = torch.tensor([1.0, 0.5]), torch.tensor([0.25, 4.0])
    labels = torch.tensor([4, 8])
    first, second = softmax_weights(spec, kd, ce, labels, VocabShard(9, 4, 8))
    assert (first.temperature, second.temperature) == (1.0, 2.0)
    ((columns, added),) = first.scatter
    assert not second.scatter
    assert columns.squeeze(1).tolist()[0] == 0
    assert added.squeeze(1).tolist() == [-0.25, 0.0]  # id 8 is on another shard
    assert first.student.squeeze(1).tolist() == [3.25, 5.5]
    assert second.student.squeeze(1).tolist() == [1.5, 0.75]
    assert second.teacher is not None
    assert second.teacher.squeeze(1).tolist() == [1.5, 0.75]


def test_a_blend_shares_its_weight_between_forward_and_reverse() -> None:
    term = WeightedDivergence(divergence_named("adaptive_kl"), 1.0, 2.0)
    spec = StatisticsSpec(MODELS, (term,), full=False)
    (softmax,) = softmax_weights(spec, torch.tensor([1.0, 0.0]), None, None, VocabShard(9, 0, 9))
    blended = softmax.blended({term.key: torch.tensor([[0.25], [torch.nan]])})
    assert blended.student.squeeze(1).tolist() == [0.5, 0.0]
    assert blended.teacher is not None
    assert blended.teacher.squeeze(1).tolist() == [0.5, 0.0]
    assert blended.nonlinear[0].weight.squeeze(1).tolist() == [1.5, 0.0]
    assert blended.sparse


def test_top_k_ids_add_a_multiple_of_the_softmax_and_a_scatter() -> None:
    term = WeightedDivergence(KL, 2.0, 3.0)
    solved = IdTermGradient(
        value=torch.zeros(2),
        slope=torch.tensor([4.0, torch.nan]),
        columns=torch.tensor([[1], [2]]),
        excess=torch.tensor([[-2.0], [torch.nan]]),
        log_normalizer=None,
        peak=torch.zeros(2),
        first_logit=torch.zeros(2),
    )
    spec = StatisticsSpec(("student",), (), full=False, student_temperatures=(2.0,))
    (softmax,) = softmax_weights(
        spec,
        torch.tensor([1.0, 0.0]),
        None,
        None,
        VocabShard(9, 0, 9),
        [SolvedIdTerm(IdTerm(term, "term", "tail", None), solved)],
    )
    assert softmax.temperature == 2.0
    assert softmax.student.squeeze(1).tolist() == [6.0, 0.0]
    ((columns, added),) = softmax.scatter
    assert columns.squeeze(1).tolist() == [1, 2]
    assert added.squeeze(1).tolist() == [-3.0, 0.0]


def test_unused_rows_are_zero_even_if_nothing_in_them_is_finite() -> None:
    values = torch.randn(4, 9, generator=torch.Generator().manual_seed(5))
    values[1] = torch.nan
    weights = torch.tensor([[1.0], [0.0], [0.5], [2.0]])
    expected = values * weights
    expected[1] = 0
    assert torch.equal(scale_rows_(values, weights, sparse=True), expected)


def test_tail_weights_of_any_size_leave_no_residue_on_top_k_ids() -> None:
    softmax = torch.randn(3, 7, generator=torch.Generator().manual_seed(6)).softmax(1)
    columns, topk_mask = torch.tensor([[4, 0], [1, 0], [6, 2]]), torch.tensor([True, False])
    topk_mask = topk_mask.expand(3, 2).clone()
    topk_mask[2] = True
    one = TailWeight(torch.tensor([[1e12], [0.0], [2.0]]), columns, topk_mask)
    other = TailWeight(torch.tensor([[3.0], [1e20], [5.0]]), columns.flip(1), topk_mask.flip(1))
    weights = SoftmaxWeights(1.0, torch.tensor([[0.5], [0.5], [0.0]]), None, (), (), True)
    expected = softmax.double() * weights.student.double()
    kept = torch.zeros(3, 7, dtype=torch.bool)
    kept[0, 4] = kept[1, 1] = kept[2, 6] = kept[2, 2] = True
    for tail_weights in ((), (one,), (one, other), (other, one, one)):
        total = sum((each.weight.double() for each in tail_weights), torch.zeros(3, 1).double())
        exact = expected + torch.where(kept, 0.0, softmax.double() * total)
        found = scale_softmax_(
            softmax.clone(),
            replace(weights, tail_weights=tail_weights),
            lambda _: torch.empty(3, 7),
            factor=torch.ones(3, 1),
        )
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
