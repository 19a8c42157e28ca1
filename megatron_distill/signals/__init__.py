"""What a teacher says, whatever it is and wherever it runs."""

from megatron_distill.signals.types import (
    DenseLogits,
    HiddenState,
    Recorded,
    Sampled,
    Signal,
    Teacher,
    TopK,
    WithFeatures,
)

__all__ = [
    "DenseLogits",
    "HiddenState",
    "Recorded",
    "Sampled",
    "Signal",
    "Teacher",
    "TopK",
    "WithFeatures",
]
