"""From a configuration to a stored teacher, checked against the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_distill.config import (
    DataConfig,
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
from megatron_distill.losses import ChunkTerm, Term
from megatron_distill.models.architecture import Architecture
from megatron_distill.runtime.collectives import together
from megatron_distill.runtime.groups import Groups
from megatron_distill.store import (
    UNKNOWN,
    CaptureSettings,
    StoreReader,
    StoreSet,
    find_stores,
)
from megatron_distill.store.plan import plan_differences
from megatron_distill.train.assemble.models import has_model, resolve_model, teacher_seed
from megatron_distill.train.assemble.sources import dataset_settings
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
        identities: one per store, a digest of its capture.
        teacher: returns the signals of micro-batches.
        corpus: the stores as a sample source, on the first rank; None elsewhere.
        shares: of the entries in the samples, on the first rank.
    """

    settings: CaptureSettings
    samples: int
    names: tuple[str, ...]
    identities: tuple[str, ...]
    teacher: StoredTeacher
    corpus: StoreSet | None
    shares: Sequence[Share] = ()

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


def open_stored(
    config: RunConfig,
    terms: Sequence[Term | ChunkTerm],
    student: Architecture,
    vocabulary: Vocabulary,
    groups: Groups,
    device: torch.device,
    *,
    student_tokenizer: str | None = None,
) -> Stored:
    """Open the stores of `teacher.store` and check that they fit this run.

    vocabulary: of the records. student_tokenizer: identity of the student's tokenizer, if it is
    another one than the records'. Raises StoreError or ConfigError on all ranks: a store is
    missing, damaged, unfinished, or has another tokenizer, vocabulary, length, corpus or teacher,
    or cannot serve a term.

    Collective: world, short objects.
    """
    section = config.teacher
    assert section is not None, "the caller has looked"
    fits = TokensOfRun(
        vocabulary,
        student,
        section.sequence_length or config.data.sequence_length,
        student_tokenizer,
        None if student_tokenizer is None else config.data.sequence_length,
    )
    assert section.store is not None, "a stored teacher has stores"
    is_reader = groups.is_last_stage and groups.tensor.rank() == 0
    facts: list[tuple[CaptureSettings, int, tuple[str, ...], str] | None] = [None]
    corpus = reading = None
    with together():
        if dist.get_rank() == 0:
            corpus = _open(section.store, fits)
            _check(corpus, terms, config.data, config.seed)
            first = corpus.stores[0]
            identities = tuple(store.plan.uid.hex() for store in corpus.stores)
            facts = [(first.settings, corpus.samples, identities, first.identity.teacher)]
            _LOGGER.info("teacher store %s", _described(corpus))
        if is_reader:
            reading = _open(section.store, fits)
    dist.broadcast_object_list(facts, src=0)
    assert facts[0] is not None
    settings, samples, identities, digest = facts[0]
    if has_model(section) and digest != UNKNOWN:
        _check_teacher(config, digest, vocabulary)
    teacher = StoredTeacher(
        reading, settings, terms=terms, vocab_size=vocabulary.size, groups=groups, device=device
    )
    names = tuple(entry.log_name for entry in section.store)
    shares = _shares(section.store, corpus) if corpus is not None else ()
    return Stored(settings, samples, names, identities, teacher, corpus, shares)


@dataclass(frozen=True)
class TokensOfRun:
    """The tokens of a run, which the records of its stores must have.

    Attributes:
        vocabulary: of the teacher's tokens.
        student: the student's shape.
        length: positions of a record.
        student_tokenizer: see `open_stored`.
        student_length: positions of the student's samples; None with one tokenizer.
    """

    vocabulary: Vocabulary
    student: Architecture
    length: int
    student_tokenizer: str | None
    student_length: int | None

    def check(self, store: StoreReader) -> None:
        """Raise StoreError unless a store's records have these tokens."""
        self._check_sides(store)
        self._check_tokenizer(store)
        _check_vocabulary(store, self.vocabulary, self.student)
        found = (store.settings.student_length, store.settings.sequence_length)
        if found == (self.student_length, self.length):
            return
        if self.student_length is None:
            raise StoreError(
                f"{store.folder}: its sequence_length is {found[1]}, this run's {self.length}; set "
                "data.sequence_length to the store's, or capture a store for this run"
            )
        raise StoreError(
            f"{store.folder}: its samples have {found[0]} positions of the student and {found[1]} "
            f"of the teacher, this run's {self.student_length} and {self.length}; set "
            f"data.sequence_length={found[0]} and teacher.sequence_length={found[1]}, or capture a "
            "store for this run"
        )

    def _check_sides(self, store: StoreReader) -> None:
        there, here = store.identity.student_tokenizer, self.student_tokenizer
        if there is None and here is not None:
            raise StoreError(
                f"{store.folder}: captured for a student with the teacher's tokenizer, and "
                "objective.terms have an alignment; capture a store with capture.aligned=true, or "
                "remove `alignment` from objective.terms"
            )
        if there is not None and here is None:
            raise StoreError(
                f"{store.folder}: captured for a student with a tokenizer of its own "
                "(capture.aligned), and no term of the objective has an alignment; set alignment "
                "of objective.terms.0, or capture a store with capture.aligned=false"
            )
        if there is not None and here is not None and there != here:
            raise StoreError(
                f"{store.folder}: captured for a student with the tokenizer {there[:12]}, not "
                f"{here[:12]} as in this run; set data.tokenizer to that of the capture, or capture"
                " a store with this one"
            )

    def _check_tokenizer(self, store: StoreReader) -> None:
        there, here = store.identity.tokenizer, self.vocabulary.identity
        if there == UNKNOWN:
            _LOGGER.warning(
                "%s does not name its tokenizer, so it cannot be compared with that of this run",
                store.folder,
            )
        elif there != here:
            key = "data.tokenizer" if self.student_tokenizer is None else "teacher.tokenizer"
            raise StoreError(
                f"{store.folder}: its tokenizer is {there[:12]}, not {here[:12]} as in this run; "
                f"remove {key} to use that of the store, or capture a store with this one"
            )


