"""Codecs of log-probabilities and ids, for whole samples.

Values are descending log-probabilities, one row after another; rows of unequal length are
concatenated without padding. All numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_distill.store.records import Array, Floats, Integers

__all__ = [
    "CODECS",
    "CODEC_NAMES",
    "Take",
    "ValueCodec",
    "decode_ids",
    "encode_ids",
    "id_planes",
    "normalise",
    "padded_rows",
]

Mask: TypeAlias = NDArray[np.bool_]
Take: TypeAlias = Callable[[str, int], Array]
"""Gives the next `count` numbers of a dtype."""

_LOWEST_HALF: Final = -65504.0
_LEAST_RANGE: Final = 1e-6
_LEVELS: Final = 255
_LOW_BITS: Final = 16


class ValueCodec(Protocol):
    """One way to store log-probabilities.

    Attributes:
        number: code in the record's header.
        scalar: dtype of tails, entropies and label log-probabilities.
        is_exact: whether decoding is lossless.
    """

    number: int
    scalar: str
    is_exact: bool

    def encode(self, log_probs_SK: Floats, mask: Mask | None) -> list[Array]:
        """Arrays to store; entries outside of the mask are left out."""
        ...

    def decode(self, take: Take, shape: tuple[int, int], mask: Mask | None, count: int) -> Floats:
        """Log-probabilities [S, K] fp32 from `count` stored values; 0 outside of the mask."""
        ...


class _Float32:
    number = 0
    scalar = "<f4"
    is_exact = True

    def encode(self, log_probs_SK: Floats, mask: Mask | None) -> list[Array]:
        return [_close_up(log_probs_SK, mask).astype("<f4", copy=False)]

    def decode(self, take: Take, shape: tuple[int, int], mask: Mask | None, count: int) -> Floats:
        return padded_rows(take("<f4", count), shape, mask).astype(np.float32)


class _Float16:
    number = 1
    scalar = "<f2"
    is_exact = False

    def encode(self, log_probs_SK: Floats, mask: Mask | None) -> list[Array]:
        values = _close_up(log_probs_SK, mask)
        return [np.maximum(values, np.float32(_LOWEST_HALF)).astype("<f2")]

    def decode(self, take: Take, shape: tuple[int, int], mask: Mask | None, count: int) -> Floats:
        return padded_rows(take("<f2", count), shape, mask).astype(np.float32)


class _Gap8:
    """fp16 top and range of each row; a value is its distance from the top in range / 255."""

    number = 2
    scalar = "<f2"
    is_exact = False

    def encode(self, log_probs_SK: Floats, mask: Mask | None) -> list[Array]:
        values = np.maximum(log_probs_SK, np.float32(_LOWEST_HALF))
        lowest = values[:, -1] if mask is None else np.where(mask, values, np.inf).min(1)
        top = values[:, 0].astype("<f2")
        # Codes are relative to the rounded top, as in decoding.
        start = top.astype(np.float32)
        span = np.maximum(start - lowest, np.float32(_LEAST_RANGE)).astype("<f2")
        step = span.astype(np.float32) / np.float32(_LEVELS)
        codes = np.rint((start[:, None] - values) / step[:, None])
        codes = np.clip(codes, 0, _LEVELS).astype(np.uint8)
        return [top, span, _close_up(codes, mask)]

    def decode(self, take: Take, shape: tuple[int, int], mask: Mask | None, count: int) -> Floats:
        top = take("<f2", shape[0]).astype(np.float32)
        step = take("<f2", shape[0]).astype(np.float32) / np.float32(-_LEVELS)
        values = padded_rows(take("u1", count), shape, mask).astype(np.float32)
        values *= step[:, None]
        values += top[:, None]
        return values


CODECS: Final[dict[str, ValueCodec]] = {"f32": _Float32(), "f16": _Float16(), "u8": _Gap8()}
CODEC_NAMES: Final = tuple(CODECS)


def _close_up(values_SK: Array, mask: Mask | None) -> Array:
    return values_SK.reshape(-1) if mask is None else values_SK[mask]


def padded_rows(values: Array, shape: tuple[int, int], mask: Mask | None) -> Array:
    """Concatenated values as rows [S, K], 0 outside of the mask."""
    if mask is None:
        return values.reshape(shape)
    rows = np.zeros(shape, values.dtype)
    rows[mask] = values
    return rows


def normalise(log_probs_SK: Floats, log_tail_S: Floats | None) -> Floats:
    """Log normaliser of each row [S], over its ids and its tail."""
    total: Floats = np.exp(log_probs_SK) @ np.ones(log_probs_SK.shape[1], np.float32)
    if log_tail_S is not None:
        total += np.exp(log_tail_S)
    np.log(total, out=total)
    return total


def id_planes(vocab_size: int) -> int:
    """Number of bits of an id beyond 16."""
    return max(0, (vocab_size - 1).bit_length() - _LOW_BITS)


def encode_ids(ids: Integers, planes: int) -> list[Array]:
    """The low 16 bits of ids, and one packed plane for each bit above."""
    high = ids >> _LOW_BITS
    packed = [np.packbits(high >> plane & 1 != 0, bitorder="little") for plane in range(planes)]
    return [ids.astype("<u2"), *packed]


def decode_ids(take: Take, count: int, planes: int) -> Integers:
    """The `count` ids from `encode_ids`."""
    ids = take("<u2", count).astype(np.int32)
    for plane in range(planes):
        bits = np.unpackbits(take("u1", -(-count // 8)), count=count, bitorder="little")
        ids |= bits.astype(np.int32) << (_LOW_BITS + plane)
    return ids
