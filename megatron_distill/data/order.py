"""Orders that depend on a seed and nothing else: not on library versions, machines or ranks."""

from __future__ import annotations

import hashlib
import struct
from typing import Final

_FEISTEL_ROUNDS: Final = 4


def permutation(count: int, *key: int) -> list[int]:
    """A pseudo-random order of range(count), a pure function of `count` and the key's integers.

    Sorted by keyed hash rather than drawn from a generator: there is no generator state to save,
    and the order cannot change with the version of a library.
    """
    prefix = struct.pack(f"<{len(key)}q", *key)

    def rank(index: int) -> bytes:
        return hashlib.blake2b(struct.pack("<q", index), digest_size=16, key=prefix).digest()

    return sorted(range(count), key=rank)


def shuffled(index: int, count: int, *key: int) -> int:
    """The number at place `index` of a pseudo-random order of range(count), found by itself.

    For orders too long to be drawn up: a Feistel network of four rounds on the next power of four,
    applied until the number is below `count` (Black and Rogaway, 2002, "Ciphers with arbitrary
    finite domains", method 2). A pure function of its arguments.
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
    """A seed in [0, 2**31) for libraries that want one, a pure function of the key's integers."""
    data = struct.pack(f"<{len(key)}q", *key)
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "big") >> 1
