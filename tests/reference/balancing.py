"""The balanced total by its formula, on tensors, with autograd for its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def balanced_total(
    ce: Tensor,
    terms: Sequence[Tensor],
    features: Sequence[Tensor] = (),
    *,
    ce_weight: float = 1.0,
    term_weights: Sequence[float],
    feature_weights: Sequence[float] = (),
    alpha: float = 1.0,
    epsilon: float = 1e-8,
    clamp: float = float("inf"),
) -> Tensor:
    """``CE + alpha s_k (KD + s_f F)``, no gradient through ``s_k`` and ``s_f``; positive losses."""
    task = ce_weight * ce
    kd = sum(weight * term for weight, term in zip(term_weights, terms, strict=True))
    assert isinstance(kd, Tensor)
    if features:
        total = sum(weight * one for weight, one in zip(feature_weights, features, strict=True))
        assert isinstance(total, Tensor)
        kd = kd + _ratio(kd, total, epsilon, clamp) * total
    return task + alpha * _ratio(task, kd, epsilon, clamp) * kd


def _ratio(wanted: Tensor, found: Tensor, epsilon: float, clamp: float) -> Tensor:
    with torch.no_grad():
        return (wanted / found.clamp(min=epsilon)).clamp(1 / clamp, clamp)
