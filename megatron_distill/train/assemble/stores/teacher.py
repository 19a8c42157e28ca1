"""From a configuration to a stored teacher, checked against the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron_distill.config import (
    DataConfig,
    ModelConfig,
    RunConfig,
    StoreSourceConfig,
    TrainConfig,
)
from megatron_distill.data.prefetch import Lookahead, StepSource
from megatron_distill.data.samples import NOT_JOINED, JoinedSides, SampleSource
from megatron_distill.data.sources import JoinedStore
from megatron_distill.data.stored import (
    Share,
    StoredSamples,
    held_out_numbers,
    read_held_out_numbers,
)
from megatron_distill.data.tokenizers.open import Vocabulary
from megatron_distill.errors import ConfigError, StoreError, counted
from megatron_distill.log import get_logger
from megatron_distill.losses import Term
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.collectives import together
from megatron_distill.store import (
    UNKNOWN,
    CaptureSettings,
    DocumentIndex,
    StoreReader,
    StoreSet,
    find_stores,
)
from megatron_distill.store.documents import ONE_PLAN
from megatron_distill.store.plan import plan_differences
from megatron_distill.train.assemble.alignment import TeacherTokenizer
from megatron_distill.train.assemble.models import resolve_model, teacher_seed
from megatron_distill.train.assemble.site import Site, TeacherFit
from megatron_distill.train.assemble.sources import dataset_settings
from megatron_distill.train.assemble.stores.source import (
    OneOfSeveral,
    most_samples,
    share_of_source,
    source_of_store,
)
from megatron_distill.train.assemble.stores.terms import check_terms
from megatron_distill.train.assemble.stores.tokens import TokensOfRun
from megatron_distill.train.capture.folder import configured
from megatron_distill.train.model_source import is_comparable, teacher_digest
from megatron_distill.train.teachers.stored import StoredTeacher, stored_metrics

_LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class Stored:
    """Facts about the stores of a run on all ranks, and the readers on the ranks that need them.

    Attributes:
        settings: of the capture, the same for all stores.
        samples: of all stores.
        names: of the entries of `teacher.store` in the log.
        key: of the teacher in the configuration.
        share: of the run's samples whose records are read from it.
        identities: one per store, a digest of its capture.
        teacher: returns the signals of micro-batches.
        corpus: the stores as a sample source, on the first rank; None elsewhere.
        shares: of the entries in the samples, on the first rank.
        joined_sides: whose tokens find their records by documents, and not by the samples' numbers.
        join: with the documents then, on the first rank; None elsewhere.
    """

    settings: CaptureSettings
    samples: int
    names: tuple[str, ...]
    identities: tuple[str, ...]
    teacher: StoredTeacher
    corpus: StoreSet | None
    shares: Sequence[Share] = ()
    key: str = "teacher"
    share: float = 1.0
    joined_sides: JoinedSides = NOT_JOINED
    join: JoinedStore | None = None

    @property
    def is_by_document(self) -> bool:
        """Whether the run's samples find their records by documents."""
        return self.joined_sides != NOT_JOINED

    @property
    def joins(self) -> tuple[JoinedStore, ...]:
        """What joins the samples by documents, on the first rank."""
        return () if self.join is None else (self.join,)

    def metrics(self, terms: Sequence[Term]) -> tuple[str, ...]:
        """Return the names of the reported metrics of terms on tokens.

        Joined by documents, the teacher's cross-entropy is unknown: labels may have no record.
        """
        found = stored_metrics(self.settings, terms)
        return tuple(name for name in found if name != "teacher_ce" or not self.is_by_document)

    @property
    def parts(self) -> tuple[Stored, ...]:
        """The stores of each teacher."""
        return (self,)

    def ahead_of(self, loader: StepSource, *, last_step: int) -> Lookahead:
        """Return the loader's steps, taken two steps early so that their records are read ahead."""
        return Lookahead(
            loader, last_step=last_step, expect=self.teacher.expect, stores=self.identities
        )

    def open_training(self, seed: int, *, held_out: int) -> SampleSource:
        """Return the samples as a training stream, without the held-out ones; first rank."""
        assert self.corpus is not None, "the first rank has the stores"
        numbers = held_out_numbers(self.samples, held_out)
        return StoredSamples(self.corpus, self.shares, seed=seed, held_out=numbers)

    def read_held_out(self, count: int) -> SampleSource:
        """Read the held-out samples; first rank. Raises StoreError."""
        assert self.corpus is not None, "the first rank has the stores"
        numbers = held_out_numbers(self.samples, count)
        return read_held_out_numbers(self.corpus, self.shares, numbers)

    def close(self) -> None:
        """Close the readers."""
        self.teacher.close()
        if self.corpus is not None:
            self.corpus.close()


