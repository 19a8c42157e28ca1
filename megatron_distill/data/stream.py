"""The endless, shuffled, tokenised and packed stream of one source of documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_distill.data.documents import Cursor, Document, DocumentReader, is_held_out
from megatron_distill.data.order import permutation
from megatron_distill.data.packing import Packer
from megatron_distill.data.samples import Sample, State
from megatron_distill.errors import DataError

BLOCK_CHARACTERS: Final = 64 << 20  # a shuffled block ends here if its documents are long
_ENCODED_CHARACTERS: Final = 1 << 19  # tokenised at once: enough to keep every core busy

Mark = TypeVar("Mark")


class TextEncoder(Protocol):
    """What a stream needs of a tokenizer (every `Tokenizer` is one)."""

    vocab_size: int
    eos_id: int
    identity: str

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids of each text."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """A document's place in the endless order: the epoch, its block, and its rank in the block.

    `start` is where the block begins in the files of that epoch, `skipped` the bad records passed
    over before it.
    """

    epoch: int = 0
    block: int = 0
    document: int = 0
    start: Cursor = field(default_factory=Cursor)
    skipped: int = 0


Encoded = tuple[NDArray[np.int32], Place]
"""A document's tokens and its place."""


@dataclass(frozen=True)
class Order:
    """How documents are chosen and shuffled.

    The files' order is a function of (seed, epoch), the documents' order inside a block of
    `shuffle_buffer` of (seed, epoch, block). Only the held-out documents count where `is_held_out`,
    only the others where not.
    """

    seed: int
    shuffle_buffer: int
    held_out_fraction: float
    is_held_out: bool

    def selects(self, digest: bytes) -> bool:
        """Whether a document counts."""
        return is_held_out(digest, self.held_out_fraction) == self.is_held_out


class PackedStream:
    """Samples of one source, epoch after epoch; a `SampleSource`.

    Its state is the place of the document, and the token in it, where the next sample begins; going
    back there reads one block again. Memory: one block of text and its tokens.
    """

    def __init__(
        self,
        reader: DocumentReader,
        tokenizer: TextEncoder,
        *,
        order: Order,
        sequence_length: int,
        name: str,
        fingerprint: str,
        epochs: int | None = None,
    ) -> None:
        self._reader = reader
        self._tokenizer = tokenizer
        self._order = order
        self._sequence_length = sequence_length
        self._name = name
        self._epochs = epochs
        self._identity: State = {
            "files": fingerprint,
            "tokenizer": tokenizer.identity,
            "seed": order.seed,
            "shuffle_buffer": order.shuffle_buffer,
            "validation_fraction": order.held_out_fraction,
        }
        self._begin(Place(), token=0, samples=0)

    def _begin(self, place: Place, *, token: int, samples: int) -> None:
        self._reader.skipped = place.skipped
        self._samples = samples
        self._first = (place, token)
        self._packer: Packer[Place] = Packer(
            self._sequence_length, padding_token=self._tokenizer.eos_id
        )
        self._skip = token
        self._encoded = self._encoded_from(place)

    @property
    def skipped(self) -> int:
        """Bad records passed over so far, read-ahead included."""
        return self._reader.skipped

    def next_sample(self) -> Sample:
        """The next sample; only of an endless stream. Raises DataError."""
        sample = self.next_or_none()
        assert sample is not None, "the stream has an end"
        return sample

    def next_or_none(self) -> Sample | None:
        """The next sample, its tail padded if the last epoch ends in it; None after the end."""
        while not self._packer.is_ready:
            encoded = next(self._encoded, None)
            if encoded is None:
                return self._packer.flush(self._samples)
            tokens, place = encoded
            self._packer.add(tokens, place, skip=self._skip)
            self._skip = 0
        sample = self._packer.take(self._samples)
        self._samples += 1
        return sample

    def state_dict(self) -> State:
        """Plain values, less than 1 kB."""
        place, token = self._packer.start or self._first
        return {**self._identity, "samples": self._samples, "token": token, **asdict(place)}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state. Raises DataError if files, tokenizer or order are not the same."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise DataError(
                    f"data source {self._name}: its {key} changed from {state.get(key)}, when the "
                    f"checkpoint was written, to {value}; restore it, or start a new run with "
                    "another output"
                )
        place = Place(
            epoch=state["epoch"],
            block=state["block"],
            document=state["document"],
            start=Cursor(**state["start"]),
            skipped=state["skipped"],
        )
        self._begin(place, token=state["token"], samples=state["samples"])

    def _encoded_from(self, place: Place) -> Iterator[Encoded]:
        """Tokens of the documents in training order from `place` on, epoch after epoch."""
        while self._epochs is None or place.epoch < self._epochs:
            begins_epoch = place == Place(epoch=place.epoch, skipped=place.skipped)
            is_empty = True
            for item in self._epoch(place):
                is_empty = False
                yield item
            if begins_epoch and is_empty and self._epochs is None:
                raise DataError(
                    f"data source {self._name}: no document to train on (its files are empty, or "
                    "every document is held out); add documents or lower data.validation_fraction"
                )
            place = Place(epoch=place.epoch + 1, skipped=self._reader.skipped)

    def _epoch(self, place: Place) -> Iterator[Encoded]:
        files = permutation(len(self._reader.files), self._order.seed, place.epoch)
        documents = self._reader.documents(files, place.start)
        while block := self._block(documents):
            order = permutation(len(block), self._order.seed, place.epoch, place.block)
            # Never across blocks: a block is what going back reads again.
            yield from encoded(
                (
                    (block[order[rank]], replace(place, document=rank))
                    for rank in range(place.document, len(block))
                ),
                self._tokenizer,
            )
            after = block[-1].after
            place = Place(place.epoch, place.block + 1, 0, after, self._reader.skipped)

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
    documents: Iterable[tuple[Document, Mark]], tokenizer: TextEncoder
) -> Iterator[tuple[NDArray[np.int32], Mark]]:
    """Tokenise marked documents, many at once, and end each whole one with its token."""
    end = np.array([tokenizer.eos_id], np.int32)
    for batch in _batches(documents):
        rows = tokenizer.encode_batch([document.text for document, _ in batch])
        for row, (document, mark) in zip(rows, batch, strict=True):
            yield (np.concatenate([row, end]) if document.is_end else row), mark


def _batches(
    documents: Iterable[tuple[Document, Mark]],
) -> Iterator[list[tuple[Document, Mark]]]:
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
