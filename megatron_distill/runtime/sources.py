"""The package's code as one figure, by which machines with another version are found."""

from __future__ import annotations

import hashlib
from pathlib import Path

import megatron_distill

__all__ = ["sources_digest"]


def sources_digest() -> str:
    """Return a digest of the package's modules."""
    assert megatron_distill.__file__ is not None
    package = Path(megatron_distill.__file__).parent
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(str(path.relative_to(package)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()
