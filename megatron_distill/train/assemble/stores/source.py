"""The samples that a store among several teachers belongs to: all, or those of one source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_distill.config import DataConfig, RunConfig, routed_terms
from megatron_distill.data.sources import JoinedStore
from megatron_distill.errors import StoreError
from megatron_distill.losses import ChunkTerm, Term
from megatron_distill.store import DocumentIndex, StoreReader
from megatron_distill.store.plan import plan_differences
from megatron_distill.train.assemble.sources import dataset_settings
from megatron_distill.train.capture.folder import configured
from megatron_distill.train.teachers.stored import JoinedSamples

__all__ = ["OneOfSeveral", "most_samples", "share_of_source", "source_of_store"]


@dataclass(frozen=True)
class OneOfSeveral:
    """A teacher of `teachers`.

    Attributes:
        number: in a batch.
        is_named: whether a term names it.
        has_own_tokens: whether it has a tokenizer of its own.
        is_drawn: whether it may have samples of sources that name no teacher.
        column: its number among the stores of the student's tokenizer beside a teacher with another
            one; else None.
    """

    name: str
    number: int
    is_named: bool
    has_own_tokens: bool = False
    is_drawn: bool = False
    column: int | None = None

    @property
    def key(self) -> str:
        """Its key in the configuration."""
        return f"teachers.{self.name}"

    def terms(self, terms: Sequence[Term | ChunkTerm]) -> tuple[Term | ChunkTerm, ...]:
        """Return the terms that it may serve: those that name it, and those that name none.

        Terms on chunks are of a teacher with a tokenizer of its own, and all of its terms are.
        """
        return tuple(
            term
            for term in terms
            if isinstance(term, ChunkTerm) == self.has_own_tokens
            and (term.teachers is None or self.name in term.teachers.names)
        )

    def samples(self, *, of_source: bool) -> JoinedSamples:
        """Return the samples that it has records of."""
        return JoinedSamples(
            self.number, takes_all=self.is_named, of_source=of_source, column=self.column
        )

    def joined(self, index: DocumentIndex) -> JoinedStore:
        """Return how documents find the records of its store."""
        is_of_student = self.column is not None
        return JoinedStore(index, self.name, self.is_named, self.is_drawn, is_of_student)


def share_of_source(data: DataConfig, source: int | None) -> float:
    """Return the share of a source in the samples; None: of all sources."""
    if source is None:
        return 1.0
    return data.sources[source].weight / sum(one.weight for one in data.sources)


def most_samples(share: float, total: int) -> int:
    """Return how many of the first samples of a blend a source with this share may have.

    It has less than one sample more than its share of them, see `next_source`.
    """
    return math.ceil(share * total * (1 - 1e-12))  # a product may be rounded up


def source_of_store(store: StoreReader, config: RunConfig, teacher: OneOfSeveral) -> int | None:
    """Return the number of the source whose samples a store has; None: those of the whole stream.

    Call on the rank that reads. Raises StoreError: the store has the samples of another stream, or
    of one source where the teacher needs further ones.
    """
    there = store.identity.settings.get("dataset")
    if there is None:
        return None  # not captured by this library; every sample's tokens are compared anyway
    whole = _differences(there, config.data, config.seed)
    if not whole:
        return None
    sources = config.data.sources
    for index, source in enumerate(sources):
        alone = config.data.model_copy(update={"sources": (source,)})
        if not _differences(there, alone, config.seed):
            _require_source(store, config, teacher, index)
            return index
    raise StoreError(
        f"{store.folder}: its samples are neither those of this run ({'; '.join(whole)}) nor those "
        f"of one of its sources. Restore the settings of the capture, or capture {teacher.key} on "
        "data.sources or on the source that names it"
    )


def _differences(there: Any, data: DataConfig, seed: int) -> list[str]:
    here = dataset_settings(data, seed)
    return plan_differences(there, here, configured, "identity.settings.dataset.")


def _require_source(store: StoreReader, config: RunConfig, teacher: OneOfSeveral, own: int) -> None:
    """Raise StoreError unless all samples of a teacher are those of one source."""
    further = next(_further(config, teacher, own), None)
    source = config.data.sources[own]
    if further is None and source.is_tokenized and len(source.paths) > 1:
        further = f"data.sources.{own} blends {len(source.paths)} corpora of the format megatron"
    if further is not None:
        raise StoreError(
            f"{store.folder}: has the samples of data.sources.{own} alone, and {further}; capture "
            f"{teacher.key} on all of data.sources, or change that key"
        )


def _further(config: RunConfig, teacher: OneOfSeveral, own: int) -> Iterator[str]:
    """Yield in words what gives a teacher samples of further sources."""
    for index, term in enumerate(config.objective.terms):
        if term.teacher == teacher.name or (term.teachers or {}).get(teacher.name):
            yield f"objective.terms.{index} takes {teacher.key} on every sample"
    weights = config.objective.routing_weights or {}
    routed = bool(routed_terms(config))
    for index, source in enumerate(config.data.sources):
        if index == own or not routed:
            continue
        if source.teacher == teacher.name:
            yield f"data.sources.{index}.teacher names {teacher.key} as well"
        elif source.teacher is None and weights.get(teacher.name):
            yield f"objective.routing_weights draw {teacher.key} for data.sources.{index}"
