"""One record as bytes: a header of 128 bytes and a payload of sections on 8-byte boundaries.

The layout is in docs/store_format.md. A record is verifiable alone: header and payload by
checksums, tokens by a digest, its store by the uid of the plan.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_distill.errors import StoreError, counted
from megatron_distill.store.codecs import (
    CODECS,
    Array,
    ValueCodec,
    decode_ids,
    encode_ids,
    id_planes,
    normalise,
    spread,
)
from megatron_distill.store.plan import CaptureSettings
from megatron_distill.store.records import (
    DrawnEntries,
    Entries,
    Floats,
    Integers,
    PositionScalars,
    SampleRecord,
    SampleTokens,
    TopKEntries,
    cut_to_k,
    kept_mask,
)

__all__ = [
    "CODEC_NAMES",
    "HAS_SCALARS",
    "HAS_TAIL",
    "HEADER_BYTES",
    "Header",
    "IS_RAGGED",
    "MAGIC",
    "MODES",
    "RECORD_VERSION",
    "Sections",
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


def pack(record: SampleRecord, settings: CaptureSettings, capture_uid: bytes) -> bytes:
    """A record as bytes; equal records give equal bytes.

    Raises:
        StoreError: the record does not fit the settings, or cannot be stored.
    """
    codec = CODECS[settings.codec]
    starts = np.flatnonzero(np.diff(record.document_ids_S1, prepend=-2))
    sections: list[Array] = [
        starts.astype("<u4"),
        record.document_ids_S1[starts].astype("<i4"),
        record.tokens_S1.astype("<i4"),
        *_flag_planes(record.flags_S1),
    ]
    entries = record.entries
    if isinstance(entries, TopKEntries):
        flags, count, body = _top_k_sections(entries, settings, codec)
    else:
        flags, count, body = _drawn_sections(entries, settings)
    scalars: list[Array] = []
    if record.scalars is not None:
        flags |= HAS_SCALARS
        scalars = [
            record.scalars.log_sum_exp_S.astype("<f4"),
            record.scalars.entropy_S.astype(codec.scalar),
            _scalar(record.scalars.label_log_prob_S, codec),
        ]
    payload = b"".join(_aligned(section) for section in (*sections, *scalars, *body))
    header = Header(
        magic=MAGIC,
        version=RECORD_VERSION,
        mode=MODES.index(settings.mode),
        codec=codec.number,
        planes=id_planes(settings.vocab_size),
        temperatures=len(settings.temperatures),
        flags=flags,
        positions=len(record.tokens_S1) - 1,
        vocab_size=settings.vocab_size,
        k=settings.k,
        runs=len(starts),
        sample_id=record.sample_id,
        entries=count,
        digest=token_digest(record.tokens_S1),
        uid=capture_uid,
        payload_bytes=len(payload),
        payload_crc=zlib.crc32(payload),
    )
    return header.content + payload


def _flag_planes(flags_S1: NDArray[np.uint8]) -> list[Array]:
    return [np.packbits(flags_S1 >> bit & 1, bitorder="little") for bit in range(FLAG_BITS)]


def _aligned(section: Array) -> bytes:
    content = np.ascontiguousarray(section).tobytes()
    return content + bytes(-len(content) % 8)


def _count_dtype(k: int) -> str:
    return "<u1" if k < 1 << 8 else "<u2" if k < 1 << 16 else "<u4"


def _top_k_sections(
    entries: TopKEntries, settings: CaptureSettings, codec: ValueCodec
) -> tuple[int, int, list[Array]]:
    flags, sections, mask = 0, [], None
    if entries.n_kept_S is not None:
        flags |= IS_RAGGED
        mask = kept_mask(entries.n_kept_S, settings.k)
        sections.append(entries.n_kept_S.astype(_count_dtype(settings.k)))
    if entries.log_tail_S is not None:
        flags |= HAS_TAIL
        sections.append(_scalar(entries.log_tail_S, codec))
    if entries.log_sum_exp_TS is not None and entries.log_tail_TS is not None:
        sections += [
            np.asarray(entries.temperatures, "<f8"),
            entries.log_sum_exp_TS.astype("<f4"),
            _scalar(entries.log_tail_TS, codec),
        ]
    ids = entries.ids_SK.reshape(-1) if mask is None else entries.ids_SK[mask]
    sections += codec.encode(entries.log_probs_SK, mask)
    sections += encode_ids(ids, id_planes(settings.vocab_size))
    return flags, ids.size, sections


def _scalar(values: Floats, codec: ValueCodec) -> Array:
    """Logs of masses in the codec's precision; positive masses below its range are clamped."""
    lowest = np.finfo(codec.scalar).min
    return np.where(np.isneginf(values), values, np.maximum(values, lowest)).astype(codec.scalar)