def _open(entries: Sequence[StoreSourceConfig], fits: TokensOfRun) -> StoreSet:
    """Open all stores, entry by entry, so that each entry's samples are numbered in a row."""
    stores: list[StoreReader] = []
    for entry in entries:
        for folder in find_stores([entry.path]):
            if any(store.folder.samefile(folder) for store in stores):
                raise ConfigError(f"teacher.store: {folder} is named twice; name each store once")
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


def _check(
    stores: StoreSet, terms: Sequence[Term | ChunkTerm], data: DataConfig, seed: int
) -> None:
    """Raise StoreError unless the stores fit the objective and the length of the run."""
    for store in stores.stores:
        for index, term in enumerate(terms):
            if isinstance(term, ChunkTerm):
                _check_aligned(store, term, index)
            elif not store.settings.kind.is_ranked:
                _check_unranked(store, term, index)
            else:
                store.require(support=term.support, k=term.top_k, temperatures=[term.temperature])
        _check_documents(store, data.isolate_documents)
    if not data.sources:
        return
    if len(stores.stores) > 1:
        raise StoreError(
            f"teacher.store: {len(stores.stores)} stores, but only one can be joined with "
            "data.sources; name one store, or remove data.sources to train on the samples of the "
            "stores"
        )
    _check_corpus(stores.stores[0], data, seed)


def require_samples(stored: Stored, train: TrainConfig) -> None:
    """Raise StoreError, on all ranks, if a store used with a corpus ends before the run."""
    steps, batch = train.steps, train.global_batch_size
    if steps * batch > stored.samples:
        raise StoreError(
            f"teacher.store: contains {counted(stored.samples, 'sample')}, but train.steps = "
            f"{steps} with train.global_batch_size = {batch} reads {steps * batch:,}; lower "
            "train.steps, capture more samples, or remove data.sources to train on the store's "
            "samples for several epochs"
        )


def _check_documents(store: StoreReader, isolate_documents: bool) -> None:
    captured = store.identity.settings.get("dataset", {})
    isolated = captured.get("isolate_documents", isolate_documents)
    if isolated != isolate_documents:
        raise StoreError(
            f"{store.folder}: captured with data.isolate_documents={str(isolated).lower()}, and "
            "the student needs the same contexts; set the same value"
        )


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


def _check_teacher(config: RunConfig, digest: str, vocabulary: Vocabulary) -> None:
    """Raise StoreError, on all ranks, if the model beside `teacher.store` did not write the stores.

    Collective: world, those of `resolve_model` and `teacher_digest`.
    """
    section = config.teacher
    assert section is not None, "the caller has looked"
    source = resolve_model(config, "teacher", vocabulary)
    assert dist.group.WORLD is not None
    found = teacher_digest(source, seed=teacher_seed(config.seed), group=dist.group.WORLD)
    if found != digest:
        named = section.hf or section.checkpoint or "teacher.architecture"
        raise StoreError(
            f"teacher.store was captured from a teacher with weights {digest[:19]}, but {named} "
            f"has {found[:19]}; set the same teacher, or teacher.store alone"
        )


def _check_unranked(store: StoreReader, term: Term, index: int) -> None:
    is_at_one = term.temperature == 1.0 and term.temperatures is None
    if not term.is_forward_kl or not is_at_one or term.top_k is not None:
        raise StoreError(
            f"{store.folder}: contains {store.settings.kind.adjective} ids, which serve only "
            f"forward_kl at temperature 1 without top_k; change objective.terms.{index}, or "
            "capture a store with mode: top_k"
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
