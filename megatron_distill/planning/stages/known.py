"""Results that a search of layouts asks for again and again, by the objects that they are of."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

__all__ = ["known_of"]

_Result = TypeVar("_Result")
# Runs and devices at a time; a search has one of each.
_MOST: Final = 16
_kept: dict[tuple[int, ...], tuple[tuple[object, ...], dict[Hashable, Any]]] = {}


def known_of(objects: tuple[object, ...], key: Hashable, make: Callable[[], _Result]) -> _Result:
    """Return what `make` returns, kept for these very objects and the key.

    objects: unchanging ones, compared by identity: their hash would take long.
    key: all else that the result depends on, its name included.
    """
    identity = tuple(map(id, objects))
    entry = _kept.get(identity)
    if entry is None:
        if len(_kept) >= _MOST:
            del _kept[next(iter(_kept))]
        # The objects live on, so that no other has their id.
        entry = _kept[identity] = (objects, {})
    results = entry[1]
    if key not in results:
        results[key] = make()
    found: _Result = results[key]
    return found
