"""One record as bytes: a header of 128 bytes and a payload of sections on 8-byte boundaries.

The layout is in docs/internals/store_format.md. A record is verifiable alone: header and payload by
checksums, tokens by a digest, its store by the uid of the plan. Files are ArrayRecord files: one
record per chunk, uncompressed, the same bytes for the same records.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_distill.errors import StoreError, counted
from megatron_distill.store.codecs import CODEC_NAMES, CODECS, id_planes
from megatron_distill.store.plan import KINDS, CaptureSettings
from megatron_distill.store.records import (
    ALIGNED_VERSION,
    HAS_SCALARS,
    HEADER_BYTES,
    MAGIC,
    RECORD_VERSION,
    Array,
    Header,
    Integers,
    PositionScalars,
    SampleRecord,
    SampleTokens,
    Sections,
    StudentTokens,
    clamped,
    cut_to_k,
    header_is_intact,
    record_at,
)

__all__ = [
    "RecordFile",
    "RecordFileWriter",
    "cut_to_rows",
    "decode",
    "decode_tokens",
    "largest_record_bytes",
    "pack",
    "require_record",
    "token_digest",
    "unpack",
    "usual_samples_per_shard",
]


FLAG_BITS: Final = 2
_MODES: Final = tuple(KINDS)


def pack(record: SampleRecord, settings: CaptureSettings, capture_uid: bytes) -> bytes:
    """A record as bytes; equal records give equal bytes.

    Raises:
        StoreError: the record does not fit the settings, or cannot be stored.
    """
    codec = CODECS[settings.codec]
    student = record.student
    sections = _token_sections(record.tokens_S1, record.document_ids_S1, record.flags_S1)
    runs, student_runs = len(sections[0]), 0
    if student is not None:
        own = _token_sections(student.tokens_W1, student.document_ids_W1, student.flags_W1)
        student_runs = len(own[0])
        sections += own
        for chunks in (student.chunks_W1, student.teacher_chunks_S1):
            sections += _planes(_chunk_bits(chunks))
    flags, count, body = record.entries.encode(settings)
    scalars: list[Array] = []
    if record.scalars is not None:
        flags |= HAS_SCALARS
        scalars = [
            record.scalars.log_sum_exp_S.astype("<f4"),
            record.scalars.entropy_S.astype(codec.scalar),
            clamped(record.scalars.label_log_prob_S, codec.scalar),
        ]
    payload = b"".join(_aligned(section) for section in (*sections, *scalars, *body))
    header = Header(
        magic=MAGIC,
        version=RECORD_VERSION if student is None else ALIGNED_VERSION,
        mode=_MODES.index(settings.mode),
        codec=codec.number,
        planes=id_planes(settings.vocab_size),
        temperatures=len(settings.temperatures),
        flags=flags,
        positions=len(record.tokens_S1) - 1,
        vocab_size=settings.vocab_size,
        k=settings.k,
        runs=runs,
        sample_id=record.sample_id,
        entries=count,
        digest=token_digest(record.tokens_S1),
        uid=capture_uid,
        payload_bytes=len(payload),
        payload_crc=zlib.crc32(payload),
        student_positions=0 if student is None else len(student.tokens_W1) - 1,
        student_runs=student_runs,
    )
    return header.content + payload


def _token_sections(
    tokens_S1: Integers, document_ids_S1: Integers, flags_S1: NDArray[np.uint8]
) -> list[Array]:
    """Sections of one side's tokens; the first has an entry per run of equal documents."""
    starts = np.flatnonzero(np.diff(document_ids_S1, prepend=-2))
    return [
        starts.astype("<u4"),
        document_ids_S1[starts].astype("<i4"),
        tokens_S1.astype("<i4"),
        *_planes(flags_S1),
    ]


def _planes(bits_S1: NDArray[np.uint8]) -> list[Array]:
    return [np.packbits(bits_S1 >> bit & 1, bitorder="little") for bit in range(FLAG_BITS)]


def _chunk_bits(chunks_S1: Integers) -> NDArray[np.uint8]:
    """Two bits per token: it is in a chunk; it is the first of its chunk.

    Raises:
        StoreError: the chunks are not numbered from 0 in the order of the tokens.
    """
    inside = chunks_S1 >= 0
    numbers = chunks_S1[inside]
    is_first = np.diff(numbers, prepend=-1)
    if not np.isin(is_first, (0, 1)).all():
        raise StoreError("its chunks are not numbered from 0 in the order of its tokens")
    bits = inside.astype(np.uint8)
    bits[inside] |= (is_first << 1).astype(np.uint8)
    return bits


def _chunk_numbers(bits_S1: NDArray[np.uint8]) -> Integers:
    numbers = np.cumsum(bits_S1 >> 1, dtype=np.int32) - 1
    return np.where(bits_S1 & 1, numbers, -1).astype(np.int32)


def _aligned(section: Array) -> bytes:
    content = np.ascontiguousarray(section).tobytes()
    return content + bytes(-len(content) % 8)


