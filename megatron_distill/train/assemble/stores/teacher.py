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
from megatron_distill.data.samples import SampleSource
from megatron_distill.data.stored import (
    Share,
    StoredSamples,
    held_out_numbers,
    read_held_out_numbers,
)
from megatron_distill.data.tokenizers.open import Vocabulary
from megatron_distill.errors import ConfigError, StoreError, counted
from megatron_distill.log import get_logger
from megatron_distill.models.architecture import Architecture
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
from megatron_distill.train.capture.folder import configured
from megatron_distill.train.model_source import teacher_digest
from megatron_distill.train.teachers.stored import StoredTeacher

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
        is_by_document: whether the run's samples find their records by documents, and not by their
            numbers.
        index: of the documents then, on the first rank; None elsewhere.
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
    is_by_document: bool = False
    index: DocumentIndex | None = None

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
    def is_by_document(self) -> bool:
        """See `Stored`; it is the store of the teacher with a tokenizer of its own."""
        return any(one.is_by_document for one in self.parts)

    @property
    def index(self) -> DocumentIndex | None:
        """See `Stored`."""
        return next((one.index for one in self.parts if one.is_by_document), None)

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
    vocabulary, other = fit.vocabulary, None
    if own_tokens is not None:
        vocabulary, other = own_tokens.vocabulary, fit.vocabulary.identity
    fits = TokensOfRun.of(config.data, section, vocabulary, fit.student, other, key=key)
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
        found.is_by_document,
        index,
    )
    site.resources.callback(stored.close)
    return stored


@dataclass(frozen=True)
class _Facts:
    """The facts of the stores that all ranks need; source: whose samples they are, if not all.

    is_by_document: see `Stored`.
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


@dataclass(frozen=True)
class TokensOfRun:
    """The tokens of a run, which the records of its stores must have.

    Attributes:
        vocabulary: of the teacher's tokens.
        student: the student's shape.
        length: positions of a record.
        student_tokenizer: see `open_stored`.
        student_length: positions of the student's samples; None with one tokenizer.
        has_sources: whether the run reads a corpus.
        key: of the teacher in the configuration.
    """

    vocabulary: Vocabulary
    student: Architecture
    length: int
    student_tokenizer: str | None
    student_length: int | None
    has_sources: bool = True
    key: str = "teacher"

    @classmethod
    def of(
        cls,
        data: DataConfig,
        teacher: ModelConfig,
        vocabulary: Vocabulary,
        student: Architecture,
        student_tokenizer: str | None,
        *,
        key: str,
    ) -> TokensOfRun:
        """The tokens of a run, for the stores of one teacher."""
        length = teacher.sequence_length or data.sequence_length
        student_length = None if student_tokenizer is None else data.sequence_length
        has_sources = bool(data.sources)
        return cls(vocabulary, student, length, student_tokenizer, student_length, has_sources, key)

    def is_by_document(self, store: StoreReader) -> bool:
        """Whether the samples of a store are in the teacher's tokens alone, and the run's not."""
        return self.student_tokenizer is not None and store.identity.student_tokenizer is None

    def check(self, store: StoreReader) -> None:
        """Raise StoreError unless a store's records have these tokens."""
        self._check_sides(store)
        self._check_tokenizer(store)
        _check_vocabulary(store, self.vocabulary, self.student)
        found = (store.settings.student_length, store.settings.sequence_length)
        if found == (self.student_length, self.length) or self.is_by_document(store):
            return
        if self.student_length is None:
            raise StoreError(
                f"{store.folder}: its sequence_length is {found[1]}, this run's {self.length}; set "
                "data.sequence_length to the store's, or capture a store for this run"
            )
        raise StoreError(
            f"{store.folder}: its samples have {found[0]} positions of the student and {found[1]} "
            f"of the teacher, this run's {self.student_length} and {self.length}. Set "
            f"data.sequence_length={found[0]} and {self.key}.sequence_length={found[1]}, or "
            "capture a store for this run"
        )

    def _check_sides(self, store: StoreReader) -> None:
        there, here = store.identity.student_tokenizer, self.student_tokenizer
        if self.is_by_document(store) and not self.has_sources:
            raise StoreError(
                f"{store.folder}: captured with the teacher's tokenizer alone, without tokens of "
                "this student; name the corpus in data.sources, or capture a store with "
                "capture.aligned=true"
            )
        if there is not None and here is None:
            raise StoreError(
                f"{store.folder}: captured for a student with a tokenizer of its own, and no term "
                "has an alignment. Set alignment of objective.terms.0, or capture a store with "
                "capture.aligned=false"
            )
        if there is not None and here is not None and there != here:
            raise StoreError(
                f"{store.folder}: captured for a student with the tokenizer {there[:12]}, not "
                f"{here[:12]}; set data.tokenizer to that of the capture, or capture a store with "
                "this one"
            )

    def _check_tokenizer(self, store: StoreReader) -> None:
        there, here = store.identity.tokenizer, self.vocabulary.identity
        if there == UNKNOWN:
            _LOGGER.warning(
                "%s does not name its tokenizer, so it cannot be compared with that of this run",
                store.folder,
            )
        elif there != here:
            own = f"{self.key}.tokenizer"
            key = "data.tokenizer" if self.student_tokenizer is None else own
            raise StoreError(
                f"{store.folder}: its tokenizer is {there[:12]}, not {here[:12]} as in this run. "
                f"Remove {key} to use that of the store, or capture a store with this one"
            )


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


def _check_vocabulary(store: StoreReader, vocabulary: Vocabulary, student: Architecture) -> None:
    """Raise StoreError unless the ids of a store are those of this run.

    Older releases wrote the number of the teacher's rows, padding among them. With the run's
    tokenizer that is any number above its tokens; without a known one, that of the student's rows.
    """
    size, tokens = store.settings.vocab_size, vocabulary.size
    is_ours = store.identity.tokenizer == vocabulary.identity
    if size == tokens or (size > tokens and (is_ours or size == student.vocab_size)):
        return
    raise StoreError(
        f"{store.folder}: its vocab_size is {size}, this run's tokenizer has {tokens} tokens; use "
        "its tokenizer, or capture a store for this run"
    )


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
    for index, source in enumerate(data.sources):
        if source.conversation is not None:
            raise StoreError(
                f"{stores.stores[0].folder}: captured with the teacher's tokenizer alone, so its "
                f"records are found by text, but data.sources.{index}.conversation is set. Capture "
                "a store with capture.aligned=true, or remove this source"
            )
    return DocumentIndex(stores)


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
