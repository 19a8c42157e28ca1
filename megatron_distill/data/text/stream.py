"""The endless, shuffled, tokenised and packed stream of one source of documents."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_distill.data.formats import SourceSpec, source_files
from megatron_distill.data.samples import (
    FULLY_TRAINED,
    PADDING_DOCUMENT,
    DocumentPart,
    Sample,
    State,
    permutation,
)
from megatron_distill.data.text.documents import (
    Cursor,
    Document,
    DocumentReader,
    is_held_out,
)
from megatron_distill.data.tokenizers.protocol import begin_token, encoded_or_refused
from megatron_distill.errors import DataError

BLOCK_CHARACTERS: Final = 64 << 20  # limit of a shuffled block with long documents
_ENCODED_CHARACTERS: Final = 1 << 19  # tokenised at once: enough to keep every core busy

Mark = TypeVar("Mark")
Item = TypeVar("Item")
Added = TypeVar("Added", contravariant=True)


class StreamTokenizer(Protocol):
    """The part of the `Tokenizer` protocol that a stream needs."""

    vocab_size: int
    eos_id: int
    bos_id: int | None
    adds_bos: bool
    identity: str

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids of each text."""
        ...


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A document's place in the endless order: epoch, block, and index in the shuffled block.

    `start` is the cursor of the block's beginning in that epoch's files, `skipped` the number of
    bad records skipped before it.
    """

    epoch: int = 0
    block: int = 0
    document: int = 0
    start: Cursor = field(default_factory=Cursor)
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class DocumentMark:
    """A document's place in the endless order, and the digest of its text."""

    position: StreamPosition
    digest: bytes


@dataclass(frozen=True)
class Order:
    """Selection and shuffling of documents.

    The files' order is a function of (seed, epoch), the documents' order inside a block of
    `shuffle_buffer` of (seed, epoch, block). `is_held_out` selects the held-out documents
    if true, the training documents if false.
    """

    seed: int
    shuffle_buffer: int
    held_out_fraction: float
    is_held_out: bool

    def selects(self, digest: bytes) -> bool:
        """Whether a document is selected."""
        return is_held_out(digest, self.held_out_fraction) == self.is_held_out


DocumentBlock = Sequence[tuple[Document, DocumentMark]]
"""Documents in training order, each with its mark; batches of documents never cross blocks."""


class DocumentPacker(Protocol[Added, Mark]):
    """Cuts a row of tokenised documents into samples; see `Packer`."""

    @property
    def is_ready(self) -> bool:
        """Whether a whole sample can be cut."""
        ...

    @property
    def start(self) -> tuple[Mark, int] | None:
        """Mark and offset of the document where the next sample begins; None if unknown."""
        ...

    def add(self, tokens: Added, mark: Mark, *, skip: int = 0) -> None:
        """Append a document without its first `skip` parts; `skip` only for the first document."""
        ...

    def take(self, sample_id: int) -> Sample:
        """Cut the next sample; only when `is_ready`."""
        ...

    def flush(self, sample_id: int) -> Sample | None:
        """Cut what remains into one padded sample; None if it contains no label."""
        ...


class Tokenization(Protocol[Item]):
    """How documents become the tokens that are packed: of one tokenizer, or of two."""

    @property
    def identity(self) -> State:
        """The tokenizers, as part of a stream's state."""
        ...

    def encoded(self, blocks: Iterable[DocumentBlock]) -> Iterator[tuple[Item, DocumentMark]]:
        """Tokenise the documents of blocks, in order. Raises DataError."""
        ...

    def packer(self) -> DocumentPacker[Item, DocumentMark]:
        """An empty packer."""
        ...


@dataclass(frozen=True)
class OneTokenizer:
    """Documents in the tokens of one tokenizer, packed into windows of S + 1 tokens.

    begin: the id before each document, None for none.
    """

    tokenizer: StreamTokenizer
    sequence_length: int
    begin: int | None

    @property
    def identity(self) -> State:
        """See `Tokenization`."""
        return {"tokenizer": self.tokenizer.identity, "begin_token": self.begin}

    def encoded(
        self, blocks: Iterable[DocumentBlock]
    ) -> Iterator[tuple[NDArray[np.int32], DocumentMark]]:
        """See `Tokenization`."""
        for block in blocks:
            yield from encoded(block, self.tokenizer, begin=self.begin)

    def packer(self) -> Packer[DocumentMark]:
        """See `Tokenization`."""
        return Packer(
            self.sequence_length,
            padding_token=self.tokenizer.eos_id,
            digest_of=lambda mark: mark.digest,
        )


# Checkpoints from before `data.add_bos` have documents without a begin-of-text token.
_REMEDIES: Final = dict.fromkeys(
    ("begin_token", "teacher_begin_token"), "set data.add_bos as then, false for none"
)


