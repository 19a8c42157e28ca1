"""Figures of single tokens, and their calibration errors over bins of equal mass.

The bounds of these bins depend on all tokens, so sums over batches are not enough: each token's
figures are kept.

Shapes: n tokens of a batch, on the host.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_distill.evaluation.calibration import Figures, equal_mass_error
from megatron_distill.losses.comparison import TokenComparison

__all__ = ["equal_mass_errors", "token_figures"]


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