@dataclass(frozen=True)
class SeveralStores:
    """The stores of several teachers, joined with a corpus; it has names of its own in the log."""

    parts: tuple[Stored, ...]
    names: tuple[str, ...] = ()

    @property
    def joined_sides(self) -> JoinedSides:
        """See `Stored`."""
        sides = [one.joined_sides for one in self.parts]
        return JoinedSides(sum(one.student for one in sides), any(one.teacher for one in sides))

    @property
    def joins(self) -> tuple[JoinedStore, ...]:
        """See `Stored`."""
        return tuple(join for one in self.parts for join in one.joins)

    def ahead_of(self, loader: StepSource, *, last_step: int) -> Lookahead:
        """See `Stored`: each store reads ahead."""
        identities = {one.key.removeprefix("teachers."): one.identities for one in self.parts}
        return Lookahead(loader, last_step=last_step, expect=self._expect, stores=identities)

    def _expect(self, batches: Sequence[Batch]) -> None:
        for one in self.parts:
            one.teacher.expect(batches)


def open_stored(
    config: RunConfig,
    fit: TeacherFit,
    site: Site,
    own_tokens: TeacherTokenizer | None,
    among: OneOfSeveral | None = None,
) -> Stored:
    """Open the stores of `teacher.store` for the run, and check that they fit it.

    own_tokens: those of the records, if the teacher has a tokenizer of its own. among: the teacher
    is one of several, with its terms alone.
    Raises StoreError or ConfigError on all ranks: a store is missing, damaged, unfinished, of other
    tokenizer, vocabulary, length, corpus or teacher, or cannot serve a term.

    Collective: world, short objects.
    """
    key = "teacher" if among is None else among.key
    section, terms, groups = config.models[key], fit.terms, site.groups
    fits = _tokens_of_run(config.data, section, fit, own_tokens, among)
    vocabulary = fits.vocabulary
    assert section.store is not None, "a stored teacher has stores"
    own = tuple(terms) if among is None else among.terms(terms)
    is_reader = groups.is_last_stage and groups.tensor.rank() == 0
    facts: list[_Facts | None] = [None]
    corpus = reading = index = None
    with together():
        if dist.get_rank() == 0:
            corpus = _open(section.store, fits, key)
            check_terms(corpus, terms, own)
            for store in corpus.stores:
                _check_documents(store, config.data.isolate_documents)
            index = _index(corpus, fits, config.data)
            source = _joined(corpus, config, key, among) if index is None else None
            facts = [_Facts.of(corpus, source, is_by_document=index is not None)]
            _LOGGER.info("teacher store %s", _described(corpus))
        if is_reader:
            reading = _open(section.store, fits, key)
    dist.broadcast_object_list(facts, src=0)
    assert facts[0] is not None
    found = facts[0]
    if section.has_model and found.digest != UNKNOWN:
        _check_teacher(config, found.digest, vocabulary, among)
    teacher = StoredTeacher(
        reading,
        found.settings,
        terms=own,
        vocab_size=vocabulary.size,
        groups=groups,
        device=site.execution.device,
        joined=None if among is None else among.samples(of_source=found.source is not None),
    )
    shares = _shares(section.store, corpus) if corpus is not None else ()
    stored = Stored(
        found.settings,
        found.samples,
        tuple(entry.log_name for entry in section.store),
        found.identities,
        teacher,
        corpus,
        shares,
        key,
        share_of_source(config.data, found.source),
        fits.joined_sides if found.is_by_document else NOT_JOINED,
        None if index is None else _join(index, among),
    )
    site.resources.callback(stored.close)
    return stored


def _tokens_of_run(
    data: DataConfig,
    section: ModelConfig,
    fit: TeacherFit,
    own_tokens: TeacherTokenizer | None,
    among: OneOfSeveral | None,
) -> TokensOfRun:
    vocabulary, other = fit.vocabulary, None
    if own_tokens is not None:
        vocabulary, other = own_tokens.vocabulary, fit.vocabulary.identity
    return TokensOfRun.of(
        data,
        section,
        vocabulary,
        fit.student,
        other,
        key="teacher" if among is None else among.key,
        is_beside=among is not None and among.column is not None,
    )


def _join(index: DocumentIndex, among: OneOfSeveral | None) -> JoinedStore:
    return JoinedStore(index) if among is None else among.joined(index)


@dataclass(frozen=True)
class _Facts:
    """The facts of the stores that all ranks need; source: whose samples they are, if not all.

    is_by_document: see `TokensOfRun`.
    """

    settings: CaptureSettings
    samples: int
    identities: tuple[str, ...]
    digest: str
    source: int | None
    is_by_document: bool

    @classmethod
    def of(cls, corpus: StoreSet, source: int | None, *, is_by_document: bool) -> _Facts:
        """The facts of open stores."""
        first, samples = corpus.stores[0], corpus.samples
        identities = tuple(store.plan.uid.hex() for store in corpus.stores)
        digest = first.identity.teacher
        return cls(first.settings, samples, identities, digest, source, is_by_document)


def _open(entries: Sequence[StoreSourceConfig], fits: TokensOfRun, key: str) -> StoreSet:
    """Open all stores, entry by entry, so that each entry's samples are numbered in a row."""
    stores: list[StoreReader] = []
    for entry in entries:
        for folder in find_stores([entry.path]):
            if any(store.folder.samefile(folder) for store in stores):
                raise ConfigError(f"{key}.store: {folder} is named twice; name each store once")
            store = StoreReader.open(folder)
            fits.check(store)
            stores.append(store)
    return StoreSet(stores)


