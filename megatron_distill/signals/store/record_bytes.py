"""How many bytes a record has, before there is one, and how many of them make a good shard."""

from __future__ import annotations

from typing import Final

import numpy as np

from megatron_distill.signals.store.codecs import CODECS, id_planes
from megatron_distill.signals.store.header import HEADER_BYTES
from megatron_distill.signals.store.plan import CaptureSettings

__all__ = ["largest_record_bytes", "usual_samples_per_shard"]

_SHARD_BYTES: Final = 256_000_000
# So that many replicas have work, and a capture that is killed does not lose all.
_FEWEST_SHARDS: Final = 16


def largest_record_bytes(settings: CaptureSettings) -> int:
    """Bytes of a record whose rows are all full; `top_p` and draws make most records smaller."""
    codec = CODECS[settings.codec]
    scalar = np.dtype(codec.scalar).itemsize
    count_bytes = 1 if settings.k < 1 << 8 else 2 if settings.k < 1 << 16 else 4
    per_entry = 2 + id_planes(settings.vocab_size) / 8
    per_position = 4 + 2 / 8  # the token and its flags
    if settings.normalised_over == "vocabulary":
        per_position += 4 + 2 * scalar
    if settings.mode == "sampled":
        per_position += count_bytes
        per_entry += count_bytes
    else:
        per_entry += {"f32": 4, "f16": 2, "u8": 1}[settings.codec]
        per_position += 4 if settings.codec == "u8" else 0
        per_position += scalar if settings.normalised_over == "vocabulary" else 0
        per_position += count_bytes if settings.top_p is not None else 0
        per_position += len(settings.temperatures) * (4 + scalar)
    per_position += settings.k * per_entry
    return HEADER_BYTES + round(settings.sequence_length * per_position)


def usual_samples_per_shard(settings: CaptureSettings, samples: int) -> int:
    """Records of a shard of some 256 MB; fewer, where there would not be 16 shards.

    Depends on nothing but what the store is to hold, so that any layout goes on with it.
    """
    by_size = _SHARD_BYTES // largest_record_bytes(settings)
    return max(1, min(by_size, samples // _FEWEST_SHARDS))