def _drawn_sections(
    entries: DrawnEntries, settings: CaptureSettings
) -> tuple[int, int, list[Array]]:
    drawn = entries.counts_SM > 0
    ids, counts = entries.ids_SM[drawn], entries.counts_SM[drawn]
    dtype = _count_dtype(settings.k)
    sections = [drawn.sum(1).astype(dtype), counts.astype(dtype)]
    return IS_RAGGED, ids.size, [*sections, *encode_ids(ids, id_planes(settings.vocab_size))]


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
    scalar, scalars = header.value_codec.scalar, None
    if header.flags & HAS_SCALARS:
        scalars = PositionScalars(
            *(
                sections.take(dtype, positions).astype(np.float32)
                for dtype in ("<f4", scalar, scalar)
            )
        )
    is_drawn = MODES[header.mode] == "sampled"
    record = SampleRecord(
        sample_id=header.sample_id,
        tokens_S1=tokens.tokens_S1,
        document_ids_S1=tokens.document_ids_S1,
        flags_S1=tokens.flags_S1,
        entries=_drawn(sections, header) if is_drawn else _top_k(sections, header, scalars),
        scalars=scalars,
    )
    return record if k is None or is_drawn else cut_to_k(record, k)


def decode_tokens(packed: bytes, header: Header) -> SampleTokens:
    """The tokens of the record of an intact header."""
    return _tokens(Sections(packed), header)


