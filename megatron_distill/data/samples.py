"""One packed training sample, and the protocol of sample sources."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

CE_TRAINED: Final = 1
KD_TRAINED: Final = 2
FULLY_TRAINED: Final = CE_TRAINED | KD_TRAINED
PADDING_DOCUMENT: Final = -1
NO_CHUNK: Final = -1
NO_TEACHER: Final = -1
WEIGHT_UNITS: Final = 64
"""Weights of labels are multiples of 1/64."""
_WEIGHT_SHIFT: Final = 2

State = dict[str, Any]
"""Plain values only (numbers, strings, lists, dicts): it goes through JSON."""


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """The tokens of one document in a sample.

    digest: of the document's text. first: number of the first one among the document's tokens,
    those before and behind the text included.
    """

    digest: bytes
    first: int


@dataclass(frozen=True)
class TeacherTokens:
    """A sample's text in U + 1 tokens of a teacher with a tokenizer of its own.

    Token and document arrays are as in `Sample`. chunks_U1[i] is the number of the chunk that token
    i is a label of, -1 for none. student_chunks_S1 holds the same for the student's tokens. The
    chunks of a sample are numbered from 0; each has labels on both sides. places_U12[i] is the
    record of a store, and the position in it, that predict token i of a chunk, -1 for no chunk.
    student_places_S1k2 has the same of the student's tokens, in the records of k stores. None: the
    sample is not joined with such a store by its documents.
    """

    tokens_U1: NDArray[np.int32]
    document_ids_U1: NDArray[np.int32]
    chunks_U1: NDArray[np.int32]
    student_chunks_S1: NDArray[np.int32]
    places_U12: NDArray[np.int32] | None = None
    student_places_S1k2: NDArray[np.int32] | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return int(self.chunks_U1.max()) + 1


@dataclass(frozen=True)
class JoinedSides:
    """Whose tokens have places in records of stores, as in `TeacherTokens`.

    student: the number of stores with records of the student's tokens. teacher: whether one has
    records of the tokens of a teacher with a tokenizer of its own.
    """

    student: int = 0
    teacher: bool = False


NOT_JOINED: Final = JoinedSides()


@dataclass(frozen=True)
class Sample:
    """S + 1 consecutive tokens: position i is trained to predict token i + 1.

    document_ids_S1 counts the documents inside the sample from 0, -1 marks padding (always at the
    end). flags_S1[i] holds the loss masks of token i **as a label**: bit 0 of cross-entropy,
    bit 1 of distillation. Masking at the boundary of two documents is not part of the flags. The
    upper six bits hold one minus the weight, in units of 1/64, see `weight_flag`.
    source is the index of the blended source. teacher is None where the teacher has the same
    tokenizer. teacher_number is that of the sample's teacher among several, -1 for none.
    number_in_source counts the samples of its source, or of each part of one, from 0. documents
    are those of document_ids_S1 in their order; () where they are not known by a digest.
    """

    tokens_S1: NDArray[np.int32]
    document_ids_S1: NDArray[np.int32]
    flags_S1: NDArray[np.uint8]
    sample_id: int
    source: int = 0
    teacher: TeacherTokens | None = None
    teacher_number: int = NO_TEACHER
    number_in_source: int = 0
    documents: tuple[DocumentPart, ...] = ()


def weight_flag(weight: float) -> int:
    """The flag bits of a label's weight in (0, 1], rounded to a multiple of 1/64, at least 1/64."""
    assert 0 < weight <= 1, weight
    units = max(1, round(weight * WEIGHT_UNITS))
    return WEIGHT_UNITS - units << _WEIGHT_SHIFT


class SampleSource(Protocol):
    """An endless sequence of samples with a state to resume from."""

    def next_sample(self) -> Sample:
        """The next sample. Raises DataError."""
        ...

    def state_dict(self) -> State:
        """The position of the next sample, in plain values."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Resume from `state`. Raises DataError if it belongs to other data."""
        ...


