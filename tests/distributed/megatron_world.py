"""Megatron-Core inside a pool worker: prepared, with the groups of one layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_distill.runtime.mcore_patches import prepare_megatron_core

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_distill.models.architecture import Architecture
    from megatron_distill.models.gpt import HiddenStateGPT
    from megatron_distill.runtime.batch import Batch
    from megatron_distill.runtime.groups import Groups

    Parts = dict[tuple[str, tuple[int, ...]], Tensor]

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


def build(architecture: Architecture, groups: Groups, *, seed: int | None) -> list[HiddenStateGPT]:
    """Build this rank's part of a model in fp32 on the CPU."""
    import torch

    from megatron_distill.models.execution import Execution
    from megatron_distill.models.gpt import build_gpt

    execution = Execution(torch.float32, torch.device("cpu"))
    return list(build_gpt(architecture, groups=groups, execution=execution, seed=seed))


def rows_of(batch: Batch, rows: list[int] | slice) -> Batch:
    """Some of the sequences of a micro-batch."""
    names = ("tokens_bs", "labels_bs", "ce_mask_bs", "kd_mask_bs", "position_ids_bs")
    cut = {name: getattr(batch, name)[rows] for name in (*names, "document_ids_bS", "sample_ids_b")}
    return replace(batch, **cut, documents=None)


def parts_of(chunks: Sequence[HiddenStateGPT], groups: Groups) -> Parts:
    """The contents of the chunks' parameters, by key and place in the global tensor."""
    from megatron_distill.models.weights import sharded_tensors

    found: Parts = {}
    for part in sharded_tensors(chunks, groups):
        data = part.data.detach().clone()
        found[part.key, part.global_offset] = data[None] if part.prepend_axis_num else data
    return found


def small_architecture(**changes: Any) -> Architecture:
    """Return a GPT of a few thousand weights."""
    prepare_megatron_core(on_cuda=False)
    from megatron_distill.models.architecture import Architecture

    return Architecture.from_dict({**SMALL, **changes})
