"""Signs of life of the ranks of a launch, in its rendezvous store.

A rank that reads a large model may take minutes to come to a meeting; one that was killed never
comes. Only the first gives signs of life meanwhile.
"""

from __future__ import annotations

import time
from typing import Final

import torch.distributed as dist

__all__ = ["SILENT_SECONDS", "Heartbeats", "give_sign"]

SILENT_SECONDS: Final = 20.0  # several signs are missing then


def give_sign(store: dist.Store, rank: int) -> None:
    """Count a rank's sign of life."""
    store.add(_key(rank), 1)


class Heartbeats:
    """The signs of all ranks, each of which has given one before."""

    def __init__(self, store: dist.Store, size: int) -> None:
        self._store = store
        self._keys = [_key(rank) for rank in range(size)]
        self._counts: list[bytes] = []
        self._changed: list[float] = []

    def silent(self) -> list[int]:
        """Return the ranks without a sign since `SILENT_SECONDS`; the first call begins to count.

        One request at the store for all ranks.
        """
        now, counts = time.monotonic(), self._store.multi_get(self._keys)
        if not self._counts:
            self._changed = [now] * len(counts)
        else:
            for rank, (before, count) in enumerate(zip(self._counts, counts, strict=True)):
                if before != count:
                    self._changed[rank] = now
        self._counts = counts
        return [rank for rank, at in enumerate(self._changed) if now - at > SILENT_SECONDS]


def _key(rank: int) -> str:
    return f"sign/{rank}"
