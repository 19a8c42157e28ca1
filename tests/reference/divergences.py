"""Float64 oracles of every divergence, from the definitions, on log probabilities of classes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Oracle = Callable[..., Tensor]


def _weighted(probability: Tensor, ratio: Tensor) -> Tensor:
    """Sum of probability times ratio, with zero times anything zero."""
    return torch.where(probability == 0, 0.0, probability * ratio).sum(1)


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return _weighted(log_p.exp(), log_p - log_q)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return _weighted(log_q.exp(), log_q - log_p)


def js_divergence(log_p: Tensor, log_q: Tensor, beta: float = 0.5) -> Tensor:
    log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    return beta * _weighted(log_p.exp(), log_p - log_m) + (1 - beta) * _weighted(
        log_q.exp(), log_q - log_m
    )


def skewed_forward_kl(log_p: Tensor, log_q: Tensor, skew_lambda: float = 0.1) -> Tensor:
    log_m = (skew_lambda * log_p.exp() + (1 - skew_lambda) * log_q.exp()).log()
    return _weighted(log_p.exp(), log_p - log_m)


def skewed_reverse_kl(log_p: Tensor, log_q: Tensor, skew_lambda: float = 0.1) -> Tensor:
    log_m = ((1 - skew_lambda) * log_p.exp() + skew_lambda * log_q.exp()).log()
    return _weighted(log_q.exp(), log_q - log_m)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() - log_q.exp()).abs().sum(1) / 2


def squared_hellinger(log_p: Tensor, log_q: Tensor) -> Tensor:
    return ((log_p / 2).exp() - (log_q / 2).exp()).square().sum(1) / 2


def adaptive_kl(log_p: Tensor, log_q: Tensor, adaptive_alpha: float = 0.5) -> Tensor:
    p, q = log_p.exp(), log_q.exp()
    ordered, order = p.sort(dim=1, stable=True)
    is_tail = torch.zeros_like(p, dtype=torch.bool)
    is_tail.scatter_(1, order, ordered.cumsum(1) <= adaptive_alpha)
    gap = (p - q).abs().detach()
    tail, head = (gap * is_tail).sum(1), (gap * ~is_tail).sum(1)
    share = torch.where(head + tail > 0, head / (head + tail), 0.5)
    return share * forward_kl(log_p, log_q) + (1 - share) * reverse_kl(log_p, log_q)


ORACLES: dict[str, Oracle] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "js_divergence": js_divergence,
    "skewed_forward_kl": skewed_forward_kl,
    "skewed_reverse_kl": skewed_reverse_kl,
    "total_variation": total_variation,
    "squared_hellinger": squared_hellinger,
    "adaptive_kl": adaptive_kl,
}


def dense(
    name: str, student: Tensor, teacher: Tensor, temperature: float, **given: float
) -> Tensor:
    """Between logits ``[N, G]``, per token."""
    log_p = (teacher.double() / temperature).log_softmax(1)
    log_q = (student.double() / temperature).log_softmax(1)
    return ORACLES[name](log_p, log_q, **given)


def on_top_k(
    name: str,
    student: Tensor,
    ids: Tensor,
    log_probs: Tensor,
    log_tail: Tensor,
    support: str,
    temperature: float,
    **given: float,
) -> Tensor:
    """Between student logits ``[N, G]`` and a teacher's top-k, per token."""
    log_q_all = (student.double() / temperature).log_softmax(1)
    log_p, log_q = log_probs.double(), log_q_all.gather(1, ids)
    if support == "renormalized":
        log_p, log_q = log_p.log_softmax(1), log_q.log_softmax(1)
    elif support == "tail":
        others = log_q_all.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
        log_p = torch.cat([log_p, log_tail.double().unsqueeze(1)], 1)
        log_q = torch.cat([log_q, others], 1)
    return ORACLES[name](log_p, log_q, **given)


def topk(teacher: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, log-probs and log tail of the teacher's k most probable, by (value, lowest id)."""
    log_p = (teacher.double() / temperature).log_softmax(1)
    order = teacher.double().sort(dim=1, descending=True, stable=True).indices
    ids = order[:, :k]
    tail = log_p.gather(1, order[:, k:]).logsumexp(1) if k < teacher.shape[1] else None
    if tail is None:
        tail = torch.full(teacher.shape[:1], -torch.inf, dtype=torch.float64)
    return ids, log_p.gather(1, ids), tail
