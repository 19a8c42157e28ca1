"""The record of one training sample: its tokens, and the teacher's distribution after each.

A packed record is a header and a payload of sections on 8-byte boundaries.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_distill.errors import StoreError
from megatron_distill.ops import VocabShard
from megatron_distill.ops.frozen_head import OutputChunk
from megatron_distill.signals import IdSignal, LogitRule, Support

__all__ = [
    "ALIGNED_VERSION",
    "Array",
    "ArraySpec",
    "EncodedEntries",
    "Entries",
    "EntrySettings",
    "Floats",
    "HAS_SCALARS",
    "HAS_TAIL",
    "HEADER_BYTES",
    "Header",
    "IS_RAGGED",
    "Integers",
    "MAGIC",
    "PositionScalars",
    "RECORD_VERSION",
    "SampleRecord",
    "SampleTokens",
    "Sections",
    "Selection",
    "SelectionPlace",
    "StudentTokens",
    "clamped",
    "count_dtype",
    "cut_to_k",
    "header_is_intact",
    "record_at",
    "trained_positions",
    "used_mask",
]


Array: TypeAlias = NDArray[Any]

MAGIC: Final = b"TLSTORE1"
RECORD_VERSION: Final = 1
ALIGNED_VERSION: Final = 2  # with the same text in a student's tokens
HEADER_BYTES: Final = 128
_FIELDS: Final = struct.Struct("<8sHBBBBHIIIIQQ16s8sQIII")
_CRC: Final = struct.Struct("<I")
_CRC_OFFSET: Final = HEADER_BYTES - _CRC.size
IS_RAGGED: Final = 1
HAS_TAIL: Final = 2
HAS_SCALARS: Final = 4


class Header(NamedTuple):
    """The fields of a record's header, in their order."""

    magic: bytes
    version: int
    mode: int
    codec: int
    planes: int
    temperatures: int
    flags: int
    positions: int
    vocab_size: int
    k: int
    runs: int
    sample_id: int
    entries: int
    digest: bytes
    uid: bytes
    payload_bytes: int
    payload_crc: int
    student_positions: int = 0
    student_runs: int = 0

    @classmethod
    def of(cls, packed: bytes) -> Header:
        """The header of verified bytes."""
        return cls(*_FIELDS.unpack_from(packed))

    @property
    def is_ragged(self) -> bool:
        """Whether rows are of unequal length."""
        return bool(self.flags & IS_RAGGED)

    @property
    def is_aligned(self) -> bool:
        """Whether the record has the text in a student's tokens."""
        return self.version == ALIGNED_VERSION

    @property
    def content(self) -> bytes:
        """The bytes of the header with its checksum."""
        fields = _FIELDS.pack(*self).ljust(_CRC_OFFSET, b"\0")
        return fields + _CRC.pack(zlib.crc32(fields))


def header_is_intact(packed: bytes) -> bool:
    """Whether the header of packed bytes matches its checksum."""
    checksum: int = _CRC.unpack_from(packed, _CRC_OFFSET)[0]
    return checksum == zlib.crc32(packed[:_CRC_OFFSET])


@dataclass
class Sections:
    """Reads a payload's sections one after another."""

    packed: bytes
    offset: int = HEADER_BYTES

    def take(self, dtype: str, count: int) -> Array:
        """The next section; a view. Raises StoreError: the payload is too short."""
        size = np.dtype(dtype).itemsize * count
        if self.offset + size > len(self.packed):
            raise StoreError("damaged: the payload is shorter than in its header")
        found = np.frombuffer(self.packed, dtype, count, self.offset)
        self.offset += size + -size % 8
        return found


def count_dtype(k: int) -> str:
    """The narrowest dtype that holds a number of ids up to k."""
    return "<u1" if k < 1 << 8 else "<u2" if k < 1 << 16 else "<u4"


def clamped(values: Array, dtype: str) -> Array:
    """Logs of masses in a dtype; positive masses below its range are clamped."""
    lowest = np.finfo(dtype).min
    return np.where(np.isneginf(values), values, np.maximum(values, lowest)).astype(dtype)


Floats: TypeAlias = NDArray[np.float32]
Integers: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PositionScalars:
    """Three numbers per position, fp32 in nats.

    Attributes:
        log_sum_exp_S: of the teacher's logits, which are `log_prob + log_sum_exp`.
        entropy_S: of the teacher's whole distribution.
        label_log_prob_S: the teacher's log-probability of the next token.
    """

    log_sum_exp_S: Floats
    entropy_S: Floats
    label_log_prob_S: Floats

    def at(self, rows_n: NDArray[np.int64]) -> PositionScalars:
        """The numbers of some positions."""
        return PositionScalars(*(values[rows_n] for values in vars(self).values()))


