"""Environment of a result besides the code: machine, versions, commit, command, date."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from megatron_distill.runtime.torchrun import available_cores

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = (
    "torch",
    "megatron-core",
    "nvidia-modelopt",
    "trl",
    "liger-kernel",
    "transformer-engine",
    "numpy",
)
_FOLDERS = ("--runs", "--output")
_CPU_INFO = Path("/proc/cpuinfo")


def describe(script: str, arguments: Sequence[str]) -> dict[str, str]:
    """Return the facts needed to repeat the measurement."""
    described = {
        "command": shlex.join(["python", script, *_that_measure(arguments)]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "CPU": f"{_cpu_model()}, {available_cores()} cores used of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "load average at the start": f"{os.getloadavg()[0]:.1f}",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }
    if torch.cuda.is_available():
        described["GPU"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return described | {name: installed(name) or "not installed" for name in _PACKAGES}


def _that_measure(arguments: Sequence[str]) -> list[str]:
    """Return the words without the options that name folders, which change no measurement."""
    words = iter(arguments)
    found = []
    for word in words:
        if word in _FOLDERS:
            next(words, None)
        elif not word.startswith(tuple(f"{option}=" for option in _FOLDERS)):
            found.append(word)
    return found


def installed(package: str) -> str | None:
    """Return a package's version, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """Return the commit of the sources, marked if the working tree differs from it."""
    if shutil.which("git") is None:
        return "unknown"
    commit, state = (
        subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
        ).stdout.strip()
        for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "megatron_distill"])
    )
    return f"{commit or 'unknown'}{' and uncommitted changes' if state else ''}"


def _cpu_model() -> str:
    if _CPU_INFO.exists():
        facts = dict(
            line.split(":", 1) for line in _CPU_INFO.read_text().splitlines() if ":" in line
        )
        named = {key.strip(): value.strip() for key, value in facts.items()}
        if "model name" in named:
            family = f"family {named.get('cpu family')}, model {named.get('model')}"
            return f"{named['model name']} ({family})"
    return platform.processor() or platform.machine()
