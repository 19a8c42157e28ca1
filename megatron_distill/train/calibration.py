"""Calibration errors over bins of equal mass, in which each bin has the same weight of tokens.

In bins of equal width a confident model has most of its tokens in the last one, whose mean hides
differences within it (adaptive calibration error: Nixon et al., arXiv 1904.01685, section 3). The
bounds depend on all tokens, so sums over batches are not enough: each token's figures are kept.

Shapes: n tokens of a batch, on the host.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_distill.losses.comparison import TokenComparison

__all__ = ["BINS", "Figures", "equal_mass_error", "equal_mass_errors", "token_figures"]

BINS: Final = 15  # as usual for calibration errors

Figures = NDArray[np.float64]


def token_figures(found: TokenComparison, weights: Tensor) -> Figures:
    """Return weight, confidence, and whether label and teacher agree, [4, n], of counted tokens.

    Without a teacher its row is NaN.
    """
    nothing = torch.full_like(found.confidence, torch.nan)
    agrees = nothing if found.teacher_top is None else found.student_top == found.teacher_top
    rows = [weights, found.confidence, found.is_label, agrees]
    # One copy: a choice on the device would be another wait for it.
    figures: Figures = torch.stack([row.double() for row in rows]).cpu().numpy()
    return figures[:, figures[0] > 0]


def equal_mass_error(weights: Figures, confidence: Figures, right: Figures) -> float:
    """Return the sum over `BINS` bins of share * abs(accuracy - confidence).

    A token is in the bin of the middle of its weight, in the order of confidence.
    """
    order = np.lexsort((right, confidence))
    weights, gaps = weights[order], (weights * (right - confidence))[order]
    ends = weights.cumsum()
    bins = ((ends - weights / 2) * BINS / ends[-1]).astype(np.int64).clip(max=BINS - 1)
    return float(np.abs(np.bincount(bins, gaps, BINS)).sum() / ends[-1])


def equal_mass_errors(tokens: Figures) -> dict[str, float]:
    """Return the errors of all tokens, against labels and teacher.

    `tokens`: `token_figures` of all ranks. No standard error: other texts would move the bounds of
    the bins too.
    """
    weights, confidence, label, teacher = tokens
    errors: dict[str, float] = {}
    if len(weights):
        errors["calibration_error_equal_mass"] = equal_mass_error(weights, confidence, label)
        if not np.isnan(teacher).any():
            errors["calibration_error_to_teacher_equal_mass"] = equal_mass_error(
                weights, confidence, teacher
            )
    return errors
