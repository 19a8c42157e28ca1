"""Compiling a file of this folder for the CPU that runs, once per machine and user."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

__all__ = ["cache_folder", "compiled"]

# Contracted products would round as the compiler likes.
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_ARITHMETIC = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_SECONDS = 60


def compiled(name: str) -> ctypes.CDLL | None:
    """The library of that source; None where no C compiler can make or this machine load it.

    A library that was made before is found in the `cache_folder`. Where that cannot be written,
    each process makes its own.
    """
    compiler = _compiler()
    if compiler is None:
        return None
    source = Path(__file__).with_name(name)
    command = [*compiler, *_FLAGS, *_ARITHMETIC]
    folder = cache_folder()
    if folder is None:
        return _make(source, command, None)
    kept = folder / f"{source.stem}-{_key(source, command)}.so"
    try:
        return ctypes.CDLL(str(kept))
    except OSError:
        # Not there, damaged, or where nothing may be executed.
        return _make(source, command, kept)


def cache_folder() -> Path | None:
    """Where libraries are kept: ``megatron-distill`` in ``XDG_CACHE_HOME``, or in ``~/.cache``."""
    home = os.environ.get("HOME")
    base = os.environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else None)
    return Path(base) / "megatron-distill" if base else None


def _make(source: Path, command: list[str], kept: Path | None) -> ctypes.CDLL | None:
    try:
        with tempfile.TemporaryDirectory(prefix="megatron-distill-") as folder:
            made = Path(folder) / "library.so"
            subprocess.run(
                [*command, "-o", str(made), str(source)],
                check=True,
                capture_output=True,
                timeout=_SECONDS,
            )
            library = ctypes.CDLL(str(made))
            if kept is not None:
                _keep(made, kept)
            return library
    except (OSError, subprocess.SubprocessError):
        return None


def _keep(made: Path, kept: Path) -> None:
    """Copy the library; other processes see the whole of it or nothing."""
    part = kept.with_name(f"{kept.name}.{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, part)
        part.replace(kept)
    except OSError:
        with suppress(OSError):
            part.unlink()


def _compiler() -> list[str] | None:
    """The command of the C compiler that the environment names, or of a usual one."""
    for command in (os.environ.get("CC", ""), "gcc", "cc"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    return None


def _key(source: Path, command: list[str]) -> str:
    """What the library was made from and for."""
    parts = (source.read_text(), shlex.join(command), _cpu())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """What tells this CPU's instructions from another's that shares the folder."""
    told = Path("/proc/cpuinfo")
    if not told.exists():
        return platform.platform()
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = told.read_text().split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(wanted))
