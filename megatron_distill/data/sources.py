"""From source descriptions to samples: the training stream, the held-out samples, plain texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from megatron_distill.data.aligned.cache import DocumentCache, cache_folder
from megatron_distill.data.aligned.documents import PairEncoder
from megatron_distill.data.aligned.layout import AlignedLayout
from megatron_distill.data.aligned.packing import Window
from megatron_distill.data.aligned.stream import (
    RecordsOfDocuments,
    TwoTokenizers,
    Unaligned,
    encoding_pool,
)
from megatron_distill.data.blending import BlendedSource, ShuffledSamples, blend_finite
from megatron_distill.data.chat.prepare import conversation_texts, prepared_conversations
from megatron_distill.data.chat.source import (
    ConversationOptions,
    ConversationSource,
    ConversationSplit,
    TokenLayout,
    WindowLayout,
)
from megatron_distill.data.formats import SourceSpec, source_files
from megatron_distill.data.routing import RoutedPart, Routing, routed_parts, teacher_of_sample
from megatron_distill.data.samples import Sample, SampleList, SampleSource, permutation
from megatron_distill.data.stored import HELD_OUT_SEED
from megatron_distill.data.text.documents import Cursor, DocumentReader, is_held_out
from megatron_distill.data.text.files import fingerprint
from megatron_distill.data.text.indexed import IndexedSource
from megatron_distill.data.text.stream import (
    OneTokenizer,
    Order,
    PackedStream,
    StreamTokenizer,
    Tokenization,
)
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.data.tokenizers.protocol import begin_token
from megatron_distill.errors import DataError, counted

if TYPE_CHECKING:
    from megatron_distill.store import DocumentIndex

_COUNTED_BYTES: Final = 64 << 20  # seconds of tokenising: small beside a run
# Held-out samples read per sample used: a larger factor draws from more documents.
_HELD_OUT_CHOICE: Final = 8

_OfSource = Callable[[SourceSpec], Tokenization[Any]]
_Finite = IndexedSource | PackedStream[Any] | ConversationSource


@dataclass(frozen=True)
class JoinedStore:
    """A store whose records are found by the documents of samples in two tokenizers.

    index: of its documents. name: of its teacher among several; None: it is the only one.
    takes_all: whether a term takes the teacher on every sample. is_drawn: whether it may have
    samples of sources that name no teacher. is_of_student: whether its records are of the student's
    tokens, and not of the other teacher's.
    """

    index: DocumentIndex
    name: str | None = None
    takes_all: bool = True
    is_drawn: bool = True
    is_of_student: bool = False

    def records(self, spec: SourceSpec, share: float) -> RecordsOfDocuments:
        """What finds the records of a source's documents; share: as in `RecordsOfDocuments`."""
        is_own = self.is_drawn if spec.teacher is None else spec.teacher == self.name
        key = "teacher.store" if self.name is None else f"teachers.{self.name}.store"
        index = self.index if self.takes_all or is_own else None
        return RecordsOfDocuments(index, spec.name, share, key, self.is_of_student)


@dataclass(frozen=True)
class TeacherReading:
    """A teacher with a tokenizer of its own, whose samples have `sequence_length` tokens.

    max_unaligned: largest share of documents without a chunk that both tokenizers share. workers:
    processes that tokenise and align for all sources together, 0: none. distils_all: labels outside
    of chunks are distilled too, by teachers with the student's tokenizer. stores: those that are
    joined by documents, of this teacher and of teachers with the student's tokenizer.
    """

    tokenizer: Tokenizer
    sequence_length: int
    max_unaligned: float
    workers: int
    distils_all: bool = False
    stores: tuple[JoinedStore, ...] = ()

    def records(self, spec: SourceSpec) -> tuple[RecordsOfDocuments, ...]:
        """What finds the records of a source's documents, for each store.

        A document that the other teacher's store lacks is left out, so that store is first.
        """
        ordered = sorted(self.stores, key=lambda one: one.is_of_student)
        return tuple(one.records(spec, self.max_unaligned) for one in ordered)


@dataclass(frozen=True)
class DataOptions:
    """Options of reading, common to all sources.

    validation_fraction: share of documents held out from training, chosen by content.
    shuffle_buffer: documents per shuffled block. shuffle_samples: packed samples per shuffled
    window. on_error: "raise", or "skip" to count bad records. index_cache: folder for the indices
    of format megatron. conversations: masking, packing and preparation of conversations. teacher:
    None where the teacher has the student's tokenizer. add_bos: whether documents of text begin
    with the tokenizer's begin-of-text token; None: where the tokenizer's own files add it. routing:
    of samples to several teachers. document_cache_gib: most GiB of documents for a teacher with a
    tokenizer of its own, in the folder of the prepared conversations; 0: none.
    """

    sequence_length: int
    validation_fraction: float = 0.0
    shuffle_buffer: int = 256
    shuffle_samples: int = 1024
    on_error: str = "raise"
    index_cache: Path | None = None
    conversations: ConversationOptions | None = None
    teacher: TeacherReading | None = None
    add_bos: bool | None = None
    routing: Routing | None = None
    document_cache_gib: float = 0.0