def unpack(packed: bytes, k: int | None = None, *, is_checked: bool = False) -> SampleRecord:
    """The record of bytes from `pack`, with the first k ids of each position.

    Needs only the bytes, so that one rank can read and further ranks decode. `is_checked`: a reader
    has verified the bytes.

    Raises:
        StoreError: the bytes are damaged.
    """
    return decode(packed, Header.of(packed) if is_checked else require_record(packed), k)


def decode(packed: bytes, header: Header, k: int | None = None) -> SampleRecord:
    """The record of an intact header, with the first k ids of each position.

    Probabilities of a lossy codec are renormalised with their tail, at every temperature.
    """
    sections, positions = Sections(packed), header.positions
    tokens = _tokens(sections, header)
    scalar, scalars = CODECS[CODEC_NAMES[header.codec]].scalar, None
    if header.flags & HAS_SCALARS:
        scalars = PositionScalars(
            *(
                sections.take(dtype, positions).astype(np.float32)
                for dtype in ("<f4", scalar, scalar)
            )
        )
    record = SampleRecord(
        sample_id=header.sample_id,
        tokens_S1=tokens.tokens_S1,
        document_ids_S1=tokens.document_ids_S1,
        flags_S1=tokens.flags_S1,
        entries=KINDS[_MODES[header.mode]].decode(sections, header, scalars),
        scalars=scalars,
        student=tokens.student,
    )
    return record if k is None else cut_to_k(record, k)


def cut_to_rows(packed: bytes, rows_n: NDArray[np.int64], settings: CaptureSettings) -> bytes:
    """The bytes of a checked record at some positions, of a store with these settings.

    `unpack` gives the values of the whole record to the bit: they are written in fp32, since a
    lossy codec would round them again. See `record_at` for the tokens.
    """
    header = Header.of(packed)
    exact = replace(settings, codec="f32", sequence_length=len(rows_n))
    return pack(record_at(decode(packed, header), rows_n), exact, header.uid)


def decode_tokens(packed: bytes, header: Header) -> SampleTokens:
    """The tokens of the record of an intact header."""
    return _tokens(Sections(packed), header)


def _tokens(sections: Sections, header: Header) -> SampleTokens:
    own = _take_tokens(sections, header.positions, header.runs)
    if not header.is_aligned:
        return SampleTokens(*own)
    positions = header.student_positions
    student = _take_tokens(sections, positions, header.student_runs)
    chunks = [
        _chunk_numbers(_take_planes(sections, count + 1)) for count in (positions, header.positions)
    ]
    return SampleTokens(*own, StudentTokens(*student, *chunks))


def _take_tokens(
    sections: Sections, positions: int, runs: int
) -> tuple[Integers, Integers, NDArray[np.uint8]]:
    """The inverse of `_token_sections`."""
    starts = sections.take("<u4", runs).astype(np.int64)
    documents = sections.take("<i4", runs).astype(np.int32)
    lengths = np.diff(starts, append=positions + 1)
    tokens = sections.take("<i4", positions + 1).astype(np.int32)
    return tokens, np.repeat(documents, lengths), _take_planes(sections, positions + 1)


