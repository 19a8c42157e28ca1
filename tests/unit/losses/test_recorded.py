"""The objective on what was written down of a teacher: what a live one would have given."""

from __future__ import annotations

import pytest
import torch

from megatron_distill.losses import Term
from megatron_distill.signals import HiddenState, Recorded, Sampled, TopK
from tests.reference.distillation import Problem
from tests.support.objective_runs import KEPT, recorded, run


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem.random(tokens=37, seed=5)


def test_it_equals_the_live_teacher_report_included(problem: Problem) -> None:
    live = HiddenState(problem.teacher_hidden, problem.teacher_weight)
    total, report, gradient, _ = run(problem, KEPT, signal=live)
    stored_total, stored_report, stored_gradient, _ = run(
        problem, KEPT, signal=recorded(problem, KEPT)
    )
    torch.testing.assert_close(stored_total, total, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(stored_gradient, gradient, rtol=1e-5, atol=1e-7)
    assert stored_report.keys() == report.keys()
    for name, value in report.items():
        torch.testing.assert_close(stored_report[name], value, rtol=2e-6, atol=1e-7, msg=name)


def test_numbers_of_tokens_that_do_not_count_may_be_anything(problem: Problem) -> None:
    signal = recorded(problem, KEPT)
    unlearned, unlabelled = problem.kd_weights_N == 0, problem.ce_weights_N == 0
    assert bool(unlearned.any())
    assert bool(unlabelled.any())
    spoiled = Recorded(
        signal.by_term,
        signal.entropy.masked_fill(unlearned, torch.nan),
        signal.label_log_prob.masked_fill(unlabelled, -torch.inf),
    )
    report = run(problem, KEPT, signal=signal)[1]
    same = run(problem, KEPT, signal=spoiled)[1]
    for name, value in report.items():
        assert torch.equal(same[name], value), name


def test_unknown_statistics_are_not_reported(problem: Problem) -> None:
    report = run(problem, KEPT, signal=Recorded(recorded(problem, KEPT).by_term))[1]
    assert not {"teacher_ce", "teacher_entropy"} & report.keys()
    assert {"student_entropy", "top1_agreement", "topk_mass"} <= report.keys()


def test_draws_have_no_most_probable_id_to_agree_with(problem: Problem) -> None:
    tokens = problem.labels_N.shape[0]
    ids = torch.arange(3).expand(tokens, 3).contiguous()
    drawn = Recorded((Sampled(ids, torch.ones_like(ids)),))
    report = run(problem, [Term("forward_kl")], signal=drawn)[1]
    assert "student_entropy" in report
    assert not {"top1_agreement", "topk_mass"} & report.keys()


def test_every_term_needs_something_of_its_own(problem: Problem) -> None:
    with pytest.raises(ValueError, match="has 3 terms, the objective 2"):
        run(problem, KEPT[:2], signal=recorded(problem, KEPT))


@pytest.mark.parametrize(
    ("by_term", "scalars", "message"),
    [
        ((), {}, "by_term is empty"),
        ((3, 4), {}, "by_term.1 has 4 tokens, the first 3"),
        ((3,), {"entropy": torch.zeros(4)}, "entropy is of shape"),
        ((3,), {"label_log_prob": torch.zeros(3, 1)}, "label_log_prob is of shape"),
    ],
)
def test_mismatched_parts_are_refused(
    by_term: tuple[int, ...], scalars: dict[str, torch.Tensor], message: str
) -> None:
    kept = tuple(
        TopK(torch.zeros(n, 2, dtype=torch.int64), torch.zeros(n, 2), torch.zeros(n))
        for n in by_term
    )
    with pytest.raises(ValueError, match=message):
        Recorded(kept, **scalars)
