"""The objective on what was written down of a teacher: what a live one would have given."""

from __future__ import annotations

import pytest
import torch

from megatron_distill.losses import Term, fused_linear_objective
from megatron_distill.ops import vocab_parallel_topk
from megatron_distill.signals import HiddenState, Recorded, Sampled, TopK
from tests.reference.distillation import Problem, cross_entropy, entropy

TERMS = [
    Term("forward_kl", 0.6, top_k=8),
    Term("reverse_kl", 0.3, 2.0, top_k=5),
    Term("js_divergence", 0.8, top_k=8, support="renormalized"),
]


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem.random(tokens=37, seed=5)


def teacher_logits(problem: Problem) -> torch.Tensor:
    return problem.teacher_hidden @ problem.teacher_weight.t()


def recorded(problem: Problem, terms: list[Term]) -> Recorded:
    logits = teacher_logits(problem)
    by_term = []
    for term in terms:
        assert term.top_k is not None
        kept = vocab_parallel_topk(logits, term.top_k, temperature=term.temperature)
        by_term.append(kept)
    double = logits.double()
    label = -cross_entropy(double, problem.labels_N)
    return Recorded(tuple(by_term), entropy(double).float(), label.float())


def run(
    problem: Problem, signal: HiddenState | Recorded, terms: list[Term]
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    hidden = problem.hidden_NH.detach().requires_grad_()
    total, report = fused_linear_objective(
        hidden,
        problem.weight_GH.detach(),
        signal,
        problem.labels_N,
        ce_weights=problem.ce_weights_N,
        kd_weights=problem.kd_weights_N,
        terms=terms,
        chunk_tokens=16,
    )
    total.backward()
    assert hidden.grad is not None
    return total.detach(), report, hidden.grad


def test_it_is_what_the_live_teacher_gives_report_included(problem: Problem) -> None:
    live = HiddenState(problem.teacher_hidden, problem.teacher_weight)
    total, report, gradient = run(problem, live, TERMS)
    stored_total, stored_report, stored_gradient = run(problem, recorded(problem, TERMS), TERMS)
    torch.testing.assert_close(stored_total, total, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(stored_gradient, gradient, rtol=1e-5, atol=1e-7)
    assert stored_report.keys() == report.keys()
    for name, value in report.items():
        torch.testing.assert_close(stored_report[name], value, rtol=2e-6, atol=1e-7, msg=name)


def test_numbers_of_tokens_that_do_not_count_may_be_anything(problem: Problem) -> None:
    signal = recorded(problem, TERMS)
    assert signal.entropy is not None
    assert signal.label_log_prob is not None
    unlearned, unlabelled = problem.kd_weights_N == 0, problem.ce_weights_N == 0
    assert bool(unlearned.any())
    assert bool(unlabelled.any())
    spoiled = Recorded(
        signal.by_term,
        signal.entropy.masked_fill(unlearned, torch.nan),
        signal.label_log_prob.masked_fill(unlabelled, -torch.inf),
    )
    _, report, _ = run(problem, signal, TERMS)
    _, same, _ = run(problem, spoiled, TERMS)
    for name, value in report.items():
        assert torch.equal(same[name], value), name


def test_what_is_not_known_is_not_reported(problem: Problem) -> None:
    _, report, _ = run(problem, Recorded(recorded(problem, TERMS).by_term), TERMS)
    assert not {"teacher_ce", "teacher_entropy"} & report.keys()
    assert {"student_entropy", "top1_agreement", "topk_mass"} <= report.keys()


def test_draws_have_no_most_probable_id_to_agree_with(problem: Problem) -> None:
    tokens = problem.labels_N.shape[0]
    ids = torch.arange(3).expand(tokens, 3).contiguous()
    drawn = Recorded((Sampled(ids, torch.ones_like(ids)),))
    _, report, _ = run(problem, drawn, [Term("forward_kl")])
    assert "student_entropy" in report
    assert not {"top1_agreement", "topk_mass"} & report.keys()


def test_every_term_needs_something_of_its_own(problem: Problem) -> None:
    with pytest.raises(ValueError, match="has 3 terms, the objective 2"):
        run(problem, recorded(problem, TERMS), TERMS[:2])


@pytest.mark.parametrize(
    ("by_term", "scalars", "message"),
    [
        ((), {}, "by_term is empty"),
        ((3, 4), {}, "by_term.1 has 4 tokens, the first 3"),
        ((3,), {"entropy": torch.zeros(4)}, "entropy is of shape"),
        ((3,), {"label_log_prob": torch.zeros(3, 1)}, "label_log_prob is of shape"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    by_term: tuple[int, ...], scalars: dict[str, torch.Tensor], message: str
) -> None:
    kept = tuple(
        TopK(torch.zeros(n, 2, dtype=torch.int64), torch.zeros(n, 2), torch.zeros(n))
        for n in by_term
    )
    with pytest.raises(ValueError, match=message):
        Recorded(kept, **scalars)
