"""The software and the files that a node sees, as figures, and how nodes differ in them."""

from __future__ import annotations

import glob
import hashlib
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import megatron_distill
from megatron_distill.errors import counted

__all__ = ["named_paths", "node_differences", "seen_files", "sources_digest", "versions"]


def sources_digest() -> str:
    """Return a digest of the package's modules."""
    assert megatron_distill.__file__ is not None
    package = Path(megatron_distill.__file__).parent
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(str(path.relative_to(package)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()


_PACKAGES: Final = ("torch", "megatron-core", "transformer-engine", "triton", "numpy")
_LONGEST: Final = 255  # characters of a file's name
_MOST_FILES: Final = 1000  # of a pattern, whose sizes are read
_NOTHING: Final = "nothing"


def named_paths(settings: object) -> Iterator[str]:
    """Return the texts among a job's settings that may be paths, or patterns of them.

    Caches may be local disks, and are made where they are missing.
    """
    if isinstance(settings, str):
        is_short = 0 < len(max(settings.split("/"), key=len)) <= _LONGEST and "\n" not in settings
        if is_short and ("/" in settings or Path(settings).exists()):
            yield settings
    elif isinstance(settings, Mapping):
        for key, value in settings.items():
            if key != "cache":
                yield from named_paths(value)
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from named_paths(value)


def versions() -> dict[str, str]:
    """Return the versions of this node's software, without importing it."""
    found = {"Python": platform.python_version()}
    found["megatron-distill"] = f"{megatron_distill.__version__} ({sources_digest()[:8]})"
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def seen_files(paths: Sequence[str]) -> dict[str, str]:
    """Return what this node sees under each path, pattern, or prefix of .bin and .idx files."""
    return {text: _seen(text) for text in paths}


def _seen(text: str) -> str:
    path = Path(text).expanduser()
    found = [path] if path.exists() else []
    if not found and glob.has_magic(text):
        names = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 (absolute patterns)
        found = [Path(name) for name in names]
    found += [file for end in (".bin", ".idx") if (file := Path(f"{path}{end}")).is_file()]
    if not found:
        return _NOTHING
    if found == [path] and path.is_dir():
        return "a folder"
    size = sum(file.stat().st_size for file in found[:_MOST_FILES] if file.is_file())
    return f"{counted(len(found), 'file')} of {size:,} bytes"


def node_differences(views: Mapping[str, Mapping[str, Mapping[str, str]]]) -> dict[str, list[str]]:
    """Return, by node, in which points it differs from most nodes, or from the first of a half.

    views: of each node, in order, its `versions` and `files`.
    """
    unlike: dict[str, list[str]] = {node: [] for node in views}
    for kind in ("versions", "files"):
        names = dict.fromkeys(name for view in views.values() for name in view.get(kind, {}))
        for name in names:
            has: dict[str, Any] = {
                node: view[kind][name] for node, view in views.items() if name in view.get(kind, {})
            }
            usual = Counter(has.values()).most_common(1)[0][0]
            example = next(node for node, value in has.items() if value == usual)
            for node, value in has.items():
                if value != usual:
                    verb = "has" if kind == "versions" else "sees under"
                    unlike[node].append(f"{verb} {name}: {value}, but {example}: {usual}")
    return {node: found for node, found in unlike.items() if found}
