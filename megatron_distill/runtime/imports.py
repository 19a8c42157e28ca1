"""Imports of optional packages that are kept away, and imports without garbage collections."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def hide(package: str) -> None:
    """Let every later import of an optional package fail, unless it was imported before."""
    sys.modules.setdefault(package, None)  # type: ignore[arg-type]


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Let imports of an optional package fail in a block, unless it was imported before."""
    is_absent = package not in sys.modules
    hide(package)
    try:
        yield
    finally:
        if is_absent:
            del sys.modules[package]


@contextmanager
def uncollected() -> Iterator[None]:
    """A block without collections of garbage: imports of many modules take a third less time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
