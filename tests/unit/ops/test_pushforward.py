"""Weights of the gradient identity: what each temperature, label, blend and kept id gets; NaN in
unused rows stays there."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_distill.ops.softmax_gradient import (
    SoftmaxWeights,
    TailWeight,
    scale_softmax_,
)


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