def open_training(
    specs: Sequence[SourceSpec], *, tokenizer: StreamTokenizer, options: DataOptions, seed: int
) -> BlendedSource:
    """The endless training stream: each source shuffled and packed separately, blended by weight.

    Without held-out documents. Call it on the one rank that reads. Raises DataError.
    """

    tokenization, _ = _tokenization(tokenizer, options)

    def opened(spec: SourceSpec) -> list[SampleSource]:
        if not spec.kind.is_text:
            return list(_indexed(spec, tokenizer, options, seed, is_held_out=False))
        if spec.conversation is not None:
            return [_conversations(spec, tokenizer, options, seed, is_held_out=False)]
        order = Order(
            seed=seed,
            shuffle_buffer=options.shuffle_buffer,
            held_out_fraction=options.validation_fraction,
            is_held_out=False,
        )
        packed = _stream(spec, tokenization, options, order, epochs=None)
        window = options.shuffle_samples
        return [ShuffledSamples(packed, window=window, seed=seed, name=spec.name)]

    sources: list[SampleSource] = []
    weights: list[float] = []
    owners: list[int] = []
    routed: list[RoutedPart] = []
    for number, spec in enumerate(_named(specs, "data.sources")):
        for part in routed_parts(spec, options.routing):
            parts = opened(part.spec)
            sources.extend(parts)
            weights.extend([spec.weight * part.share / len(parts)] * len(parts))
            owners.extend([number] * len(parts))
            routed.extend([part] * len(parts))
    teacher_of = teacher_of_sample(routed, options.routing)
    return BlendedSource(sources, weights=weights, owners=owners, teacher_of=teacher_of)


def samples_per_epoch(
    spec: SourceSpec, *, tokenizer: StreamTokenizer, options: DataOptions, seed: int
) -> int:
    """Number of training samples of one epoch of a source, whose parts have epochs of their own.

    As `_samples_in_epoch` of each part: the rows of one teacher, or the whole source.
    """
    parts = routed_parts(spec, options.routing)
    return sum(_samples_in_epoch(part.spec, tokenizer, options, seed) for part in parts)


def _samples_in_epoch(
    spec: SourceSpec, tokenizer: StreamTokenizer, options: DataOptions, seed: int
) -> int:
    """Number of training samples of one epoch of a source; the last one may be incomplete.

    It tokenises the documents, so only small files are counted. The packing of conversations
    differs by a few samples from one epoch to the next. Call it on the one rank that reads.
    Raises DataError: there is too much text, or no trained label.
    """
    if not spec.kind.is_text:
        (indexed,) = _indexed(spec, tokenizer, options, seed, is_held_out=False)
        return indexed.samples_per_epoch
    if spec.conversation is not None:
        return _conversations(spec, tokenizer, options, seed, is_held_out=False).samples_in_epoch()
    size = sum(file.stat().st_size for file in source_files(spec))
    if size > _COUNTED_BYTES:
        raise DataError(
            f"train.epochs: data source {spec.name} has {size / 1e6:,.0f} MB of documents, and the "
            f"samples of more than {_COUNTED_BYTES / 1e6:,.0f} MB are not counted. Set "
            "train.steps, or run megatron-distill data tokenize"
        )
    order = Order(
        seed=seed,
        shuffle_buffer=options.shuffle_buffer,
        held_out_fraction=options.validation_fraction,
        is_held_out=False,
    )
    stream = _stream(spec, _tokenization(tokenizer, options)[0], options, order, epochs=1)
    samples = sum(1 for _ in iter(stream.next_or_none, None))
    if samples == 0:
        raise DataError(
            f"data source {spec.name}: no document to train on (its files are empty, or every "
            "document is held out); add documents or lower data.validation_fraction"
        )
    return samples


