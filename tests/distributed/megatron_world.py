"""Megatron-Core inside a pool worker: prepared, with the groups of one layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron_distill.runtime.mcore_patches import prepare_megatron_core

if TYPE_CHECKING:
    from megatron_distill.models.architecture import Architecture
    from megatron_distill.runtime.groups import Groups

SMALL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "head_size": 8,
    "vocab_size": 200,
    "max_position_embeddings": 32,
    "vocab_divisible_by": 8,
}


@contextmanager
def megatron_groups(**layout: Any) -> Iterator[Groups]:
    """Process groups of a layout in the pool's current world, gone afterwards."""
    prepare_megatron_core(on_cuda=False)
    from megatron_distill.runtime.groups import (
        Layout,
        create_groups,
        destroy_groups,
        seed_everything,
    )

    groups = create_groups(Layout(**layout), timeout_minutes=5)
    seed_everything(1, groups)
    try:
        yield groups
    finally:
        destroy_groups()


def small_architecture(**changes: Any) -> Architecture:
    """Return a GPT of a few thousand weights."""
    prepare_megatron_core(on_cuda=False)
    from megatron_distill.models.architecture import Architecture

    return Architecture.from_dict({**SMALL, **changes})