class PackedStream(Generic[Item]):
    """Samples of one source, epoch after epoch; a `SampleSource`.

    The state is the document, and the token or chunk in it, where the next sample begins. Resuming
    reads one block again. Memory: one block of text and its tokens.
    """

    def __init__(
        self,
        reader: DocumentReader,
        tokenization: Tokenization[Item],
        *,
        order: Order,
        name: str,
        fingerprint: str,
        epochs: int | None = None,
    ) -> None:
        self._reader = reader
        self._tokenization = tokenization
        self._order = order
        self._name = name
        self._epochs = epochs
        self._identity: State = {
            "files": fingerprint,
            **tokenization.identity,
            "seed": order.seed,
            "shuffle_buffer": order.shuffle_buffer,
            "validation_fraction": order.held_out_fraction,
        }
        self._begin(StreamPosition(), token=0, samples=0)

    def _begin(self, place: StreamPosition, *, token: int, samples: int) -> None:
        self._reader.skipped = place.skipped
        self._samples = samples
        self._first = (place, token)
        self._packer = self._tokenization.packer()
        self._skip = token
        self._encoded = self._tokenization.encoded(self._blocks_from(place))

    @property
    def skipped(self) -> int:
        """Bad records skipped so far, read-ahead included."""
        return self._reader.skipped

    def next_sample(self) -> Sample:
        """The next sample of an endless stream. Raises DataError."""
        sample = self.next_or_none()
        assert sample is not None, "the stream has an end"
        return sample

    def next_or_none(self) -> Sample | None:
        """The next sample, its tail padded if the last epoch ends in it; None after the end."""
        while not self._packer.is_ready:
            encoded = next(self._encoded, None)
            if encoded is None:
                return self._packer.flush(self._samples)
            tokens, mark = encoded
            self._packer.add(tokens, mark, skip=self._skip)
            self._skip = 0
        sample = self._packer.take(self._samples)
        self._samples += 1
        return sample

    def state_dict(self) -> State:
        """Plain values, less than 1 kB."""
        place, token = self._first
        if self._packer.start is not None:
            mark, token = self._packer.start
            place = mark.position
        return {**self._identity, "samples": self._samples, "token": token, **asdict(place)}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state. Raises DataError if files, tokenizer or order are not the same."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                remedy = _REMEDIES.get(key, "restore it")
                raise DataError(
                    f"data source {self._name}: {key} differs from the checkpoint ({value}, was "
                    f"{state.get(key)}); {remedy}, or start a new run with another output"
                )
        place = StreamPosition(
            epoch=state["epoch"],
            block=state["block"],
            document=state["document"],
            start=Cursor(**state["start"]),
            skipped=state["skipped"],
        )
        self._begin(place, token=state["token"], samples=state["samples"])

    def _blocks_from(self, place: StreamPosition) -> Iterator[DocumentBlock]:
        """The shuffled blocks of documents from `place` on, epoch after epoch."""
        while self._epochs is None or place.epoch < self._epochs:
            begins_epoch = place == StreamPosition(epoch=place.epoch, skipped=place.skipped)
            is_empty = True
            for block in self._epoch(place):
                is_empty = False
                yield block
            if begins_epoch and is_empty and self._epochs is None:
                raise DataError(
                    f"data source {self._name}: no document to train on (its files are empty, or "
                    "every document is held out); add documents or lower data.validation_fraction"
                )
            place = StreamPosition(epoch=place.epoch + 1, skipped=self._reader.skipped)

    def _epoch(self, place: StreamPosition) -> Iterator[DocumentBlock]:
        files = permutation(len(self._reader.files), self._order.seed, place.epoch)
        documents = self._reader.documents(files, place.start)
        while block := self._block(documents):
            order = permutation(len(block), self._order.seed, place.epoch, place.block)
            yield [
                (
                    block[order[rank]],
                    DocumentMark(replace(place, document=rank), block[order[rank]].text_digest),
                )
                for rank in range(place.document, len(block))
            ]
            after = block[-1].after
            place = StreamPosition(place.epoch, place.block + 1, 0, after, self._reader.skipped)

    def _block(self, documents: Iterator[Document]) -> list[Document]:
        block: list[Document] = []
        characters = 0
        for document in documents:
            if self._order.selects(document.digest):
                block.append(document)
                characters += len(document.text)
                if len(block) >= self._order.shuffle_buffer or characters >= BLOCK_CHARACTERS:
                    break
        return block


def encoded(
    documents: Iterable[tuple[Document, Mark]], tokenizer: StreamTokenizer, *, begin: int | None
) -> Iterator[tuple[NDArray[np.int32], Mark]]:
    """Tokenise marked documents in batches, between `begin` and the end-of-document token.

    Raises DataError for a document that the tokenizer cannot encode.
    """
    none = np.zeros(0, np.int32)
    first = none if begin is None else np.array([begin], np.int32)
    end = np.array([tokenizer.eos_id], np.int32)
    for batch in document_batches(documents):
        rows = encoded_or_refused(tokenizer, [document.text for document, _ in batch])
        for row, (document, mark) in zip(rows, batch, strict=True):
            if isinstance(row, DataError):
                raise DataError(f"{document.place}: {row}") from row
            before, behind = first if document.is_start else none, end if document.is_end else none
            yield np.concatenate([before, row, behind]), mark