def held_out_samples(
    specs: Sequence[SourceSpec], *, tokenizer: StreamTokenizer, options: DataOptions, samples: int
) -> SampleList:
    """`samples` samples of the held-out documents, the same for every seed.

    They are drawn from several times as many, so that one long document cannot fill them all.
    options.validation_fraction must equal the training stream's, or 1.0 for separate validation
    sources. Only the last sample of a source may hold padding. Raises DataError if there are
    fewer samples.
    """
    takers: list[Callable[[], Sample | None]] = []
    weights: list[float] = []
    owners: list[int] = []
    named = _named(specs, "data.validation_sources")
    total = sum(spec.weight for spec in named)
    tokenization, cache = _tokenization(tokenizer, options)
    routing = options.routing and replace(options.routing, seed=HELD_OUT_SEED)
    routed: list[RoutedPart] = []
    for number, spec in enumerate(named):
        for of_teacher in routed_parts(spec, routing):
            parts = _held_out_parts(of_teacher.spec, tokenizer, tokenization, options)
            weight = spec.weight * of_teacher.share / len(parts)
            choice = _HELD_OUT_CHOICE * math.ceil(samples * weight / total)
            takers.extend(partial(next, _spread(part, choice), None) for part in parts)
            weights.extend([weight] * len(parts))
            owners.extend([number] * len(parts))
            routed.extend([of_teacher] * len(parts))
    found_samples = blend_finite(
        takers,
        weights=weights,
        count=samples,
        owners=owners,
        teacher_of=teacher_of_sample(routed, routing),
    )
    if cache is not None:
        cache.flush()  # streams that are not read to their end write none of their last documents
    if len(found_samples) < samples:
        raise DataError(
            f"validation.samples is {samples}, but the documents held out "
            f"(data.validation_fraction={options.validation_fraction}) fill only "
            f"{counted(len(found_samples), 'sample')} of {options.sequence_length} tokens; "
            + ("" if found_samples else "check that the files have documents, ")
            + "lower validation.samples, raise data.validation_fraction, or set "
            "data.validation_sources"
        )
    return SampleList(found_samples)


def all_held_out(
    specs: Sequence[SourceSpec], *, tokenizer: StreamTokenizer, options: DataOptions
) -> Iterator[Sample]:
    """All samples of the held-out documents: as many as `held_out_samples` gives at most.

    Raises DataError.
    """
    tokenization, _ = _tokenization(tokenizer, options)
    for spec in _named(specs, "data.validation_sources"):
        for part in _held_out_parts(spec, tokenizer, tokenization, options):
            yield from iter(part.next_or_none, None)


def _held_out_parts(
    spec: SourceSpec, tokenizer: StreamTokenizer, tokenization: _OfSource, options: DataOptions
) -> Sequence[_Finite]:
    """The finite streams of a source's held-out documents."""
    if not spec.kind.is_text:
        return _indexed(spec, tokenizer, options, HELD_OUT_SEED, is_held_out=True)
    if spec.conversation is not None:
        return [_conversations(spec, tokenizer, options, HELD_OUT_SEED, is_held_out=True)]
    order = Order(
        seed=HELD_OUT_SEED,
        shuffle_buffer=1,  # no reading ahead
        held_out_fraction=options.validation_fraction,
        is_held_out=True,
    )
    return [_stream(spec, tokenization, options, order, epochs=1)]


def _spread(source: _Finite, choice: int) -> Iterator[Sample]:
    """All samples of a finite source, each block of `choice` in a fixed shuffled order."""
    remaining = iter(source.next_or_none, None)
    while pool := list(islice(remaining, choice)):
        yield from (pool[index] for index in permutation(len(pool), HELD_OUT_SEED))


def sample_texts(
    specs: Sequence[SourceSpec], *, options: DataOptions, characters: int
) -> Iterator[str]:
    """Training texts of every source by weight, about `characters` in total, for a new tokenizer.

    Independent of the seed; held-out documents are left out. Raises DataError.
    """
    readable = [spec for spec in _named(specs, "data.sources") if spec.kind.is_text]
    if not readable:
        raise DataError(
            "data.tokenizer.train_vocab_size needs a source of text, and data.sources are all of "
            "format megatron; set data.tokenizer.path to the tokenizer they were made with"
        )
    total = sum(spec.weight for spec in readable)
    for spec in readable:
        budget = characters * spec.weight / total
        for text in _training_texts(spec, options):
            yield text[: max(1, int(budget))]
            budget -= len(text)
            if budget <= 0:
                break


def held_out_texts(specs: Sequence[SourceSpec], *, options: DataOptions) -> Iterator[str]:
    """The held-out documents of every source of text, in a fixed order; raises DataError."""
    for spec in _named(specs, "data.sources"):
        if spec.kind.is_text and spec.conversation is None:
            yield from _documents(spec, options, held_out=True)


def _training_texts(spec: SourceSpec, options: DataOptions) -> Iterator[str]:
    if spec.conversation is not None:
        skip_bad, fraction = options.on_error == "skip", options.validation_fraction
        yield from conversation_texts(spec, skip_bad=skip_bad, held_out_fraction=fraction)
        return
    yield from _documents(spec, options, held_out=False)


