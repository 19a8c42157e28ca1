"""Memory beside the weights: of the cache as far as it is free, and of the draw of a token."""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist

from megatron_distill.models.generation.request import Sampling
from megatron_distill.runtime.collectives import highest

__all__ = ["CACHE_GIB", "draw_bytes", "free_cache_gib"]

CACHE_GIB: Final = 4.0  # of a model in training, and on a CPU
_SHARE: Final = 0.5  # the rest is for activations, logits and fragments
_GIB: Final = 2**30
_ROW_BYTES: Final = 2**8  # of numbers of a row
# Sums of 2,048 digits of a row, int64, and their orders; see `draw`.
_DIGITS_BYTES: Final = 2**16


def free_cache_gib(
    asked: float | None, device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    """Return the memory of the cache where models only write and score, the same on all ranks.

    asked: `generation.cache_gib`. None is half of what is free on the GPU with the least, what the
    allocator keeps included. Call it once the models are built.

    Collective: on GPUs with None, `group` (the world), one all-reduce of 8 bytes.
    """
    if asked is not None:
        return asked
    if device.type != "cuda":
        return CACHE_GIB
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    (least,) = highest(-free, device=device, group=group)
    return _SHARE * -least / _GIB


def draw_bytes(columns: int, sampling: Sampling) -> int:
    """Return the most bytes of a row's logits, fp32, and of the draw from so many columns.

    The draw has them in fp64, with the bits of its noise. `top_k` and `top_p` weigh and count
    digits of each, as int64.
    """
    if sampling.temperature == 0.0:
        return 8 * columns + _ROW_BYTES
    has_mass = sampling.top_p < 1.0
    if sampling.top_k is None and not has_mass:
        return (38 if sampling.min_p == 0.0 else 39) * columns + _ROW_BYTES
    each = 61 if not has_mass else 69 if sampling.top_k is None else 78
    return each * columns + _DIGITS_BYTES
