"""Reads a `tf.train.Example` from its wire format: named lists of integers, floats or bytes.

An Example is message 1 {map 1: name 1 -> Feature 2}; a Feature is one of bytes list 1, float list
2, int64 list 3, each of which repeats field 1, packed or one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Features", "WireError", "read_example"]

Features: TypeAlias = dict[str, NDArray[Any]]
"""int64 and fp32 arrays by name."""

_VARINT: Final = 0
_FIXED64: Final = 1
_LENGTH: Final = 2
_FIXED32: Final = 5
_FLOATS: Final = 2
_INTEGERS: Final = 3
_MAX_VARINT_BYTES: Final = 10


class WireError(Exception):
    """The bytes are no such message; the message says where it breaks off."""


def read_example(content: bytes) -> Features:
    """The integer and float features of an Example. Raises WireError."""
    features: Features = {}
    view = memoryview(content)
    for number, message in _fields(view):
        if number != 1:
            continue
        for entry_number, entry in _fields(message):
            if entry_number == 1:
                name, values = _entry(entry)
                if values is not None:
                    features[name] = values
    if not features:
        raise WireError("it names no feature")
    return features


def _entry(entry: memoryview) -> tuple[str, NDArray[Any] | None]:
    name = ""
    values: NDArray[Any] | None = None
    for number, part in _fields(entry):
        if number == 1:
            try:
                name = bytes(part).decode("utf-8")
            except UnicodeDecodeError as error:
                raise WireError("a feature's name is no text") from error
        elif number == 2:
            for kind, found in _fields(part):
                if kind == _FLOATS:
                    values = _floats(found)
                elif kind == _INTEGERS:
                    values = _integers(found)
    return name, values


def _fields(view: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Number and bytes of each field; a number by itself as the bytes that it is written in."""
    offset = 0
    while offset < len(view):
        key, offset = _varint(view, offset)
        kind, start = key & 7, offset
        if kind == _LENGTH:
            length, start = _varint(view, offset)
            offset = start + length
        elif kind == _VARINT:
            _, offset = _varint(view, offset)
        elif kind in (_FIXED64, _FIXED32):
            offset = start + (8 if kind == _FIXED64 else 4)
        else:
            raise WireError(f"a field of unknown type {kind} at byte {start}")
        if offset > len(view):
            raise WireError(f"it ends inside a field that begins at byte {start}")
        yield key >> 3, view[start:offset]


def _varint(view: memoryview, offset: int) -> tuple[int, int]:
    value = 0
    for place, byte in enumerate(view[offset : offset + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, offset + place + 1
    raise WireError(f"a number at byte {offset} does not end")


def _floats(view: memoryview) -> NDArray[np.float32]:
    parts = []
    for number, part in _fields(view):
        if number != 1 or len(part) % 4:
            raise WireError("a float list that is no list of floats")
        parts.append(np.frombuffer(part, "<f4"))
    return np.concatenate([np.empty(0, np.float32), *parts])


def _integers(view: memoryview) -> NDArray[np.int64]:
    parts = [_varints(part) for _, part in _fields(view)]
    return np.concatenate([np.empty(0, np.int64), *parts])


def _varints(view: memoryview) -> NDArray[np.int64]:
    """Consecutive varints, two's complement in 64 bits, all at once."""
    octets = np.frombuffer(view, np.uint8)
    ends = np.flatnonzero(octets < 0x80)
    if len(octets) == 0:
        return np.empty(0, np.int64)
    if len(ends) == 0 or ends[-1] != len(octets) - 1:
        raise WireError("a list of integers that ends inside of one")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > _MAX_VARINT_BYTES:
        raise WireError("an integer of more than 64 bits")
    places = np.arange(len(octets)) - np.repeat(starts, lengths)
    parts = (octets & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.add.reduceat(parts, starts).view(np.int64)