def _joined(
    stores: StoreSet, config: RunConfig, key: str, among: OneOfSeveral | None
) -> int | None:
    """Check that the stores belong to the corpus; see `source_of_store` for the result."""
    if not config.data.sources:
        return None
    if len(stores.stores) > 1:
        remedy = ", or remove data.sources to train on the samples of the stores"
        raise StoreError(
            f"{key}.store: {len(stores.stores)} stores, but only one can be joined with "
            f"data.sources; name one store{'' if among else remedy}"
        )
    if among is not None:
        return source_of_store(stores.stores[0], config, among)
    _check_corpus(stores.stores[0], config.data, config.seed)
    return None


def require_samples(stored: Stored | SeveralStores, train: TrainConfig) -> None:
    """Raise StoreError, on all ranks, if a store used with a corpus ends before the run."""
    steps, batch = train.steps, train.global_batch_size
    for one in stored.parts:
        if one.is_by_document:
            continue  # its samples are others than the run's
        wanted = most_samples(one.share, steps * batch)
        remedy = ", or remove data.sources to train on the store's samples for several epochs"
        if wanted > one.samples:
            raise StoreError(
                f"{one.key}.store: contains {counted(one.samples, 'sample')}, but train.steps = "
                f"{steps} with train.global_batch_size = {batch} reads {wanted:,} of them; lower "
                f"train.steps or capture more samples{remedy if one.key == 'teacher' else ''}"
            )


def _check_documents(store: StoreReader, isolate_documents: bool) -> None:
    captured = store.identity.settings.get("dataset", {})
    isolated = captured.get("isolate_documents", isolate_documents)
    if isolated != isolate_documents:
        raise StoreError(
            f"{store.folder}: captured with data.isolate_documents={str(isolated).lower()}, and "
            "the student needs the same contexts; set the same value"
        )


def _index(stores: StoreSet, fits: TokensOfRun, data: DataConfig) -> DocumentIndex | None:
    """Read where each document is in the stores; None if records are found by number.

    Raises StoreError: they do not list their documents, or a source of the run has no texts.
    """
    if not fits.is_by_document(stores.stores[0]):
        return None
    remedy = f"set {fits.key}.hf in place of its store" if fits.is_beside else ONE_PLAN
    for index, source in enumerate(data.sources):
        if source.conversation is not None:
            raise StoreError(
                f"{stores.stores[0].folder}: captured with the teacher's tokenizer alone, so its "
                f"records are found by text, but data.sources.{index}.conversation is set. Remove "
                f"this source, or {remedy}"
            )
    return DocumentIndex(stores, remedy=remedy)


def _check_corpus(store: StoreReader, data: DataConfig, seed: int) -> None:
    """Raise StoreError, naming the keys, if the corpus differs from the store's."""
    there = store.identity.settings.get("dataset")
    if there is None:
        return  # not captured by this library; every sample's tokens are compared anyway
    here = dataset_settings(data, seed)
    differences = plan_differences(there, here, configured, "identity.settings.dataset.")
    if differences:
        raise StoreError(
            f"{store.folder}: captured on another stream of samples ({'; '.join(differences)}); "
            "restore these settings, or remove data.sources to train on the samples of the store"
        )


def _check_teacher(
    config: RunConfig, digest: str, vocabulary: Vocabulary, among: OneOfSeveral | None
) -> None:
    """Raise StoreError, on all ranks, if the model beside a store did not write the stores.

    Collective: world, those of `resolve_model` and `teacher_digest`.
    """
    key, number = ("teacher", 0) if among is None else (among.key, among.number)
    section = config.models[key]
    if not is_comparable(digest):
        if dist.get_rank() == 0:
            _LOGGER.warning(
                "%s.store has a digest of an earlier version for its teacher's weights: whether "
                "they are those of this teacher is not known",
                key,
            )
        return
    source = resolve_model(config, key, vocabulary)
    assert dist.group.WORLD is not None
    found = teacher_digest(source, seed=teacher_seed(config.seed) + number, group=dist.group.WORLD)
    if found != digest:
        named = section.hf or section.checkpoint or f"{key}.architecture"
        raise StoreError(
            f"{key}.store was captured from a teacher with weights {digest[:19]}, but {named} "
            f"has {found[:19]}; set the same teacher, or {key}.store alone"
        )


def _described(stores: StoreSet) -> str:
    settings = stores.stores[0].settings
    folders = ", ".join(str(store.folder) for store in stores.stores)
    entries = f"{settings.kind.adjective} ids"
    return f"{folders}: {counted(stores.samples, 'sample')}, {settings.k} {entries} per token"


def _shares(entries: Sequence[StoreSourceConfig], corpus: StoreSet) -> list[Share]:
    """Return the samples of each entry, which are numbered in a row."""
    shares = []
    first = 0
    for entry in entries:
        folders = find_stores([entry.path])
        count = sum(store.samples for store in corpus.stores if store.folder in folders)
        shares.append(Share(range(first, first + count), entry.weight))
        first += count
    return shares