def _take_planes(sections: Sections, count: int) -> NDArray[np.uint8]:
    planes = [
        np.unpackbits(sections.take("u1", -(-count // 8)), bitorder="little")
        for _ in range(FLAG_BITS)
    ]
    return np.asarray(sum(plane[:count] << bit for bit, plane in enumerate(planes)), np.uint8)


def token_digest(tokens_S1: Integers) -> bytes:
    """BLAKE2b-128 of tokens as little-endian int32."""
    return hashlib.blake2b(tokens_S1.astype("<i4").tobytes(), digest_size=16).digest()


def require_record(
    packed: bytes,
    *,
    capture_uid: bytes | None = None,
    sample_id: int | None = None,
    settings: CaptureSettings | None = None,
) -> Header:
    """The header of an intact record of the given plan, sample and settings, each if given.

    Raises:
        StoreError: the record is damaged, or does not match.
    """
    if len(packed) < HEADER_BYTES:
        raise StoreError(f"cut off: {counted(len(packed), 'byte')} instead of a whole record")
    header = Header.of(packed)
    if header.magic != MAGIC:
        raise StoreError("damaged, or not a record of a teacher store: wrong magic number")
    # The checksum comes first: no further field is valid without it.
    if not header_is_intact(packed):
        raise StoreError("damaged: the header does not match its checksum")
    if header.version not in (RECORD_VERSION, ALIGNED_VERSION):
        raise StoreError(
            f"version {header.version} of the record format; this release reads {RECORD_VERSION} "
            f"and {ALIGNED_VERSION}: use the release that wrote it"
        )
    payload = memoryview(packed)[HEADER_BYTES:]
    if len(payload) != header.payload_bytes or zlib.crc32(payload) != header.payload_crc:
        raise StoreError("damaged: the payload does not match its checksum")
    if sample_id is not None and header.sample_id != sample_id:
        raise StoreError(
            f"contains sample {header.sample_id}: shards or records are swapped or duplicated"
        )
    if capture_uid is not None and header.uid != capture_uid:
        raise StoreError(
            f"belongs to another store (capture {header.uid.hex()}, not {capture_uid.hex()})"
        )
    if settings is not None:
        _require_settings(header, settings)
    reader = Sections(packed)
    reader.take("<u4", header.runs)
    reader.take("<i4", header.runs)
    if token_digest(reader.take("<i4", header.positions + 1)) != header.digest:
        raise StoreError("damaged: the tokens do not match their digest")
    return header


def _require_settings(header: Header, settings: CaptureSettings) -> None:
    found = (
        header.positions,
        header.student_positions if header.is_aligned else None,
        header.vocab_size,
        header.k,
        header.temperatures,
    )
    expected = (
        settings.sequence_length,
        settings.student_length,
        settings.vocab_size,
        settings.k,
        len(settings.temperatures),
    )
    modes = (_MODES[header.mode], CODEC_NAMES[header.codec])
    if found != expected or modes != (settings.mode, settings.codec):
        raise StoreError("damaged: the header does not match the plan's capture settings")


_SHARD_BYTES: Final = 256_000_000
# Many replicas can then work in parallel, and a killed capture loses only a part.
_FEWEST_SHARDS: Final = 16


def largest_record_bytes(settings: CaptureSettings) -> int:
    """Bytes of a record with K ids at every position: an upper bound for `top_p` and draws."""
    scalar = np.dtype(CODECS[settings.codec].scalar).itemsize
    per_position = 4 + 2 / 8  # the token and its flags
    if settings.is_complete:
        per_position += 4 + 2 * scalar
    per_position += settings.kind.bytes_per_position(settings)
    size = HEADER_BYTES + round(settings.sequence_length * per_position)
    if settings.student_length is not None:
        # Tokens and flags of the student, and two bits for the chunk of each token of both.
        size += round(settings.student_length * (4 + 4 / 8) + settings.sequence_length * 2 / 8)
    return size


def usual_samples_per_shard(settings: CaptureSettings, samples: int) -> int:
    """Records per shard: some 256 MB, or fewer for at least 16 shards.

    Depends only on the store's contents, so that a capture can resume under any layout.
    """
    by_size = _SHARD_BYTES // largest_record_bytes(settings)
    return max(1, min(by_size, samples // _FEWEST_SHARDS))


_WRITE_OPTIONS: Final = "group_size:1,uncompressed"
_READ_OPTIONS: Final = "readahead_buffer_size:0"


def _module() -> Any:
    """The library; imported only to open a file, since it has no build for some machines."""
    try:
        from array_record.python import array_record_module
    except ModuleNotFoundError as error:
        raise StoreError(
            "a teacher store needs the package array_record, which is not installed: "
            "pip install array-record (Linux)"
        ) from error
    return array_record_module


class RecordFileWriter:
    """Writes records to a file, which is unreadable before `close`."""

    def __init__(self, path: Path, *, named: Path) -> None:
        self._named = named
        self._writer = _module().ArrayRecordWriter(str(path), _WRITE_OPTIONS)
        self._require_ok()

    def write(self, record: bytes) -> None:
        """Append a record. Raises StoreError."""
        with self._as_store_error():
            self._writer.write(record)

    def close(self) -> None:
        """Finish the file and make it readable. Raises StoreError."""
        # After close(), ok() is always false; close() raises write errors itself.
        self._require_ok()
        with self._as_store_error():
            self._writer.close()

    def abandon(self) -> None:
        """Close an unfinished file in any state, ignoring errors."""
        try:
            self._writer.close()
        except RuntimeError:
            return

    def _require_ok(self) -> None:
        if not self._writer.ok():
            raise StoreError(f"cannot write {self._named}: {_REMEDY}")

    @contextmanager
    def _as_store_error(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise StoreError(f"cannot write {self._named}: {error}; {_REMEDY}") from error


_REMEDY: Final = "free disk space or name another folder"


class RecordFile:
    """Random access to the records of a file.

    Raises StoreError on opening: the file is missing, cut off or never closed, which the library
    does not report, or the number of records is not `count`.
    """

    def __init__(self, path: Path, *, count: int | None = None) -> None:
        self.path = path
        if not path.is_file():
            raise StoreError(f"{path}: missing")
        self._reader = _module().ArrayRecordReader(str(path), _READ_OPTIONS)
        if not self._reader.ok():
            raise StoreError(f"{path}: cut off, not closed, or not an ArrayRecord file")
        self.count: int = self._reader.num_records()
        if count is not None and self.count != count:
            raise StoreError(f"{path}: {counted(self.count, 'record')} instead of {count}")

    def read(self, positions: Sequence[int]) -> list[bytes]:
        """Records at positions from 0. Raises StoreError: one of them is damaged."""
        try:
            records: list[bytes] = self._reader.read(list(positions))
        except (RuntimeError, IndexError, ValueError) as error:
            # The library's message is about internal blocks; it stays in the exception chain.
            raise StoreError(
                f"{self.path}: damaged: its bytes do not match their checksums"
            ) from error
        return records

    def close(self) -> None:
        """Close the file."""
        self._reader.close()