class EntrySettings(Protocol):
    """The fields of `CaptureSettings` that entries depend on."""

    @property
    def k(self) -> int:
        """Ids or draws per position."""
        ...

    @property
    def vocab_size(self) -> int:
        """Real ids."""
        ...

    @property
    def sequence_length(self) -> int:
        """Positions S."""
        ...

    @property
    def codec(self) -> str:
        """Name of the codec."""
        ...

    @property
    def top_p(self) -> float | None:
        """Mass after which a position's ids were cut."""
        ...

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Further temperatures."""
        ...

    @property
    def sampling_seed(self) -> int | None:
        """Seed of random entries."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the records have tails and scalars of the whole vocabulary."""
        ...


class EncodedEntries(NamedTuple):
    """Entries as sections of a record, with their header flags and number of stored ids."""

    flags: int
    stored_ids: int
    sections: list[Array]


class ArraySpec(NamedTuple):
    """An array of a record, with the shape and dtype that the plan asks for."""

    values: object
    shape: tuple[int, ...]
    dtype: str


class SelectionPlace(NamedTuple):
    """The vocabulary columns and the sample positions of a rank's tokens, in (b, s) order.

    Attributes:
        rule: of the teacher's logits.
        shard: this rank's columns.
        group: the ranks that hold the remaining columns.
        sample_ids: of the micro-batch's b samples; negative ones are not stored.
        index_s: this rank's positions of each sample.
    """

    rule: LogitRule
    shard: VocabShard
    group: dist.ProcessGroup
    sample_ids: Sequence[int]
    index_s: Tensor


class Selection(Protocol):
    """Selects the stored values of a chunk's tokens from the teacher's logits."""

    def __call__(self, chunk: OutputChunk, log_sum_exp: Tensor) -> tuple[Tensor, Tensor]:
        """Columns ``[n, I]`` of integers and ``[n, F]`` of floats.

        ``log_sum_exp [1 + T, n]`` is fp64, at temperature one and at the further temperatures.
        """
        ...


class Entries(Protocol):
    """A kind of stored ids with numbers of the teacher, at the S positions of a record.

    ``is_ranked``: whether the ids are the teacher's most probable ones in order. Then the first k
    of them, a ``top_p`` and further temperatures are defined. ``needs_seed``: whether they depend
    on a sampling seed. ``adjective``: how messages call the ids. ``metrics``: reported metrics that
    need these entries.
    """

    is_ranked: ClassVar[bool]
    needs_seed: ClassVar[bool]
    adjective: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]

    @classmethod
    def largest_k(cls, vocab_size: int) -> int:
        """Largest ``k`` of a capture."""
        ...

    @classmethod
    def bytes_per_position(cls, settings: EntrySettings) -> float:
        """Bytes of a position with K ids: an upper bound."""
        ...

    @classmethod
    def blank(cls, settings: EntrySettings) -> Self:
        """Entries of the right shapes for a sample without a trained label, which is not stored."""
        ...

    @classmethod
    def selection(cls, settings: EntrySettings, place: SelectionPlace) -> Selection:
        """How a capture selects the values from a micro-batch's logits.

        Collective: the selection's, over the place's group, the same on every rank.
        """
        ...

    @classmethod
    def of_columns(
        cls,
        integers_SI: Integers,
        floats_SF: Floats,
        settings: EntrySettings,
        *,
        log_sum_exp_TS: Floats | None,
    ) -> Self:
        """The entries of a sample from the columns of `Selection`."""
        ...

    @classmethod
    def decode(cls, sections: Sections, header: Header, scalars: PositionScalars | None) -> Self:
        """The inverse of `encode`. Raises StoreError: the sections are damaged."""
        ...

    @classmethod
    def signal(
        cls,
        records: Sequence[SampleRecord],
        *,
        k: int | None = None,
        temperature: float = 1.0,
        support: Support = "tail",
    ) -> IdSignal:
        """The signal of b samples, one after another, on the CPU, for a term that asks for these.

        Raises:
            StoreError: the records lack the values for this support or this temperature.
        """
        ...

    def encode(self, settings: EntrySettings) -> EncodedEntries:
        """The sections of a record."""
        ...

    def arrays(self, settings: EntrySettings) -> Mapping[str, ArraySpec]:
        """Every array, with the shape and dtype that the settings ask for."""
        ...

    def settings_problems(self, settings: EntrySettings) -> Iterator[str]:
        """Values other than arrays that differ from the settings."""
        ...

    def value_problems(self, settings: EntrySettings) -> Iterator[str]:
        """Values that no teacher can produce; shapes are right and ids are in the vocabulary."""
        ...

    def ids(self) -> tuple[Integers, NDArray[np.bool_]]:
        """int32 ids [S, K], 0 where unused, and which of them are used."""
        ...

    def id_counts(self) -> Integers:
        """int32 number of ids [S] of each position."""
        ...

    def mass(self, trained_S: NDArray[np.bool_]) -> float:
        """Probability of the ids, summed over the positions; zero where unknown."""
        ...

    def first(self, k: int, scalars: PositionScalars | None) -> Self:
        """The first k ids of each position where they are ranked, else all of them."""
        ...

    def at(self, rows_n: NDArray[np.int64]) -> Self:
        """The entries of some positions."""
        ...


