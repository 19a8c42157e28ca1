"""Calibration errors: confidence against accuracy, in bins of equal width and of equal mass.

In bins of equal width a confident model has most of its tokens in the last one, whose mean hides
differences within it (adaptive calibration error: Nixon et al., arXiv 1904.01685, section 3).

Shapes: n tokens, items or texts, on the host.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["BINS", "Figures", "equal_mass_error", "item_gaps", "signed_gaps"]

BINS: Final = 15  # as usual for calibration errors

Figures = NDArray[np.float64]


def equal_mass_error(weights: Figures, confidence: Figures, right: Figures) -> float:
    """Return the sum over `BINS` bins of share * abs(accuracy - confidence).

    A token is in the bin of the middle of its weight, in the order of confidence.
    """
    order = np.lexsort((right, confidence))
    weights, gaps = weights[order], (weights * (right - confidence))[order]
    ends = weights.cumsum()
    bins = ((ends - weights / 2) * BINS / ends[-1]).astype(np.int64).clip(max=BINS - 1)
    return float(np.abs(np.bincount(bins, gaps, BINS)).sum() / ends[-1])


def signed_gaps(gaps_Bn: Figures) -> Figures:
    """Return the gaps ``[n]`` of all bins together, with the sign that a bin has over all n.

    Their sum is the sum of the bins' absolute gaps. Between changes of sign the calibration error
    is linear in them, so that its error is that of a mean.
    """
    signed: Figures = np.sign(gaps_Bn.sum(1)) @ gaps_Bn
    return signed


def item_gaps(confidence: Figures, right: Figures) -> Figures:
    """Return the signed gaps ``[n]`` of items in bins of equal width; their mean is the error."""
    bins = (confidence * BINS).astype(np.int64).clip(0, BINS - 1)
    gaps_Bn = np.zeros((BINS, len(confidence)))
    gaps_Bn[bins, np.arange(len(confidence))] = right - confidence
    return signed_gaps(gaps_Bn)
