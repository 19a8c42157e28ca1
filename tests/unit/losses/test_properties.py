"""Laws of every divergence on every support, through both public entries, over drawn shapes,
spreads and temperatures: no tokens, one kept id and all of them, logits of any spread up to 30.

That a merge over ranks equals the whole is drawn in tests/unit/ops/test_statistics.py, for any
split of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_distill.losses import fused_linear_objective
from megatron_distill.signals import DenseLogits
from tests.reference.distillation import cross_entropy
from tests.reference.logits import logit_pair
from tests.support.divergence_runs import (
    NAMES,
    PROPER,
    REPRESENTATIVE,
    SUPPORTS,
    signal_of,
    solved,
    term_of,
)

FEW = settings(max_examples=8, deadline=None)
EACH = pytest.mark.parametrize("name", NAMES)
# For laws that no formula decides.
SOME = pytest.mark.parametrize("name", REPRESENTATIVE)


@dataclass(frozen=True)
class Case:
    """Logits of two models, and how they are compared."""

    student: Tensor
    teacher: Tensor
    support: str
    k: int
    temperature: float

    @property
    def rounding(self) -> float:
        """Rounding of an fp32 logit, in nats."""
        largest = torch.cat([self.student, self.teacher]).abs().amax() if len(self.student) else 0
        return 1e-7 * (1 + float(largest) / self.temperature)

    def solved(
        self, name: str, upstream: Tensor | None = None, **changed: Any
    ) -> tuple[Tensor, Tensor]:
        """Values and gradient, of the case or of other logits."""
        student = changed.pop("student", self.student)
        teacher = changed.pop("teacher", self.teacher)
        if upstream is None:
            upstream = torch.ones(len(student))
        signal = signal_of(self.support, teacher, k=self.k, temperature=self.temperature)
        given = {"divergence": name, "support": self.support, "temperature": self.temperature}
        return solved(student, signal, upstream, **given)

    def objective(
        self, name: str, labels: Tensor, weights: Tensor, **changed: Any
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Report and gradient of the fused objective on a head that passes the logits on."""
        leaf = changed.get("student", self.student).detach().requires_grad_()
        total, report = fused_linear_objective(
            leaf,
            torch.eye(leaf.shape[1]),
            DenseLogits(changed.get("teacher", self.teacher)),
            labels,
            ce_weights=weights,
            kd_weights=weights,
            terms=[term_of(name, self.support, k=self.k, temperature=self.temperature)],
            chunk_tokens=4,
            ce_coefficient=changed.get("ce_coefficient", 1.0),
        )
        (gradient,) = torch.autograd.grad(total, leaf)
        return report | {"total": total.detach()}, gradient


@st.composite
def cases(
    draw: st.DrawFn, *, supports: tuple[str, ...] = tuple(SUPPORTS), every_id: bool = False
) -> Case:
    tokens, vocab = draw(st.integers(0, 6)), draw(st.integers(2, 70))
    k = vocab if every_id else draw(st.integers(1, vocab))
    spread = draw(st.floats(0.1, 30.0))
    pair = logit_pair(tokens, vocab, draw(st.integers(0, 10**6)), spread=spread)
    temperature = draw(st.sampled_from([0.5, 1.0, 2.0, 4.0]))
    return Case(*pair, draw(st.sampled_from(supports)), k, temperature)


def labels_of(case: Case) -> Tensor:
    return torch.arange(len(case.student)) % case.student.shape[1]


def leaves_a_tail(case: Case) -> bool:
    """Whether fp32 can say what the student leaves to ids that are not kept."""
    if case.support != "tail" or case.k == case.student.shape[1]:
        return True
    log_q = (case.student.double() / case.temperature).log_softmax(1)
    ids = case.teacher.topk(case.k, 1).indices
    tail = log_q.scatter(1, ids, -torch.inf).logsumexp(1)
    return bool((tail > -70.0).all())


@EACH
@FEW
@given(case=cases())
def test_the_gradient_on_the_logits_sums_to_zero(name: str, case: Case) -> None:
    assume(leaves_a_tail(case))
    _, gradient = case.solved(name)
    tolerance = 10 * case.rounding / min(case.temperature, 1.0)
    assert bool((gradient.sum(1).abs() < tolerance).all())
    _, gradient = case.objective(name, labels_of(case), torch.ones(len(case.student)))
    assert bool((gradient.sum(1).abs() < tolerance + 2e-6).all())


