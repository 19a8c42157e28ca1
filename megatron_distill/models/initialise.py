"""Random weights that are a function of the seed and the parameter's name, whatever the layout.

A sharded checkpoint describes every local tensor by its place in a global one. The same
description decides here which slice of the global random tensor a rank takes, so a model built
under any tensor, pipeline, virtual pipeline or expert layout starts from the same weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer import MegatronModule
from torch import Tensor

from megatron_distill.models.architecture import Architecture
from megatron_distill.runtime.groups import Groups

# Projections that add to the residual stream start smaller (GPT-2, section 2.3).
_RESIDUAL_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")
_VOCABULARY_TENSORS = ("word_embeddings.weight", "output_layer.weight")


def sharded_tensors(chunks: Sequence[torch.nn.Module], groups: Groups) -> Iterator[ShardedTensor]:
    """Yield the description of every tensor of the model that this rank holds."""
    for chunk in chunks:
        state = cast(MegatronModule, chunk).sharded_state_dict(
            metadata={"dp_cp_group": groups.data_context}
        )
        for value in nested_values(state):
            parts = value.build() if isinstance(value, ShardedTensorFactory) else value
            for part in nested_values({"part": parts}):
                if isinstance(part, ShardedTensor):
                    yield part


@torch.no_grad()
def initialise(
    chunks: Sequence[torch.nn.Module], architecture: Architecture, *, seed: int, groups: Groups
) -> None:
    """Fill every parameter in place; padded vocabulary rows become zero.

    The memory needed on top is one global tensor of one layer at a time.
    """
    for part in sharded_tensors(chunks, groups):
        assert part.data is not None
        assert part.flattened_range is None
        layers = part.prepend_axis_num
        offset = part.global_offset[layers:]
        whole = _global_tensor(
            f"{part.key}/{'.'.join(map(str, part.global_offset[:layers]))}",
            list(part.global_shape[layers:]),
            architecture,
            seed=seed,
        )
        window = tuple(
            slice(start, start + length)
            for start, length in zip(offset, part.data.shape, strict=True)
        )
        part.data.copy_(whole[window])


def _global_tensor(name: str, shape: list[int], architecture: Architecture, *, seed: int) -> Tensor:
    """Return the whole fp32 tensor of one parameter of one layer."""
    key = name.split("/")[0]
    if key.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in key:
        return torch.zeros(shape) if architecture.is_zero_centered else torch.ones(shape)
    std = architecture.init_std
    if key.endswith(_RESIDUAL_PROJECTIONS):
        std /= math.sqrt(2.0 * architecture.num_layers)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if not key.endswith(_VOCABULARY_TENSORS):
        return torch.randn(shape, generator=generator) * std
    # The padding depends on the tensor-parallel size, so only real rows are drawn.
    rows = torch.randn([architecture.vocab_size, *shape[1:]], generator=generator) * std
    padding = torch.zeros([shape[0] - architecture.vocab_size, *shape[1:]])
    return torch.cat((rows, padding))
