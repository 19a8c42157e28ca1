"""Sums of each part of the tokens: those of an objective of that part alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megatron_distill.losses import Term
from megatron_distill.ops import VocabShard
from megatron_distill.ops.fused_linear import Partition
from megatron_distill.signals import DenseLogits, Signal
from tests.reference.distillation import Problem
from tests.support.objective_runs import KEPT, recorded, run

TOKENS, PARTS = 61, 4
EMPTY = 2


@pytest.fixture
def problem() -> Problem:
    return Problem.random(tokens=TOKENS, seed=21)


@pytest.fixture
def partition() -> Partition:
    """Unequal parts that lie between each other, one of them empty."""
    ids = torch.randint(0, 7, (TOKENS,), generator=torch.Generator().manual_seed(4))
    return Partition(torch.tensor([0, 0, 0, 0, 1, 1, 3])[ids], PARTS)


def only(problem: Problem, partition: Partition, part: int) -> Problem:
    """The same problem, in which the tokens of the other parts count for nothing."""
    is_mine = partition.ids == part
    return problem.with_weights(problem.ce_weights_N * is_mine, problem.kd_weights_N * is_mine)


NONLINEAR = [Term("adaptive_kl"), Term("js_divergence", 0.5, 2.0), Term("total_variation", 0.1)]


CASES: dict[str, tuple[Sequence[Term], str]] = {
    "no term": ([], "live"),
    "curved terms": (NONLINEAR, "live"),
    "kept ids of a live teacher": (KEPT, "live"),
    "given logits": ([Term(), *NONLINEAR], "logits"),
    "recorded": (KEPT, "recorded"),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_add_up_and_change_nothing_else(
    problem: Problem, partition: Partition, case: str
) -> None:
    terms, kind = CASES[case]
    logits = problem.teacher_hidden @ problem.teacher_weight.t()
    signals: dict[str, Signal | None] = {
        "live": None,
        "logits": DenseLogits(logits),
        "recorded": recorded(problem, KEPT),
    }
    signal = signals[kind]
    total, report, hidden, weight = run(problem, terms, signal=signal, partition=partition)
    plain = run(problem, terms, signal=signal)
    assert torch.equal(total, plain[0])
    assert torch.equal(hidden, plain[2])
    assert torch.equal(weight, plain[3])
    assert report.keys() == plain[1].keys()
    for name, value in plain[1].items():
        assert torch.equal(report[name][0], value), name
        parts = report[name][1:]
        assert float(parts.double().sum()) == pytest.approx(float(value), rel=1e-6), name
        for part in range(PARTS):
            alone = run(only(problem, partition, part), terms, signal=signal)[1][name]
            assert float(parts[part]) == pytest.approx(float(alone), rel=1e-6, abs=1e-9), name


def test_non_finite_values_stay_in_its_part(problem: Problem, partition: Partition) -> None:
    problem.ce_weights_N[:] = problem.kd_weights_N[:] = 1 / TOKENS
    spoiled = int((partition.ids == 1).nonzero()[3])
    hidden = problem.hidden_NH.clone()
    plain = run(problem, partition=partition)[1]
    problem.hidden_NH[spoiled] = torch.nan
    report = run(problem, partition=partition)[1]
    problem.hidden_NH[:] = hidden
    for name in ("ce", "kd", "student_entropy"):
        assert report[name].isnan().tolist() == [True, False, True, False, False], name
        assert torch.equal(report[name][[1, 3, 4]], plain[name][[1, 3, 4]]), name


def test_a_shard_without_real_columns_and_no_token_at_all(partition: Partition) -> None:
    empty = Problem.random(tokens=0, seed=1)
    none = Partition(torch.zeros(0, dtype=torch.int64), PARTS)
    report = run(empty, partition=none, shard=VocabShard(203, 0, 203))[1]
    assert all(bool((value == 0).all()) and value.shape == (5,) for value in report.values())


def test_ids_of_another_number_of_tokens_are_refused(problem: Problem) -> None:
    wrong = Partition(torch.zeros(3, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match=f"partition has 3 rows for {TOKENS} tokens"):
        run(problem, partition=wrong)