def document_batches(
    documents: Iterable[tuple[Document, Mark]],
) -> Iterator[list[tuple[Document, Mark]]]:
    """Yield consecutive documents in batches of a size that keeps a tokenizer busy."""
    batch: list[tuple[Document, Mark]] = []
    characters = 0
    for item in documents:
        batch.append(item)
        characters += len(item[0].text)
        if characters >= _ENCODED_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@dataclass(frozen=True)
class _PackedTokens(Generic[Mark]):
    tokens: NDArray[np.int32]
    mark: Mark


class Packer(Generic[Mark]):
    """Cuts a row of documents into windows of S + 1 tokens with stride S.

    The last label of one sample is the first token of the next, so that every token except the
    first is a label exactly once. A document that does not end inside a sample continues in the
    next one as a separate document, since attention cannot look back across samples.

    Each document carries a mark. `start` gives the mark and the token offset at which the next
    sample begins, which suffices to resume there. `digest_of` returns the digest in a mark, for the
    documents of the samples; None: these are not known.
    """

    def __init__(
        self,
        sequence_length: int,
        *,
        padding_token: int,
        digest_of: Callable[[Mark], bytes] | None = None,
    ) -> None:
        self.sequence_length = sequence_length
        self.padding_token = padding_token
        self._digest_of = digest_of
        self._segments: deque[_PackedTokens[Mark]] = deque()
        self._offset = 0  # of the next sample inside the first segment
        self._available = 0

    @property
    def is_ready(self) -> bool:
        """Whether a whole sample can be cut."""
        return self._available > self.sequence_length

    @property
    def start(self) -> tuple[Mark, int] | None:
        """Mark and token offset of the document where the next sample begins; None if unknown."""
        if not self._segments:
            return None
        return self._segments[0].mark, self._offset

    def add(self, tokens: NDArray[np.int32], mark: Mark, *, skip: int = 0) -> None:
        """Append a document without its first `skip` tokens; `skip` only for the first document."""
        assert skip == 0 or not self._segments, "only the first document can begin inside"
        if len(tokens) <= skip:
            return
        if not self._segments:
            self._offset = skip
        self._segments.append(_PackedTokens(tokens, mark))
        self._available += len(tokens) - skip

    def take(self, sample_id: int) -> Sample:
        """Cut the next sample; only when `is_ready`."""
        assert self.is_ready
        return self._cut(self.sequence_length + 1, sample_id)

    def flush(self, sample_id: int) -> Sample | None:
        """Cut the remaining tokens into one padded sample; None if they contain no label."""
        assert not self.is_ready
        sample = self._cut(self._available, sample_id) if self._available > 1 else None
        self._segments.clear()
        self._available = self._offset = 0
        return sample

    def _cut(self, length: int, sample_id: int) -> Sample:
        width = self.sequence_length + 1
        tokens = np.full(width, self.padding_token, np.int32)
        documents = np.full(width, PADDING_DOCUMENT, np.int32)
        parts: list[DocumentPart] = []
        filled, offset = 0, self._offset
        for document, segment in enumerate(self._segments):
            part = segment.tokens[offset : offset + length - filled]
            if self._digest_of is not None:
                parts.append(DocumentPart(self._digest_of(segment.mark), offset))
            tokens[filled : filled + len(part)] = part
            documents[filled : filled + len(part)] = document
            filled, offset = filled + len(part), 0
            if filled == length:
                break
        self._advance(length - 1)
        flags = np.where(documents == PADDING_DOCUMENT, 0, FULLY_TRAINED).astype(np.uint8)
        return Sample(tokens, documents, flags, sample_id, documents=tuple(parts))

    def _advance(self, count: int) -> None:
        self._available -= count
        self._offset += count
        while self._segments and self._offset >= len(self._segments[0].tokens):
            self._offset -= len(self._segments.popleft().tokens)


def tokenized_documents(
    spec: SourceSpec, tokenizer: StreamTokenizer, *, skip_bad: bool, add_bos: bool | None = None
) -> Iterator[list[NDArray[np.int32]]]:
    """Yield each document as consecutive rows of ids, its end-of-document token last.

    All documents, unshuffled. add_bos: as `data.add_bos`. Raises DataError, see `DocumentReader`
    and `begin_token`.
    """
    if spec.kind.reader is None:
        raise DataError(f"a source of format {spec.format} is already tokenised")
    reader = DocumentReader(
        source_files(spec),
        read=spec.kind.reader(spec),
        skip_bad=skip_bad,
    )
    pieces = reader.documents(range(len(reader.files)), Cursor())
    parts: list[NDArray[np.int32]] = []
    begin = begin_token(tokenizer, add_bos)
    if begin == tokenizer.eos_id:
        begin = None  # a reader of the pair would take it for a document of its own
    marked = ((piece, piece.is_end) for piece in pieces)
    for row, is_end in encoded(marked, tokenizer, begin=begin):
        parts.append(row)
        if is_end:
            yield parts
            parts = []