@FEW
@given(case=cases(supports=("dense", "tail", "raw")), shift=st.integers(0, 70))
def test_forward_kl_against_a_one_hot_teacher_is_cross_entropy(case: Case, shift: int) -> None:
    count, vocab = case.student.shape
    labels = (labels_of(case) + shift) % vocab
    teacher = torch.full((count, vocab), -torch.inf).scatter_(1, labels[:, None], 0.0)
    value, gradient = case.solved("forward_kl", teacher=teacher)
    leaf = (case.student.double() / case.temperature).requires_grad_()
    expected = cross_entropy(leaf, labels)
    (exact,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(
        value.double(), expected.detach(), rtol=2e-6, atol=10 * case.rounding
    )
    if leaves_a_tail(case):
        torch.testing.assert_close(
            gradient.double(), exact / case.temperature, rtol=1e-5, atol=1e-6
        )
    report, _ = case.objective("forward_kl", labels, torch.ones(count), teacher=teacher)
    total = expected.detach().sum()
    torch.testing.assert_close(report["kd"].double(), total, rtol=2e-6, atol=60 * case.rounding)
    if case.temperature == 1.0:
        torch.testing.assert_close(report["kd"], report["ce"], rtol=2e-6, atol=60 * case.rounding)


@EACH
@FEW
@given(case=cases(supports=tuple(PROPER)), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_student_equal_to_its_teacher_has_exactly_no_loss_and_no_gradient(
    name: str, case: Case, dtype: torch.dtype
) -> None:
    logits = case.teacher.to(dtype)
    value, gradient = case.solved(name, student=logits, teacher=logits.clone())
    assert not value.any()
    assert not gradient.any()
    report, gradient = case.objective(
        name, labels_of(case), torch.ones(len(logits)), student=case.teacher, ce_coefficient=0.0
    )
    assert float(report["total"]) == 0.0
    assert not gradient.any()


@SOME
@FEW
@given(case=cases(), garbage=st.sampled_from([0.0, 1e4, torch.nan, torch.inf, -torch.inf]))
def test_defect_05_masked_tokens_change_nothing(name: str, case: Case, garbage: float) -> None:
    count = len(case.student)
    weights = (torch.arange(count) % 3 != 1).float() * 0.5
    masked = weights == 0
    dirty = {
        "student": case.student.masked_fill(masked[:, None], garbage),
        "teacher": case.teacher.masked_fill(masked[:, None], -garbage),
    }
    clean, found = (case.solved(name, weights, **changed) for changed in ({}, dirty))
    assert torch.equal(found[0][~masked], clean[0][~masked])
    assert torch.equal(found[1], clean[1])
    assert not found[1][masked].any()
    labels = labels_of(case)
    clean_report, expected = case.objective(name, labels, weights)
    report, gradient = case.objective(name, labels.masked_fill(masked, -1), weights, **dirty)
    assert report == clean_report
    assert torch.equal(gradient, expected)


@EACH
@FEW
@given(case=cases(supports=("tail", "renormalized", "raw"), every_id=True))
def test_a_top_k_of_all_ids_is_the_whole_vocabulary(name: str, case: Case) -> None:
    whole = Case(case.student, case.teacher, "dense", case.k, case.temperature)
    value, gradient = case.solved(name)
    expected = whole.solved(name)
    torch.testing.assert_close(value, expected[0], rtol=5e-6, atol=10 * case.rounding)
    bound = 20 * case.rounding / min(case.temperature, 1.0)
    if name != "total_variation":  # has a kink, where p and q are the same but for rounding
        torch.testing.assert_close(gradient, expected[1], rtol=1e-5, atol=bound)


@EACH
@FEW
@given(case=cases(supports=tuple(PROPER)))
def test_divergences_are_never_negative(name: str, case: Case) -> None:
    value, _ = case.solved(name)
    assert bool((value > -2 * case.rounding).all())
    report, _ = case.objective(name, labels_of(case), torch.ones(len(case.student)))
    assert float(report["kd"]) > -2 * case.rounding * (1 + len(case.student))
