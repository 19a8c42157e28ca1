"""JSON files of a store, sealed with the SHA-256 of their content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from megatron_distill.errors import StoreError

__all__ = ["canonical", "read_bytes", "repair_advice", "sealed", "unsealed"]


def canonical(value: dict[str, Any]) -> bytes:
    """JSON with one form per value: sorted keys, two spaces, ASCII."""
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode("ascii")


def sealed(value: dict[str, Any]) -> bytes:
    """Canonical JSON, with the SHA-256 of the remaining content under `seal`."""
    return canonical(value | {"seal": hashlib.sha256(canonical(value)).hexdigest()})


def repair_advice(store: Path, *, file: bool = False) -> str:
    """The advice at the end of a message about a damaged store; `file`: also to restore a copy."""
    first = "restore the file from a copy, or " if file else ""
    return f"{first}run `python tools/teacher_store.py repair {store}`, then the capture again"


def unsealed(path: Path, *, advice: str) -> dict[str, Any]:
    """The content of a sealed file. Raises StoreError: unreadable, or changed."""
    text = read_bytes(path, advice=advice)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise StoreError(f"{path}: damaged, not valid JSON; {advice}") from error
    if not isinstance(value, dict) or not _is_sealed(value, text):
        raise StoreError(f"{path}: damaged, its content does not match its seal; {advice}")
    return value


def _is_sealed(value: dict[str, Any], text: bytes) -> bool:
    try:
        return sealed({name: part for name, part in value.items() if name != "seal"}) == text
    except ValueError:
        return False  # NaN: json.loads accepts it, the canonical writer does not


def read_bytes(path: Path, *, advice: str = "") -> bytes:
    """The content of a file. Raises StoreError with its path and the advice."""
    try:
        return path.read_bytes()
    except OSError as error:
        end = f"; {advice}" if advice else ""
        raise StoreError(f"{path}: cannot be read ({error.strerror}){end}") from error
