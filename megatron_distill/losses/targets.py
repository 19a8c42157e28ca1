"""Signals on a few ids, as the executors take them."""

from __future__ import annotations

import torch

from megatron_distill.losses.terms import Term
from megatron_distill.ops.kept_divergence import SampledTarget, TopKTarget
from megatron_distill.signals import Sampled, TopK

__all__ = ["kept_target"]


def kept_target(signal: TopK | Sampled, term: Term) -> TopKTarget | SampledTarget:
    """What a term is held against.

    Raises:
        ValueError: the term is not defined on this signal.
    """
    if isinstance(signal, Sampled):
        return _sampled(signal, term)
    log_probs = signal.log_probs
    if signal.temperature is not None and signal.temperature != term.temperature:
        if term.support != "renormalized":
            raise ValueError(
                f"{term.name} is at temperature {term.temperature:g}, the top-k at "
                f"{signal.temperature:g}: support {term.support!r} needs the teacher's normaliser "
                "at the term's temperature; take the top-k there, or use support='renormalized'"
            )
        log_probs = log_probs * (signal.temperature / term.temperature)
    return TopKTarget(signal.ids.long(), log_probs, signal.log_tail, term.support)


def _sampled(signal: Sampled, term: Term) -> SampledTarget:
    if not term.is_forward_kl:
        raise ValueError(
            f"{term.divergence} is not defined on sampled ids: only forward_kl is linear in the "
            "teacher's probabilities, so that samples estimate it without bias"
        )
    counts = signal.counts.to(torch.float64)
    total = counts.sum(1, keepdim=True)
    return SampledTarget(signal.ids.long(), torch.where(total == 0, 0.0, counts / total))
