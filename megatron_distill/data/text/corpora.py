"""Python's standard library as a corpus available on every machine; fingerprints of files."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from megatron_distill.errors import DataError

_NOT_CORPUS: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


def stdlib_files(root: Path | None = None) -> list[Path]:
    """Every module of the running Python's standard library, sorted by its path below `root`.

    Installed packages and tests are left out, and so are files that are not UTF-8 (source code may
    declare another encoding). Raises DataError if there is none.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    candidates = sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).parts)
    files = [
        path
        for path in candidates
        if _NOT_CORPUS.isdisjoint(path.relative_to(folder).parts) and _is_utf8(path)
    ]
    if not files:
        raise DataError(
            f"{folder}: contains no Python source for format python_stdlib; use a Python that is "
            "installed with its sources, or another data source"
        )
    return files


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True


def fingerprint(files: Sequence[Path]) -> str:
    """Number of files, and one digest of their names and sizes, to compare two runs' corpora."""
    listing = "\n".join(f"{path.name} {path.stat().st_size}" for path in files)
    return f"{len(files)} files {hashlib.sha256(listing.encode()).hexdigest()[:16]}"