def _tokens(sections: Sections, header: Header) -> SampleTokens:
    positions = header.positions
    starts = sections.take("<u4", header.runs).astype(np.int64)
    documents = sections.take("<i4", header.runs).astype(np.int32)
    lengths = np.diff(starts, append=positions + 1)
    tokens = sections.take("<i4", positions + 1).astype(np.int32)
    planes = [
        np.unpackbits(sections.take("u1", -(-(positions + 1) // 8)), bitorder="little")
        for _ in range(FLAG_BITS)
    ]
    flags = sum(plane[: positions + 1] << bit for bit, plane in enumerate(planes))
    return SampleTokens(tokens, np.repeat(documents, lengths), np.asarray(flags, np.uint8))


def _drawn(sections: Sections, header: Header) -> Entries:
    dtype = _count_dtype(header.k)
    n_kept = sections.take(dtype, header.positions).astype(np.int32)
    counts = sections.take(dtype, header.entries).astype(np.int32)
    ids = decode_ids(sections.take, header.entries, header.planes)
    mask = kept_mask(n_kept, header.k)
    shape = (header.positions, header.k)
    return DrawnEntries(spread(ids, shape, mask), spread(counts, shape, mask))


def _top_k(sections: Sections, header: Header, scalars: PositionScalars | None) -> Entries:
    positions, codec = header.positions, header.value_codec
    shape, mask, n_kept, tail = (positions, header.k), None, None, None
    if header.is_ragged:
        n_kept = sections.take(_count_dtype(header.k), positions).astype(np.int32)
        mask = kept_mask(n_kept, header.k)
    if header.flags & HAS_TAIL:
        tail = sections.take(codec.scalar, positions).astype(np.float32)
    temperatures: Sequence[float] = ()
    sums_TS = tails_TS = None
    if header.temperatures:
        cells = header.temperatures * positions
        temperatures = sections.take("<f8", header.temperatures).tolist()
        sums_TS = sections.take("<f4", cells).astype(np.float32).reshape(-1, positions)
        tails_TS = sections.take(codec.scalar, cells).astype(np.float32).reshape(-1, positions)
    values = codec.decode(sections.take, shape, mask, header.entries)
    if mask is not None:
        values[~mask] = -np.inf
    if not codec.is_exact:
        shift = normalise(values, tail)
        values -= shift[:, None]
        tail = None if tail is None else tail - shift
        if scalars is not None and sums_TS is not None and tails_TS is not None:
            logits = values + scalars.log_sum_exp_S[:, None]
            for row, temperature in enumerate(temperatures):
                at_temperature = logits / np.float32(temperature) - sums_TS[row][:, None]
                shift = normalise(at_temperature, tails_TS[row])
                sums_TS[row] += shift
                tails_TS[row] -= shift
    ids = spread(decode_ids(sections.take, header.entries, header.planes), shape, mask)
    return TopKEntries(ids, values, tail, n_kept, tuple(temperatures), sums_TS, tails_TS)


MAGIC: Final = b"TLSTORE1"
RECORD_VERSION: Final = 1
HEADER_BYTES: Final = 128
_FIELDS: Final = struct.Struct("<8sHBBBBHIIIIQQ16s8sQI")
_CRC: Final = struct.Struct("<I")
_CRC_OFFSET: Final = HEADER_BYTES - _CRC.size
MODES: Final = ("top_k", "sampled")
CODEC_NAMES: Final = tuple(CODECS)
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

    @classmethod
    def of(cls, packed: bytes) -> Header:
        """The header of verified bytes."""
        return cls(*_FIELDS.unpack_from(packed))

    @property
    def value_codec(self) -> ValueCodec:
        """The codec of log-probabilities."""
        return CODECS[CODEC_NAMES[self.codec]]

    @property
    def is_ragged(self) -> bool:
        """Whether rows are of unequal length."""
        return bool(self.flags & IS_RAGGED)

    @property
    def content(self) -> bytes:
        """The bytes of the header with its checksum."""
        fields = _FIELDS.pack(*self).ljust(_CRC_OFFSET, b"\0")
        return fields + _CRC.pack(zlib.crc32(fields))


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
    if _CRC.unpack_from(packed, _CRC_OFFSET)[0] != zlib.crc32(packed[:_CRC_OFFSET]):
        raise StoreError("damaged: the header does not match its checksum")
    if header.version != RECORD_VERSION:
        raise StoreError(
            f"version {header.version} of the record format; this release reads {RECORD_VERSION}: "
            "use the release that wrote it"
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
    found = (header.positions, header.vocab_size, header.k, header.temperatures)
    expected = (
        settings.sequence_length,
        settings.vocab_size,
        settings.k,
        len(settings.temperatures),
    )
    modes = (MODES[header.mode], CODEC_NAMES[header.codec])
    if found != expected or modes != (settings.mode, settings.codec):
        raise StoreError("damaged: the header does not match the plan's capture settings")


@dataclass
class Sections:
    """Reads a payload's sections one after another."""

    packed: bytes
    offset: int = HEADER_BYTES

    def take(self, dtype: str, count: int) -> NDArray[Any]:
        """The next section; a view. Raises StoreError: the payload is too short."""
        size = np.dtype(dtype).itemsize * count
        if self.offset + size > len(self.packed):
            raise StoreError("damaged: the payload is shorter than in its header")
        found = np.frombuffer(self.packed, dtype, count, self.offset)
        self.offset += size + -size % 8
        return found


_SHARD_BYTES: Final = 256_000_000
# Many replicas can then work in parallel, and a killed capture loses only a part.
_FEWEST_SHARDS: Final = 16


def largest_record_bytes(settings: CaptureSettings) -> int:
    """Bytes of a record with K ids at every position: an upper bound for `top_p` and draws."""
    codec = CODECS[settings.codec]
    scalar = np.dtype(codec.scalar).itemsize
    count_bytes = 1 if settings.k < 1 << 8 else 2 if settings.k < 1 << 16 else 4
    per_entry = 2 + id_planes(settings.vocab_size) / 8
    per_position = 4 + 2 / 8  # the token and its flags
    if settings.normalised_over == "vocabulary":
        per_position += 4 + 2 * scalar
    if settings.mode == "sampled":
        per_position += count_bytes
        per_entry += count_bytes
    else:
        per_entry += {"f32": 4, "f16": 2, "u8": 1}[settings.codec]
        per_position += 4 if settings.codec == "u8" else 0
        per_position += scalar if settings.normalised_over == "vocabulary" else 0
        per_position += count_bytes if settings.top_p is not None else 0
        per_position += len(settings.temperatures) * (4 + scalar)
    per_position += settings.k * per_entry
    return HEADER_BYTES + round(settings.sequence_length * per_position)


def usual_samples_per_shard(settings: CaptureSettings, samples: int) -> int:
    """Records per shard: some 256 MB, or fewer for at least 16 shards.

    Depends only on the store's contents, so that a capture can resume under any layout.
    """
    by_size = _SHARD_BYTES // largest_record_bytes(settings)
    return max(1, min(by_size, samples // _FEWEST_SHARDS))