def untrained_sample(sequence_length: int, *, token: int, sample_id: int) -> Sample:
    """A sample of padding only, with a valid token id; it fills an incomplete global batch."""
    return Sample(
        tokens_S1=np.full(sequence_length + 1, token, np.int32),
        document_ids_S1=np.full(sequence_length + 1, PADDING_DOCUMENT, np.int32),
        flags_S1=np.zeros(sequence_length + 1, np.uint8),
        sample_id=sample_id,
    )


def untrained_like(sample: Sample, sample_id: int) -> Sample:
    """A sample of padding only, with as many tokens on each side as another."""
    length, teacher = len(sample.tokens_S1) - 1, sample.teacher
    filler = untrained_sample(length, token=int(sample.tokens_S1[0]), sample_id=sample_id)
    if teacher is None:
        return filler
    places = teacher.places_U12, teacher.student_places_S1k2
    padding = TeacherTokens(
        np.full_like(teacher.tokens_U1, teacher.tokens_U1[0]),
        np.full_like(teacher.document_ids_U1, PADDING_DOCUMENT),
        np.full_like(teacher.chunks_U1, NO_CHUNK),
        np.full_like(teacher.student_chunks_S1, NO_CHUNK),
        *(None if one is None else np.full_like(one, -1) for one in places),
    )
    return replace(filler, teacher=padding)


class SampleList:
    """A fixed list of samples, followed by untrained ones without end.

    `steps(global_batch_size)` steps read each sample once; `load_state_dict({"next": 0})` rewinds.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        assert samples, "a list without a sample has no sequence length"
        self.samples = tuple(samples)
        self._next = 0

    def steps(self, global_batch_size: int) -> int:
        """Steps that read every sample once; the last one is filled up with untrained samples."""
        return -(-len(self.samples) // global_batch_size)

    def next_sample(self) -> Sample:
        """The next sample of the list, or an untrained one after its end."""
        index = self._next
        self._next += 1
        if index < len(self.samples):
            return self.samples[index]
        return untrained_like(self.samples[0], index)

    def state_dict(self) -> State:
        """{"next": index of the next sample}."""
        return {"next": self._next}

    def load_state_dict(self, state: State) -> None:
        """Continue at `state["next"]`."""
        self._next = state["next"]


_FEISTEL_ROUNDS: Final = 4


def permutation(count: int, *key: int) -> list[int]:
    """A pseudo-random order of range(count), a pure function of `count` and the key's integers.

    Sorted by keyed hash instead of drawn from a generator. There is no state to save, and the order
    cannot change with the version of a library.
    """
    prefix = struct.pack(f"<{len(key)}q", *key)

    def rank(index: int) -> bytes:
        return hashlib.blake2b(struct.pack("<q", index), digest_size=16, key=prefix).digest()

    return sorted(range(count), key=rank)


def shuffled(index: int, count: int, *key: int) -> int:
    """Element `index` of a pseudo-random order of range(count), in O(1) memory.

    For orders too long to store: a Feistel network of four rounds on the next power of four,
    applied until the number is below `count`. See Black and Rogaway, 2002, "Ciphers with arbitrary
    finite domains", method 2. A pure function of its arguments.
    """
    assert 0 <= index < count, (index, count)
    half = max(1, -(-(count - 1).bit_length() // 2))
    mask = (1 << half) - 1
    prefix = struct.pack(f"<{len(key)}q", *key)
    while True:
        left, right = index >> half, index & mask
        for turn in range(_FEISTEL_ROUNDS):
            data = struct.pack("<qq", turn, right)
            word = hashlib.blake2b(data, digest_size=8, key=prefix).digest()
            left, right = right, left ^ (int.from_bytes(word, "little") & mask)
        index = left << half | right
        if index < count:
            return index


def derived_seed(*key: int) -> int:
    """A seed in [0, 2**31) for other libraries, a pure function of the key's integers."""
    data = struct.pack(f"<{len(key)}q", *key)
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "big") >> 1
