"""What a data source is, and the corpus that every machine has: Python's own standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron_distill.data.chat.conversations import ConversationSpec
from megatron_distill.data.text.files import expand_paths, expand_saved
from megatron_distill.errors import DataError

FORMATS: Final = ("text", "jsonl", "parquet", "arrow", "megatron", "python_stdlib")
_NOT_CORPUS: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


@dataclass(frozen=True)
class SourceSpec:
    """One source of documents and its share of the samples."""

    format: str  # one of FORMATS
    paths: tuple[str, ...] = ()  # files and globs; prefixes for megatron; empty for python_stdlib
    weight: float = 1.0
    text_key: str = "text"  # jsonl, parquet, arrow
    documents: str = "file"  # text: "file" or "line"
    conversation: ConversationSpec | None = None  # jsonl, parquet, arrow: rows of instruction data

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise DataError(
                f"data.sources: format {self.format!r} is not one of {', '.join(FORMATS)}"
            )
        if self.documents not in ("file", "line"):
            raise DataError(f"data.sources: documents {self.documents!r} is not 'file' or 'line'")
        if not 0.0 < self.weight < float("inf"):
            raise DataError(f"data.sources: weight {self.weight} must be a positive number")

    @property
    def name(self) -> str:
        """What messages call this source."""
        return f"{self.format} {' '.join(self.paths)}".strip()


def source_files(spec: SourceSpec) -> list[Path]:
    """The files of a source that is read as text, sorted. Raises DataError, see `expand_paths`."""
    if spec.format == "python_stdlib":
        return stdlib_files()
    return expand_paths(expand_saved(spec.paths) if spec.format == "arrow" else spec.paths)


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
    """Number of files, and names and sizes in bytes as one digest: do two runs read the same?"""
    listing = "\n".join(f"{path.name} {path.stat().st_size}" for path in files)
    return f"{len(files)} files {hashlib.sha256(listing.encode()).hexdigest()[:16]}"
