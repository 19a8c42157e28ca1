"""Parameters of each pipeline rank, exactly, from a model's shape and layout; nothing is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.parameters import EXPERT_BIAS, Parameter, parameters
from megatron_distill.runtime.layout import Layout

__all__ = ["RankNumbers", "stage_numbers"]

# Numbers at whose multiples the distributed optimizer begins each tensor in its buffers.
_TENSOR_START: Final = 64
# Tensors that the tensor-parallel ranks share; every other one is whole on each.
_CUT: Final = (
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_proj.weight",
    "linear_fc1.weight",
    "linear_fc1.bias",
    "linear_fc2.weight",
)


@dataclass(frozen=True)
class RankNumbers:
    """Parameters on one rank; `experts` are those that an expert group divides.

    buckets: both, with the gaps between tensors in Megatron's buffers, of each chunk, and of a tied
    embedding in stages, which has a bucket of its own.
    """

    dense: int
    experts: int
    largest_layer: int = 0
    buckets: tuple[tuple[int, int], ...] = ()

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts


@lru_cache(maxsize=4096)
def stage_numbers(
    shape: Architecture, layout: Layout, layers: tuple[int, ...]
) -> tuple[RankNumbers, ...]:
    """Return the parameters of a rank of each pipeline stage.

    layers: of each stage, virtual ones included, in the order of the forward pass.
    """
    everything = parameters(shape)
    per_layer = _layers(shape, layout, everything)
    first = _ends(shape, layout, everything, prefix="embedding.")
    last = _ends(shape, layout, everything, prefix="decoder.final_layernorm.")
    last += _ends(shape, layout, everything, prefix="output_layer.")
    tied = 0
    if shape.tied_embeddings and layout.pipeline > 1:
        # The last stage has a copy of the word embeddings, without the positions'.
        tied = _rows(shape, layout) * shape.hidden_size
        last.append(tied)
    found = []
    for rank in range(layout.pipeline):
        is_first, is_last = rank == 0, rank == layout.pipeline - 1
        ends = [*(first if is_first else ()), *(last if is_last else ())]
        dense, experts, largest = sum(ends), 0, 0
        buckets = []
        for stage in range(rank, len(layers), layout.pipeline):
            begin = sum(layers[:stage])
            aligned = [0, 0]
            for of_dense, of_experts, *with_gaps in per_layer[begin : begin + layers[stage]]:
                dense, experts = dense + of_dense, experts + of_experts
                largest = max(largest, of_dense + of_experts)
                aligned = [total + more for total, more in zip(aligned, with_gaps, strict=True)]
            if is_first and stage == rank:
                aligned[0] += sum(map(_aligned, first)) - _aligned(tied)
            if is_last and stage == len(layers) - 1:
                aligned[0] += sum(map(_aligned, last)) - _aligned(tied)
            buckets.append((aligned[0], aligned[1]))
        if tied and (is_first or is_last):
            buckets.append((tied, 0))
        found.append(RankNumbers(dense, experts, largest, tuple(buckets)))
    return tuple(found)


def _aligned(count: int) -> int:
    return -(-count // _TENSOR_START) * _TENSOR_START


def _layers(
    shape: Architecture, layout: Layout, everything: Sequence[Parameter]
) -> list[tuple[int, int, int, int]]:
    """Return the numbers of every layer, dense and of divided experts, and both with gaps."""
    sizes = [[0, 0, 0, 0] for _ in range(shape.num_layers)]
    for parameter in everything:
        if not parameter.per_layer or parameter.key.endswith(EXPERT_BIAS):
            continue
        count = prod(parameter.shape)
        divided = parameter.per_expert and layout.expert > 1
        if parameter.key.endswith(_CUT) and not divided:
            count //= layout.tensor
        tensors = 1
        if parameter.per_expert:
            assert shape.moe is not None
            tensors = shape.moe.num_experts // layout.expert
        for layer in range(shape.num_layers):
            if parameter.is_in(layer):
                sizes[layer][divided] += tensors * count
                sizes[layer][2 + divided] += tensors * _aligned(count)
    return [(one[0], one[1], one[2], one[3]) for one in sizes]


def _rows(shape: Architecture, layout: Layout) -> int:
    return shape.padded_vocab_size(layout.tensor) // layout.tensor


def _ends(
    shape: Architecture, layout: Layout, everything: Sequence[Parameter], *, prefix: str
) -> list[int]:
    return [
        _rows(shape, layout) * one.shape[1] if one.is_vocabulary else prod(one.shape)
        for one in everything
        if one.key.startswith(prefix)
    ]
