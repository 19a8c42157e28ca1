"""Running every divergence on every support through the public entries, beside its oracle."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from megatron_distill.losses import Term, token_divergence
from megatron_distill.ops import VocabShard, vocab_parallel_topk
from megatron_distill.signals import DenseLogits, Support, TopK
from tests.reference import divergences as oracles
from tests.reference.distillation import row_error

NAMES = list(oracles.ORACLES)
KEPT_SUPPORTS: list[str] = list(get_args(Support))
SUPPORTS = ["dense", *KEPT_SUPPORTS]
# Supports on which both models are distributions.
PROPER = ["dense", "tail", "renormalized"]
KEPT = 5
EACH = [(name, support) for name in NAMES for support in SUPPORTS]
# One linear in its slope, a mixture and a blend.
REPRESENTATIVE = ("forward_kl", "js_divergence", "adaptive_kl")
# Every divergence on all ids, and a representative on each support of kept ones; all pairs are in
# tests/distributed/losses/test_divergences_tensor_parallel.py.
PAIRWISE = [
    *((name, "dense") for name in NAMES),
    *zip(REPRESENTATIVE, KEPT_SUPPORTS, strict=True),
]


def signal_of(
    support: str,
    teacher: Tensor,
    *,
    k: int = KEPT,
    temperature: float = 1.0,
    shard: VocabShard | None = None,
) -> DenseLogits | TopK:
    """The teacher's signal: dense logits or its top-k."""
    if support == "dense":
        return DenseLogits(teacher)
    return vocab_parallel_topk(teacher, k, shard, temperature=temperature)


def solved(student: Tensor, signal: Any, upstream: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Values per token, and the gradient on the student's logits."""
    if given.get("support") == "dense":
        given.pop("support")
    leaf = student.detach().requires_grad_()
    value = token_divergence(leaf, signal, **given)
    (gradient,) = torch.autograd.grad(value, leaf, upstream.to(value.dtype))
    return value.detach(), gradient


def differentiated(student: Tensor, oracle: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """The same of a function of fp64 logits."""
    leaf = student.detach().double().requires_grad_()
    value = oracle(leaf)
    (gradient,) = torch.autograd.grad(value, leaf, upstream.double())
    return value.detach(), gradient


def assert_six_digits(
    name: str, student: Tensor, teacher: Tensor, temperature: float, given: dict[str, float]
) -> None:
    """Value and gradient of each row against float64, dense, with an upstream gradient of ones."""
    ones = torch.ones(len(student), device=student.device)
    found = solved(
        student, DenseLogits(teacher), ones, divergence=name, temperature=temperature, **given
    )
    oracle = differentiated(
        student, lambda leaf: oracles.dense(name, leaf, teacher, temperature, **given), ones
    )
    assert float(((found[0] - oracle[0]).abs() / oracle[0]).max()) < 1e-6
    assert row_error(found[1], oracle[1]) < 1e-6


def expected(
    student: Tensor,
    signal: DenseLogits | TopK,
    upstream: Tensor,
    *,
    divergence: str,
    support: str,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The oracle's result for `solved`."""

    def value(leaf: Tensor) -> Tensor:
        if isinstance(signal, DenseLogits):
            return oracles.dense(divergence, leaf, signal.logits, temperature)
        return oracles.on_top_k(
            divergence,
            leaf,
            signal.ids,
            signal.log_probs,
            signal.log_tail,
            support,
            temperature,
        )

    return differentiated(student, value, upstream)


def term_of(name: str, support: str, *, k: int = KEPT, **given: Any) -> Term:
    """The term of an objective with a live teacher."""
    if support == "dense":
        return Term(name, **given)
    return Term(name, top_k=k, support=support, **given)  # type: ignore[arg-type]


def value_of(term: Term, student: Tensor, teacher: Tensor) -> Tensor:
    """The oracle's result for a term of an objective, per token and without its weight."""
    if term.top_k is None:
        value = oracles.dense(
            term.divergence, student, teacher, term.temperature, **term.parameters
        )
    else:
        kept = oracles.topk(teacher, term.top_k, term.temperature)
        value = oracles.on_top_k(
            term.divergence, student, *kept, term.support, term.temperature, **term.parameters
        )
    return value * term.temperature_factor
