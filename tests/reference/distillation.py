"""Float64 oracles of the objective: whole matrices, one formula each, autograd for gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Largest error of a value relative to the oracle's, and of a gradient relative to the largest
# entry of its row, by the dtype in which logits and gradients are stored. Statistics of bf16 logits
# are fp32, so that only the stored gradient is coarser.
VALUE_TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-6}
GRADIENT_TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2**-8}


def forward_kl(student_NG: Tensor, teacher_NG: Tensor, temperature: float = 1.0) -> Tensor:
    """Sum over the vocabulary of p log(p/q), with 0 log 0 = 0."""
    log_p = (teacher_NG.double() / temperature).log_softmax(1)
    log_q = (student_NG.double() / temperature).log_softmax(1)
    return torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q)).sum(1)


def cross_entropy(logits_NG: Tensor, labels_N: Tensor) -> Tensor:
    """Negative log probability of the labels."""
    return -logits_NG.double().log_softmax(1)[torch.arange(len(labels_N)), labels_N]


def entropy(logits_NG: Tensor) -> Tensor:
    """Entropy in nats."""
    log_q = logits_NG.double().log_softmax(1)
    return -(log_q.exp() * log_q).sum(1)


def capped(raw: Tensor, softcap: float | None, scale: float) -> Tensor:
    """Scaled, then soft-capped logits."""
    scaled = raw * scale
    return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)


def row_error(ours: Tensor, oracle: Tensor) -> float:
    """Largest error of any row relative to its largest entry; none allowed in a row of zeros."""
    error = (ours.double() - oracle).abs().amax(1)
    largest = oracle.abs().amax(1)
    assert bool((error[largest == 0] == 0).all()), "a row that is zero has a gradient"
    return float((error / largest.clamp_min(1e-300)).max())


@dataclass(frozen=True)
class Problem:
    """One micro-batch of two models over a vocabulary of G real entries."""

    hidden_NH: Tensor
    weight_GH: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    labels_N: Tensor
    ce_weights_N: Tensor
    kd_weights_N: Tensor

    @classmethod
    def random(
        cls,
        tokens: int = 23,
        hidden: int = 12,
        vocab: int = 203,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        teacher_dtype: torch.dtype | None = None,
    ) -> Problem:
        """Logits of standard deviation 2; some tokens count for one loss only, some for none."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        teacher_hidden = hidden + 4
        ce_weights = torch.rand(tokens, generator=generator) / tokens
        kd_weights = torch.rand(tokens, generator=generator) / tokens
        ce_weights[::5] = 0
        kd_weights[::4] = 0
        return cls(
            normal(tokens, hidden).to(dtype),
            (normal(vocab, hidden) * 2 / hidden**0.5).to(dtype),
            normal(tokens, teacher_hidden).to(teacher_dtype or dtype),
            (normal(vocab, teacher_hidden) * 2 / teacher_hidden**0.5).to(teacher_dtype or dtype),
            torch.randint(vocab, (tokens,), generator=generator),
            ce_weights,
            kd_weights,
        )

    def with_weights(self, ce_weights_N: Tensor, kd_weights_N: Tensor) -> Problem:
        return replace(self, ce_weights_N=ce_weights_N, kd_weights_N=kd_weights_N)


@dataclass(frozen=True)
class Answer:
    """The oracle's result for a problem."""

    total: Tensor
    report: dict[str, Tensor]
    hidden_gradient: Tensor
    weight_gradient: Tensor


def solve(
    problem: Problem,
    terms: Sequence[tuple[float, float]] = ((1.0, 1.0),),
    *,
    ce_coefficient: float = 1.0,
    student_rule: tuple[float | None, float] = (None, 1.0),
    teacher_rule: tuple[float | None, float] = (None, 1.0),
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Answer:
    """The objective with forward KL terms of (weight, temperature), and its gradients.

    ``product`` makes raw outputs of hidden states and transposed weights, both fp64.
    """
    hidden = problem.hidden_NH.double().requires_grad_()
    weight = problem.weight_GH.double().requires_grad_()
    teacher_weight = problem.teacher_weight.double()
    student = capped(product(hidden, weight.t()), *student_rule)
    teacher = capped(product(problem.teacher_hidden.double(), teacher_weight.t()), *teacher_rule)
    ce_weights, kd_weights = problem.ce_weights_N.double(), problem.kd_weights_N.double()
    ce = (ce_weights * cross_entropy(student, problem.labels_N)).sum()
    values = [(kd_weights * forward_kl(student, teacher, value)).sum() for _, value in terms]
    kd = sum(
        (factor * value for (factor, _), value in zip(terms, values, strict=True)),
        torch.zeros((), dtype=torch.float64),
    )
    total = ce_coefficient * ce + kd
    hidden_gradient, weight_gradient = torch.autograd.grad(total, (hidden, weight))
    report = {
        "ce": ce,
        "kd": kd,
        "teacher_ce": (ce_weights * cross_entropy(teacher, problem.labels_N)).sum(),
        "student_entropy": (kd_weights * entropy(student)).sum(),
        "teacher_entropy": (kd_weights * entropy(teacher)).sum(),
        "top1_agreement": (kd_weights * (student.argmax(1) == teacher.argmax(1))).sum(),
    }
    report = {name: value.detach() for name, value in report.items()}
    return Answer(total.detach(), report, hidden_gradient, weight_gradient)
