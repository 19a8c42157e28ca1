"""Signals of the answers of a teacher on ranks of its own, on a rank of the student."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_distill.config import RunConfig
from megatron_distill.losses import ChunkTerm, Term
from megatron_distill.runtime.batch import Batch
from megatron_distill.signals import Signal
from megatron_distill.store import CaptureSettings
from megatron_distill.train.assemble.answers.plan import answer_settings, terms_of
from megatron_distill.train.assemble.routing import members
from megatron_distill.train.assemble.stores.source import OneOfSeveral
from megatron_distill.train.teachers.live import ModelOutput
from megatron_distill.train.teachers.own_ranks import RemoteHead
from megatron_distill.train.teachers.sent_topk import SentTopK, signal_of_columns

__all__ = ["moved_top_k", "signal_maker"]


def signal_maker(
    among: OneOfSeveral | None,
    terms: Sequence[Term | ChunkTerm],
    settings: CaptureSettings | None,
    head: RemoteHead,
    device: torch.device,
    *,
    has_own_tokens: bool,
) -> Callable[[Sequence[torch.Tensor], Batch], Signal]:
    """Return what makes an answer a signal; one of several teachers holds its terms by name.

    settings: of sent top-k ids; None: hidden states are sent. has_own_tokens: the teacher has a
    tokenizer of its own; the batches of another one may have two sides as well.
    """
    if settings is None:
        return _HiddenStates(head, has_own_tokens)
    return _top_k_signals(among, terms, settings, device, has_own_tokens=has_own_tokens)


def moved_top_k(
    config: RunConfig,
    role: str,
    terms: Sequence[Term | ChunkTerm],
    device: torch.device,
    *,
    tokens: int,
    has_own_tokens: bool,
) -> SentTopK | None:
    """Return the top-k of a teacher with its own layout on these ranks; None: hidden states move.

    `tokens`: of its tokenizer. Raises ConfigError: it has fewer than k.
    """
    settings = answer_settings(config, role, terms, tokens=tokens)
    if settings is None:
        return None
    signal_of = _top_k_signals(
        members(config).get(role), terms, settings, device, has_own_tokens=has_own_tokens
    )
    return SentTopK(settings, signal_of, config.objective.chunk_tokens)


def _top_k_signals(
    among: OneOfSeveral | None,
    terms: Sequence[Term | ChunkTerm],
    settings: CaptureSettings,
    device: torch.device,
    *,
    has_own_tokens: bool,
) -> Callable[[Sequence[torch.Tensor], Batch], Signal]:
    own = terms_of(among, terms)
    names = () if among is None else tuple(term.name for term in own)
    return _TopKIds(own, names, settings, device, has_own_tokens)


@dataclass(frozen=True)
class _HiddenStates:
    """Makes sent hidden states a signal."""

    head: RemoteHead
    has_own_tokens: bool

    def __call__(self, columns: Sequence[torch.Tensor], batch: Batch) -> Signal:
        (hidden_sbh,) = columns
        side = batch.teacher if self.has_own_tokens else batch
        assert side is not None, "the loader reads both sides"
        return ModelOutput(
            side.tokens_bs.numel(),
            lambda: hidden_sbh,
            self.head,
            whole_context=self.has_own_tokens,
        )


@dataclass(frozen=True)
class _TopKIds:
    """Makes sent top-k ids a signal; `names`: of the terms, empty with a single teacher."""

    terms: Sequence[Term | ChunkTerm]
    names: tuple[str, ...]
    settings: CaptureSettings
    device: torch.device
    has_own_tokens: bool

    def __call__(self, columns: Sequence[torch.Tensor], batch: Batch) -> Signal:
        host = batch.on_host
        if not self.has_own_tokens:
            host = replace(host, teacher=None)  # that of another teacher
        found = signal_of_columns(columns, host, self.terms, self.settings, self.device)
        return replace(found, names=self.names)
