"""Orders that depend on a seed and nothing else: not on library versions, machines or ranks."""

from __future__ import annotations

import hashlib
import struct


def permutation(count: int, *key: int) -> list[int]:
    """A pseudo-random order of range(count), a pure function of `count` and the key's integers.

    Sorted by keyed hash rather than drawn from a generator: there is no generator state to save,
    and the order cannot change with the version of a library.
    """
    prefix = struct.pack(f"<{len(key)}q", *key)

    def rank(index: int) -> bytes:
        return hashlib.blake2b(struct.pack("<q", index), digest_size=16, key=prefix).digest()

    return sorted(range(count), key=rank)


def derived_seed(*key: int) -> int:
    """A seed in [0, 2**31) for libraries that want one, a pure function of the key's integers."""
    data = struct.pack(f"<{len(key)}q", *key)
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "big") >> 1
