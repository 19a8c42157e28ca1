"""Weights of the gradient identity: what each temperature, label, blend and kept id gets; NaN in
unused rows stays there."""

from __future__ import annotations

import torch

from megatron_distill.ops import VocabShard
from megatron_distill.ops.divergence import WeightedDivergence, divergence_named
from megatron_distill.ops.kept_divergence import KeptTerm, RowGradient, TopKTarget
from megatron_distill.ops.pushforward import scale_rows_, softmax_weights
from megatron_distill.ops.statistics import Sweep

KL = divergence_named("forward_kl")
MODELS = ("student", "teacher")


def test_temperatures_share_nothing_and_labels_belong_to_temperature_one() -> None:
    terms = tuple(WeightedDivergence(KL, value, 3.0) for value in (2.0, 1.0))
    sweep = Sweep(MODELS, terms, full=True)
    kd, ce = torch.tensor([1.0, 0.5]), torch.tensor([0.25, 4.0])
    labels = torch.tensor([4, 8])
    first, second = softmax_weights(sweep, kd, ce, labels, VocabShard(9, 4, 8))
    assert (first.temperature, second.temperature) == (1.0, 2.0)
    ((columns, added),) = first.points
    assert not second.points
    assert columns.squeeze(1).tolist()[0] == 0
    assert added.squeeze(1).tolist() == [-0.25, 0.0]  # id 8 is on another shard
    assert first.student.squeeze(1).tolist() == [3.25, 5.5]
    assert second.student.squeeze(1).tolist() == [1.5, 0.75]
    assert second.teacher is not None
    assert second.teacher.squeeze(1).tolist() == [1.5, 0.75]


def test_a_blend_shares_its_weight_between_forward_and_reverse() -> None:
    term = WeightedDivergence(divergence_named("adaptive_kl"), 1.0, 2.0)
    sweep = Sweep(MODELS, (term,), full=False)
    (softmax,) = softmax_weights(sweep, torch.tensor([1.0, 0.0]), None, None, VocabShard(9, 0, 9))
    blended = softmax.blended({term.key: torch.tensor([[0.25], [torch.nan]])})
    assert blended.student.squeeze(1).tolist() == [0.5, 0.0]
    assert blended.teacher is not None
    assert blended.teacher.squeeze(1).tolist() == [0.5, 0.0]
    assert blended.curved[0].weight.squeeze(1).tolist() == [1.5, 0.0]
    assert blended.sparse


def test_kept_ids_add_a_multiple_of_the_softmax_and_points() -> None:
    term = WeightedDivergence(KL, 2.0, 3.0)
    target = TopKTarget(torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(2), "tail")
    solved = RowGradient(
        value=torch.zeros(2),
        slope=torch.tensor([4.0, torch.nan]),
        columns=torch.tensor([[1], [2]]),
        excess=torch.tensor([[-2.0], [torch.nan]]),
        log_normalizer=None,
        peak=torch.zeros(2),
        first_logit=torch.zeros(2),
    )
    sweep = Sweep(("student",), (), full=False, student_temperatures=(2.0,))
    (softmax,) = softmax_weights(
        sweep,
        torch.tensor([1.0, 0.0]),
        None,
        None,
        VocabShard(9, 0, 9),
        [(KeptTerm(term, target), solved)],
    )
    assert softmax.temperature == 2.0
    assert softmax.student.squeeze(1).tolist() == [6.0, 0.0]
    ((columns, added),) = softmax.points
    assert columns.squeeze(1).tolist() == [1, 2]
    assert added.squeeze(1).tolist() == [-3.0, 0.0]


def test_unused_rows_are_zero_even_if_nothing_in_them_is_finite() -> None:
    values = torch.randn(4, 9, generator=torch.Generator().manual_seed(5))
    values[1] = torch.nan
    weights = torch.tensor([[1.0], [0.0], [0.5], [2.0]])
    expected = values * weights
    expected[1] = 0
    assert torch.equal(scale_rows_(values, weights, sparse=True), expected)