@dataclass(frozen=True, eq=False)
class StudentTokens:
    """A sample's text in W + 1 tokens of a student with a tokenizer of its own.

    Attributes:
        tokens_W1: int32.
        document_ids_W1: int32, as in `SampleRecord`.
        flags_W1: uint8, as in `SampleRecord`.
        chunks_W1: int32, the number of the chunk that each token is a label of, -1 for none. The
            chunks of a sample are numbered from 0 in the order of its tokens.
        teacher_chunks_S1: int32, likewise of the teacher's tokens.
    """

    tokens_W1: Integers
    document_ids_W1: Integers
    flags_W1: NDArray[np.uint8]
    chunks_W1: Integers
    teacher_chunks_S1: Integers


@dataclass(frozen=True, eq=False)
class SampleTokens:
    """The tokens of a record, without the teacher's values; see `SampleRecord`."""

    tokens_S1: Integers
    document_ids_S1: Integers
    flags_S1: NDArray[np.uint8]
    student: StudentTokens | None = None


@dataclass(frozen=True, eq=False)
class SampleRecord:
    """S + 1 tokens with documents and flags from the corpus, and S positions of the teacher.

    Entry i of a per-position array is about token i + 1 given the tokens up to i.

    Attributes:
        sample_id: number of the sample, from 0.
        tokens_S1: int32.
        document_ids_S1: int32, counted from 0 inside the sample, -1 on padding.
        flags_S1: uint8, whether a token is trained as a label: bit 0 by cross-entropy, bit 1 by
            distillation.
        entries: ids and their probabilities or counts.
        scalars: None if the source of the store lacks them.
        student: the same text in a student's tokens; None where these are the student's.
    """

    sample_id: int
    tokens_S1: Integers
    document_ids_S1: Integers
    flags_S1: NDArray[np.uint8]
    entries: Entries
    scalars: PositionScalars | None
    student: StudentTokens | None = None


def record_at(record: SampleRecord, rows_n: NDArray[np.int64]) -> SampleRecord:
    """The record at some positions, of a record without a student's tokens.

    Its tokens are the labels of these positions, behind the token of the first one.
    """
    assert record.student is None, "chunks of a student are numbered over a whole record"
    tokens_n1 = np.append(rows_n[:1], rows_n + 1)
    return SampleRecord(
        record.sample_id,
        record.tokens_S1[tokens_n1],
        record.document_ids_S1[tokens_n1],
        record.flags_S1[tokens_n1],
        record.entries.at(rows_n),
        None if record.scalars is None else record.scalars.at(rows_n),
    )


def trained_positions(record: SampleRecord) -> NDArray[np.bool_]:
    """Positions [S] that are not padding and whose label is trained."""
    documents = record.document_ids_S1
    real = (documents[:-1] >= 0) & (documents[1:] >= 0)
    trained: NDArray[np.bool_] = real & (record.flags_S1[1:] != 0)
    return trained


def used_mask(id_counts_S: NDArray[Any], k: int) -> NDArray[np.bool_]:
    """Mask of the stored ids among K columns: bool [S, K]."""
    mask: NDArray[np.bool_] = np.arange(k) < id_counts_S[:, None]
    return mask


def cut_to_k(record: SampleRecord, k: int) -> SampleRecord:
    """The record with the first k ids of each position, where they are ranked.

    The mass of dropped ids goes to the tail, exactly at every temperature of the record. A record
    without a tail is normalised over its ids; the result, over the first k.
    """
    entries = record.entries.first(k, record.scalars)
    return record if entries is record.entries else replace(record, entries=entries)
