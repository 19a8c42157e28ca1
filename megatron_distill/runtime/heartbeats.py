"""Signs of life of the ranks of a launch, in its rendezvous store.

A rank that reads a large model may take minutes to come to a meeting; one that was killed never
comes. Only the first gives signs of life meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch.distributed as dist

__all__ = [
    "SILENT_SECONDS",
    "Heartbeats",
    "SignsOfOne",
    "give_sign",
    "living",
    "take_leave",
    "without_signs",
]

SILENT_SECONDS: Final = 20.0  # several signs are missing then
_LOOK_SECONDS: Final = 0.5


def give_sign(store: dist.Store, rank: int) -> None:
    """Count a rank's sign of life."""
    store.add(_key(rank), 1)


def take_leave(store: dist.Store, rank: int) -> None:
    """Let the others know that a rank gives no further signs."""
    store.set(_leave_key(rank), "left")


@contextmanager
def without_signs(store: dist.Store, rank: int) -> Iterator[None]:
    """A block that may keep the interpreter for itself, so that no thread gives a sign."""
    store.set(_busy_key(rank), "busy")
    try:
        yield
    finally:
        store.delete_key(_busy_key(rank))


class SignsOfOne:
    """The signs of one rank, looked at again and again."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._count = b""
        self._silent = 0

    def silent_looks(self) -> int:
        """Return the number of looks since the last new sign.

        0 before the first, after leave, and where the rank has said that it gives none.

        Not the time: this process may have been stopped as well, and then sees old signs first.
        """
        key = _key(self._rank)
        if not self._store.check([key]):
            return 0
        if any(self._store.check([of(self._rank)]) for of in (_leave_key, _busy_key)):
            self._silent = 0
            return 0
        count = self._store.get(key)
        self._silent = self._silent + 1 if count == self._count else 0
        self._count = count
        return self._silent


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


def living(store: dist.Store, ranks: Sequence[int], *, seconds: float) -> list[int]:
    """Return the ranks that give a sign of life within some seconds; each has given one before."""
    keys = [_key(rank) for rank in ranks]
    first, until = store.multi_get(keys), time.monotonic() + seconds
    while True:
        time.sleep(_LOOK_SECONDS)
        pairs = zip(ranks, first, store.multi_get(keys), strict=True)
        found = [rank for rank, before, now in pairs if now != before]
        if len(found) == len(ranks) or time.monotonic() >= until:
            return found


def _key(rank: int) -> str:
    return f"sign/{rank}"


def _busy_key(rank: int) -> str:
    return f"busy/{rank}"


def _leave_key(rank: int) -> str:
    return f"leave/{rank}"
