"""The expected speed-up of decoding with a draft, from tokens per verification and FLOPs.

A block of g drafts costs g steps of the student and one of the teacher, which reads them together
in the time of a step. With c, the cost of the student's step over that of the teacher's, a block of
t tokens is as fast as ``t / (g c + 1)`` steps of the teacher (Leviathan et al., arXiv 2211.17192,
theorem 3.8).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.flops import forward_flops_per_token

__all__ = ["best_draft", "draft_cost", "speedup_of"]

_DIGITS: Final = 9  # of speed-ups that are compared: rounding does not choose among equal ones


def draft_cost(student: Architecture, teacher: Architecture, *, sequence_length: int) -> float:
    """Return the FLOPs of a token's forward pass in the student over those in the teacher."""
    own, other = (
        forward_flops_per_token(shape, sequence_length=sequence_length)
        for shape in (student, teacher)
    )
    return own / other


def speedup_of(figures: Mapping[str, Any], *, draft: int, cost: float | None) -> dict[str, Any]:
    """Return the speed-up of drafts of one length, its standard error, and the cost of a draft.

    figures: with `tokens_per_verification`, a number or the ends of an interval, and its error.
    Empty without the tokens, or where the cost is not known.
    """
    tokens = figures.get("tokens_per_verification")
    if tokens is None or cost is None:
        return {}
    factor = 1.0 / (draft * cost + 1.0)
    found = {"draft_cost": cost, "expected_speedup": _scaled(tokens, factor)}
    error = figures.get("tokens_per_verification_stderr")
    return found if error is None else found | {"expected_speedup_stderr": _scaled(error, factor)}


def best_draft(figures: Mapping[str, Any], *, cost: float | None) -> dict[str, Any]:
    """Return the length of drafts with the largest speed-up, `best_draft`, and its `speedup_of`.

    figures: with `tokens_per_verification` and its error by length. Of equal speed-ups the shortest
    drafts are best, and of intervals the least ends count. Empty as `speedup_of`.
    """
    tokens = figures.get("tokens_per_verification")
    if not tokens or cost is None:
        return {}
    errors = figures["tokens_per_verification_stderr"]
    found = {}
    for length, value in tokens.items():
        own = {"tokens_per_verification": value}
        if length in errors:
            own["tokens_per_verification_stderr"] = errors[length]
        found[int(length)] = speedup_of(own, draft=int(length), cost=cost)

    def rank(length: int) -> tuple[float, int]:
        value = found[length]["expected_speedup"]
        return round(value[0] if isinstance(value, list) else value, _DIGITS), -length

    best = max(found, key=rank)
    return {"best_draft": best, **found[best]}


def _scaled(value: float | list[float], factor: float) -> float | list[float]:
    return [one * factor for one in value] if isinstance(value, list) else value * factor
