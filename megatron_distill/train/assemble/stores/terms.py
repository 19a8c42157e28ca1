"""Whether the records of stores serve the terms of an objective."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_distill.errors import StoreError
from megatron_distill.losses import ChunkTerm, Term
from megatron_distill.store import StoreReader, StoreSet
from megatron_distill.train.teachers.record_signals import needed_support

__all__ = ["check_terms"]


def check_terms(
    stores: StoreSet,
    terms: Sequence[Term | ChunkTerm],
    own: Collection[Term | ChunkTerm],
) -> None:
    """Raise StoreError unless the records of stores serve their own terms."""
    for store in stores.stores:
        for index, term in enumerate(terms):
            if term not in own:
                continue
            if isinstance(term, ChunkTerm):
                _check_aligned(store, term, index)
            elif not store.settings.kind.is_ranked:
                _check_unranked(store, term, index)
            else:
                _check_scores(store, term, index)
                support = needed_support(term)
                store.require(support=support, k=term.top_k, temperatures=[term.temperature])


def _check_unranked(store: StoreReader, term: Term, index: int) -> None:
    is_at_one = term.temperature == 1.0 and term.temperatures is None
    if not term.is_forward_kl or not is_at_one or term.top_k is not None:
        raise StoreError(
            f"{store.folder}: contains {store.settings.kind.adjective} ids, which serve only "
            f"forward_kl at temperature 1 without top_k; change objective.terms.{index}, or "
            "capture a store with mode: top_k"
        )
    if term.teachers is not None and len(term.teachers.names) > 1:
        raise StoreError(
            f"{store.folder}: contains {store.settings.kind.adjective} ids, whose probabilities "
            f"objective.terms.{index} mixes or compares; give its teacher a term of its own, or "
            "capture a store with mode: top_k"
        )


def _check_scores(store: StoreReader, term: Term, index: int) -> None:
    """Raise StoreError unless the records have what the score of a term's teachers needs."""
    if term.teachers is None or term.teachers.score is None or store.settings.is_complete:
        return
    raise StoreError(
        f"{store.folder}: lacks {', '.join(store.settings.lacks)}, which score = "
        f"{term.teachers.score!r} of objective.terms.{index} needs; remove the score, or capture a "
        "store with the teacher"
    )


def _check_aligned(store: StoreReader, term: ChunkTerm, index: int) -> None:
    """Raise StoreError unless the records serve a term between tokenizers."""
    settings = store.settings
    if not settings.is_complete:
        raise StoreError(
            f"{store.folder}: lacks {', '.join(settings.lacks)}, which objective.terms.{index} "
            "needs; capture a store with the teacher"
        )
    if term.alignment == "likelihood":
        return
    if not settings.kind.is_ranked:
        raise StoreError(
            f"{store.folder}: contains {settings.kind.adjective} ids, which serve no term on common"
            f" tokens; set alignment of objective.terms.{index} to likelihood, or capture a store "
            "with mode: top_k"
        )
    store.require(support="tail", k=term.top_k, temperatures=[term.temperature])
