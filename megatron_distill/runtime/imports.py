"""Imports of the start-up: optional packages not loaded, and objects never collected."""

from __future__ import annotations

import atexit
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
def uncollected_import(package: str) -> Iterator[None]:
    """A block that imports a large package, whose objects no collection scans, then or later.

    It takes a third less time, and so do the collections while the rest of a run is imported. Where
    the package is there already, the block is an ordinary one.
    """
    if package in sys.modules:
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else Triton's bindings report leaks
        if was_enabled:
            gc.enable()


@contextmanager
def permanent_objects() -> Iterator[None]:
    """A block in which no collection scans the objects that are there when it begins.

    Megatron-Core collects garbage at every save; the scan would stop all ranks for a tenth of a
    second or more.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