def _documents(spec: SourceSpec, options: DataOptions, *, held_out: bool) -> Iterator[str]:
    reader = _reader(spec, source_files(spec), options)
    order = permutation(len(reader.files), HELD_OUT_SEED)
    for document in reader.documents(order, Cursor()):
        if is_held_out(document.digest, options.validation_fraction) == held_out:
            yield document.text


def _named(specs: Sequence[SourceSpec], key: str) -> Sequence[SourceSpec]:
    if not specs:
        raise DataError(f"{key} is empty: name at least one source of documents")
    return specs


def _reader(spec: SourceSpec, files: Sequence[Path], options: DataOptions) -> DocumentReader:
    assert spec.kind.reader is not None, "its documents are text"
    return DocumentReader(files, read=spec.kind.reader(spec), skip_bad=options.on_error == "skip")


def _tokenization(
    tokenizer: StreamTokenizer, options: DataOptions
) -> tuple[_OfSource, DocumentCache | None]:
    """The tokenization of each source; all share worker processes and the cache."""
    length, teacher = options.sequence_length, options.teacher
    begin = begin_token(tokenizer, options.add_bos)
    if teacher is None:
        one = OneTokenizer(tokenizer, length, begin)
        return (lambda _spec: one), None
    begins = (begin, begin_token(teacher.tokenizer, options.add_bos))
    encoder = PairEncoder(cast(Tokenizer, tokenizer), teacher.tokenizer, begins)
    pool = encoding_pool(encoder, teacher.workers)
    cache = _document_cache(encoder, options)

    def of_source(spec: SourceSpec) -> Tokenization[Any]:
        return TwoTokenizers(
            encoder,
            length,
            teacher.sequence_length,
            pool,
            Unaligned(spec.name, teacher.max_unaligned),
            teacher.distils_all,
            teacher.records(spec),
            cache,
        )

    return of_source, cache


def _document_cache(encoder: PairEncoder, options: DataOptions) -> DocumentCache | None:
    """The cache of aligned documents; None if there is none."""
    most_bytes = int(options.document_cache_gib * 2**30)
    if options.conversations is None or most_bytes == 0:
        return None
    folder = cache_folder(
        options.conversations.cache, encoder.student, encoder.teacher, encoder.begins
    )
    return DocumentCache(folder, most_bytes)


def _stream(
    spec: SourceSpec,
    tokenization: _OfSource,
    options: DataOptions,
    order: Order,
    *,
    epochs: int | None,
) -> PackedStream[Any]:
    files = source_files(spec)
    return PackedStream(
        _reader(spec, files, options),
        tokenization(spec),
        order=order,
        name=spec.name,
        fingerprint=fingerprint(files)
        + (f", {spec.rows.field} = {spec.rows.value}" if spec.rows else ""),
        epochs=epochs,
    )


def _indexed(
    spec: SourceSpec,
    tokenizer: StreamTokenizer,
    options: DataOptions,
    seed: int,
    *,
    is_held_out: bool,
) -> list[IndexedSource]:
    if not spec.paths:
        raise DataError("a data source of format megatron names no prefix: give data.sources.paths")
    return [
        IndexedSource(
            prefix,
            sequence_length=options.sequence_length,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            seed=seed,
            held_out_fraction=options.validation_fraction,
            is_held_out=is_held_out,
            cache=options.index_cache,
        )
        for prefix in spec.paths
    ]


def _conversations(
    spec: SourceSpec,
    tokenizer: StreamTokenizer,
    options: DataOptions,
    seed: int,
    *,
    is_held_out: bool,
) -> ConversationSource[Any]:
    given, teacher = options.conversations, options.teacher
    assert given is not None, "options of conversations name the folder of the cache"
    prepared = prepared_conversations(
        spec,
        cast(Tokenizer, tokenizer),
        options=given,
        skip_bad=options.on_error == "skip",
        teacher=None if teacher is None else teacher.tokenizer,
        max_unaligned=0.0 if teacher is None else teacher.max_unaligned,
    )
    width, eos_id = options.sequence_length + 1, tokenizer.eos_id
    layout: WindowLayout[Any] = TokenLayout(prepared, width, eos_id, given.truncation)
    if teacher is not None:
        other = Window(teacher.sequence_length + 1, teacher.tokenizer.eos_id)
        own = Window(width, eos_id)
        layout = AlignedLayout(prepared, own, other, given.truncation, teacher.distils_all)
    return ConversationSource(
        prepared,
        layout,
        choice=ConversationSplit(seed, options.validation_fraction, is_held_out),
        truncation=given.truncation,
        packing_buffer=given.packing_buffer,
        name=spec.name,
        epochs=1 if is_held_out else None,
    )
