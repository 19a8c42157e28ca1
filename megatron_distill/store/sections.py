"""The header of a packed record, and its payload's sections on 8-byte boundaries."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_distill.errors import StoreError

__all__ = [
    "Array",
    "HAS_SCALARS",
    "HAS_TAIL",
    "HEADER_BYTES",
    "Header",
    "IS_RAGGED",
    "MAGIC",
    "RECORD_VERSION",
    "Sections",
    "clamped",
    "count_dtype",
    "header_is_intact",
]

Array: TypeAlias = NDArray[Any]

MAGIC: Final = b"TLSTORE1"
RECORD_VERSION: Final = 1
HEADER_BYTES: Final = 128
_FIELDS: Final = struct.Struct("<8sHBBBBHIIIIQQ16s8sQI")
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

    @classmethod
    def of(cls, packed: bytes) -> Header:
        """The header of verified bytes."""
        return cls(*_FIELDS.unpack_from(packed))

    @property
    def is_ragged(self) -> bool:
        """Whether rows are of unequal length."""
        return bool(self.flags & IS_RAGGED)

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
