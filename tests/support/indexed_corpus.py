"""Corpora in Megatron-Core's `.bin/.idx` format, written with its own builder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

EOD = 0


def write_indexed(
    prefix: Path, documents: Sequence[Sequence[int]], *, end: int | None = EOD, parts: int = 1
) -> str:
    """Write documents, each ended by `end` and cut into `parts` sequences; returns the prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # slow to import

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for document in documents:
        tokens = torch.tensor([*document, *([] if end is None else [end])], dtype=torch.int32)
        for part in tokens.tensor_split(parts):
            builder.add_item(part)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def numbered(count: int, *, first: int = 1) -> list[list[int]]:
    """Documents of different lengths whose tokens are all different."""
    documents, token = [], first
    for index in range(count):
        length = 3 + 5 * index % 17
        documents.append(list(range(token, token + length)))
        token += length
    return documents
