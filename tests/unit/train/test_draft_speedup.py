"""The speed-up of drafts: the best length, intervals, and the cost from FLOPs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_distill.models.flops import forward_flops_per_token
from megatron_distill.train.evaluation.draft_speedup import best_draft, draft_cost, speedup_of
from tests.distributed.megatron_world import small_architecture


def _figures(acceptance: float) -> dict[str, dict[str, float]]:
    """Of drafts that are accepted independently: arXiv 2211.17192, equation 1."""
    tokens = {
        str(g): (1 - acceptance ** (g + 1)) / (1 - acceptance) if acceptance < 1 else g + 1.0
        for g in range(1, 9)
    }
    return {
        "tokens_per_verification": tokens,
        "tokens_per_verification_stderr": dict.fromkeys(tokens, 0.01),
    }


@pytest.mark.parametrize(("acceptance", "cost"), [(0.5, 0.3), (0.8, 0.1), (0.9, 0.02), (0.2, 0.9)])
def test_the_best_draft_is_the_largest_quotient(acceptance: float, cost: float) -> None:
    figures = _figures(acceptance)
    found = best_draft(figures, cost=cost)
    speedups = {
        g: (1 - acceptance ** (g + 1)) / ((1 - acceptance) * (g * cost + 1)) for g in range(1, 9)
    }
    best = max(speedups, key=lambda g: speedups[g])
    assert found.keys() == {
        "best_draft", "draft_cost", "expected_speedup", "expected_speedup_stderr",
    }  # fmt: skip
    assert (found["best_draft"], found["draft_cost"]) == (best, cost)
    assert found["expected_speedup"] == pytest.approx(speedups[best], rel=1e-12)
    assert found["expected_speedup_stderr"] == pytest.approx(0.01 / (best * cost + 1))


def test_a_model_that_drafts_for_itself_is_as_fast_as_without_drafts() -> None:
    """All lengths are equal, and the shortest one is named."""
    found = best_draft(_figures(1.0), cost=1.0)
    assert (found["best_draft"], found["expected_speedup"]) == (1, 1.0)


def test_intervals_have_two_ends_and_the_least_one_counts() -> None:
    tokens = {"1": [1.5, 1.6], "2": [1.6, 3.0]}
    figures = {
        "tokens_per_verification": tokens,
        "tokens_per_verification_stderr": {"1": [0.1, 0.2]},
    }
    found = best_draft(figures, cost=0.25)
    assert found["best_draft"] == 1
    assert found["expected_speedup"] == pytest.approx([1.5 / 1.25, 1.6 / 1.25])
    assert found["expected_speedup_stderr"] == pytest.approx([0.1 / 1.25, 0.2 / 1.25])


def test_without_tokens_or_a_cost_there_is_no_figure() -> None:
    assert best_draft({"label_nll": 1.0}, cost=0.5) == {}
    assert best_draft(_figures(0.5), cost=None) == {}
    assert speedup_of({"blocks": 0}, draft=2, cost=0.5) == {}
    assert speedup_of({"tokens_per_verification": 2.0}, draft=2, cost=None) == {}


def test_the_cost_is_that_of_the_flops_of_a_token() -> None:
    student, teacher = small_architecture(num_layers=1), small_architecture(num_layers=3)
    own, other = (forward_flops_per_token(one, sequence_length=32) for one in (student, teacher))
    assert draft_cost(student, teacher, sequence_length=32) == own / other < 1
    assert draft_cost(teacher, replace(teacher), sequence_length=32) == 1
