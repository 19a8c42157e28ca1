"""The header of a record, and what it proves: that the bytes are whole, and whose they are."""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_distill.errors import StoreError
from megatron_distill.signals.store.codecs import CODECS, ValueCodec
from megatron_distill.signals.store.plan import CaptureSettings
from megatron_distill.signals.store.records import Integers

__all__ = [
    "CODEC_NAMES",
    "HEADER_BYTES",
    "HAS_SCALARS",
    "HAS_TAIL",
    "Header",
    "IS_RAGGED",
    "MAGIC",
    "MODES",
    "RECORD_VERSION",
    "Sections",
    "require_record",
    "token_digest",
]

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
        """The header of bytes that are known to be intact."""
        return cls(*_FIELDS.unpack_from(packed))

    @property
    def value_codec(self) -> ValueCodec:
        """How log-probabilities are stored."""
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
    """The header of an intact record, which is of that plan, sample and settings if given.

    Raises:
        StoreError: it is not.
    """
    if len(packed) < HEADER_BYTES:
        raise StoreError(f"cut off: {len(packed)} bytes are no record")
    header = Header.of(packed)
    if header.magic != MAGIC:
        raise StoreError("damaged, or not a record of a teacher store: wrong magic number")
    # Before anything else of the header is believed, and the version is of this layout's header.
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
            f"holds sample {header.sample_id}: shards or records are swapped or duplicated"
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
            raise StoreError("damaged: the payload is shorter than its header says")
        found = np.frombuffer(self.packed, dtype, count, self.offset)
        self.offset += size + -size % 8
        return found
