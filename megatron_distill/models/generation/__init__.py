"""Text written and scored by a model of any layout, with a cache of keys and values."""

from megatron_distill.models.generation.request import (
    Ending,
    OnTokens,
    Sampling,
    Score,
    ScoreRow,
    Stops,
    WriteRow,
    Written,
)

__all__ = [
    "Ending",
    "OnTokens",
    "Sampling",
    "Score",
    "ScoreRow",
    "Stops",
    "WriteRow",
    "Written",
]
