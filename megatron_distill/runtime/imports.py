"""Imports of the start-up: releases, optional packages not loaded, objects never collected."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from megatron_distill.errors import ConfigError
from megatron_distill.log import get_logger

_LOGGER = get_logger(__name__)

# Of Megatron-Core.
SUPPORTED_RELEASES = ("0.16.1",)


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


def require_release(*, on_cuda: bool) -> None:
    """Raise ConfigError where Megatron-Core is missing or of a release that is not supported.

    On CUDA another release of the same series is a warning: functions are wrapped there, not
    rewritten. So is a source tree on the path, whose release is not known.
    """
    wanted = SUPPORTED_RELEASES[-1]
    remedy = f"python -m pip install megatron-core=={wanted}"
    try:
        found = version("megatron-core")
    except PackageNotFoundError:
        if find_spec("megatron") is None or find_spec("megatron.core") is None:
            raise ConfigError(f"megatron-core is not installed: {remedy}") from None
        if not on_cuda:
            raise ConfigError(
                "megatron.core is a source tree of an unknown release, and its functions are "
                f"changed without CUDA: {remedy}"
            ) from None
        _LOGGER.warning(
            "megatron.core is a source tree of an unknown release; tested is %s: %s", wanted, remedy
        )
        return
    release = found.partition("+")[0]
    if release in SUPPORTED_RELEASES:
        return
    if on_cuda and _series(release) in {_series(one) for one in SUPPORTED_RELEASES}:
        _LOGGER.warning("megatron-core %s is installed; tested is %s: %s", found, wanted, remedy)
        return
    raise ConfigError(
        f"megatron-core {found} is installed, and this program needs {wanted}: {remedy}"
    )


def _series(release: str) -> tuple[str, ...]:
    return tuple(release.split(".")[:2])
