"""A teacher's signals for the tokens of a micro-batch, and their conversion to targets."""

from megatron_distill.signals.logits import DenseLogits, HiddenState, LogitRule, LogitSource
from megatron_distill.signals.recorded import Recorded
from megatron_distill.signals.sampled import Sampled
from megatron_distill.signals.targets import (
    ClassDivergence,
    IdGradient,
    IdTarget,
    Support,
    TermView,
)
from megatron_distill.signals.teacher import (
    IdSignal,
    OnDemand,
    Signal,
    Signals,
    SignalsByTeacher,
    Teacher,
    WithFeatures,
)
from megatron_distill.signals.topk import TopK

__all__ = [
    "ClassDivergence",
    "DenseLogits",
    "HiddenState",
    "IdGradient",
    "IdSignal",
    "IdTarget",
    "LogitRule",
    "LogitSource",
    "OnDemand",
    "Recorded",
    "Sampled",
    "Signal",
    "Signals",
    "SignalsByTeacher",
    "Support",
    "Teacher",
    "TermView",
    "TopK",
    "WithFeatures",
]
