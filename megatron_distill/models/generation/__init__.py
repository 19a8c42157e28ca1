"""Text written and scored by a model of any layout, with a cache of keys and values."""

from megatron_distill.models.generation.request import (
    AnswerScore,
    Ending,
    OnTokens,
    Sampling,
    ScoreRow,
    Stops,
    WriteRow,
    Written,
)

__all__ = [
    "AnswerScore",
    "Ending",
    "OnTokens",
    "Sampling",
    "ScoreRow",
    "Stops",
    "WriteRow",
    "Written",
]
