"""MaxText's saved logits, written field by field in protobuf's wire format."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_distill.store.binary import RecordFileWriter

Values = Sequence[int] | Sequence[float] | bytes


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    octets = bytearray()
    while value > 0x7F:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def feature(values: Values, *, is_packed: bool = True) -> bytes:
    """A Feature: bytes list 1, float list 2, int64 list 3."""
    if isinstance(values, bytes):
        return field(1, field(1, values))
    is_float = any(isinstance(value, float) for value in values)
    if is_float:
        parts, kind, key = [struct.pack("<f", value) for value in values], 2, varint(1 << 3 | 5)
    else:
        parts, kind, key = [varint(int(value)) for value in values], 3, varint(1 << 3 | 0)
    if is_packed:
        return field(kind, field(1, b"".join(parts)))
    return field(kind, b"".join(key + part for part in parts))


def example(features: Mapping[str, Values], *, is_packed: bool = True) -> bytes:
    """An Example: message 1 of entries 1 {name 1, Feature 2}."""
    entries = [
        field(1, field(1, name.encode()) + field(2, feature(values, is_packed=is_packed)))
        for name, values in features.items()
    ]
    return field(1, b"".join(entries))


def sequence(number: int, *, length: int = 12, k: int = 5, vocab_size: int = 1000) -> dict:
    """One saved sequence: two documents, a masked prompt, padding at the end."""
    rng = np.random.default_rng(number)
    segments = [1] * 5 + [2] * (length - 7) + [0] * 2
    ids = np.stack([rng.permutation(vocab_size)[:k] for _ in range(length)])
    logits = -np.sort(-rng.normal(0, 2, (length, k)).astype(np.float32), axis=1)
    return {
        "inputs": rng.integers(0, vocab_size, length).tolist(),
        "top_k_logits": logits.reshape(-1).astype(float).tolist(),
        "top_k_indices": ids.reshape(-1).tolist(),
        "sequence_hash": [-(1 << 62) + number],
        "inputs_position": [*range(5), *range(length - 7), 0, 0],
        "inputs_segmentation": segments,
        "targets_segmentation": [0, 0, *segments[3:], 0],
    }


def write(path: Path, contents: Sequence[bytes]) -> Path:
    writer = RecordFileWriter(path, named=path)
    for content in contents:
        writer.write(content)
    writer.close()
    return path
