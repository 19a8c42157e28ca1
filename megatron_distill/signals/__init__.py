"""What a teacher says, and where it comes from."""

from megatron_distill.signals.types import DenseLogits, HiddenState, Signal, Teacher

__all__ = ["DenseLogits", "HiddenState", "Signal", "Teacher"]
