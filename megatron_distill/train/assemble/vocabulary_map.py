"""The vocabulary map of a run, built by one rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_distill.align.map_file import cached_vocabulary_map, map_bytes, map_from_bytes
from megatron_distill.align.vocabulary_map import VocabularyMap
from megatron_distill.data.tokenizers.open import Tokenizer
from megatron_distill.runtime.collectives import on_first_rank

__all__ = ["open_vocabulary_map"]


def open_vocabulary_map(
    student: Tokenizer | None,
    teacher: Tokenizer | None,
    *,
    folder: Path,
    device: torch.device,
    special_pairs: Sequence[tuple[str, str]] = (),
) -> VocabularyMap:
    """Return the map of two tokenizers on every rank, from the cache in `folder` or built now.

    student, teacher: only the first rank has them and only it reads `folder`, which nodes need not
    share. Raises on all ranks as `align.cached_vocabulary_map`.

    Collective: world, one all-reduce of 8 bytes every five seconds while the first rank works. Then
    a broadcast of the map's file, about 50 bytes per student token.
    """

    def content() -> bytes:
        assert student is not None, "the first rank has the student's tokenizer"
        assert teacher is not None, "the first rank has the teacher's tokenizer"
        return map_bytes(
            cached_vocabulary_map(student, teacher, folder=folder, special_pairs=special_pairs)
        )

    shared = [on_first_rank(content, device=device)]
    dist.broadcast_object_list(shared, src=0)
    assert shared[0] is not None
    return map_from_bytes(shared[0], place="the first rank's vocabulary map")
