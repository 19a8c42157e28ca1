"""The numbers of a frozen model's weights on a rank, from its shape and layout alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.parameters import parameters, placed
from megatron_distill.runtime.layout import Layout

__all__ = ["LAYERS_AT_ONCE", "WeightsOfRank", "weights_of_rank"]

# Of a sharded model: the layer that runs, and the next, whose weights are on their way.
LAYERS_AT_ONCE: Final = 2


@dataclass(frozen=True)
class WeightsOfRank:
    """Numbers of a frozen model's weights on the rank that has most of them.

    whole: the embedding and the head. layers: of this stage, or their shards. buffers: two layers
    beside their shards. gathered: of the layers in a forward pass, on their way to the rank.
    """

    whole: int
    layers: int
    buffers: int = 0
    gathered: int = 0

    @property
    def resident(self) -> int:
        """The most that is in memory at a time."""
        return self.whole + self.layers + self.buffers


def weights_of_rank(
    shape: Architecture, layout: Layout, *, ranks: int, is_sharded: bool
) -> WeightsOfRank:
    """Return the numbers of a model that `ranks` hold in a layout, without building it.

    Exact for one tensor rank and even shards; else norms count as cut, which are whole.
    """
    experts_cut = layout.expert if layout.expert > 1 else layout.tensor
    shares = ranks // (layout.tensor * layout.pipeline), ranks // (experts_cut * layout.pipeline)
    sizes = [[0, 0] for _ in range(shape.num_layers)]
    for parameter, place in placed(shape):
        if place:
            cut = experts_cut if parameter.per_expert else layout.tensor
            sizes[place[0]][parameter.per_expert] += -(-prod(parameter.shape) // cut)
    rows = {shape.vocab_size: shape.padded_vocab_size(layout.tensor)}
    ends = [
        rows[one.shape[0]] * one.shape[1] // layout.tensor if one.is_vocabulary else prod(one.shape)
        for one in parameters(shape)
        if not one.per_layer
    ]
    whole = sum(ends) if layout.pipeline == 1 else max(ends)
    stage = sizes[: -(-shape.num_layers // layout.pipeline)]
    layers = sum(map(sum, stage))
    if not is_sharded or max(shares) == 1:
        return WeightsOfRank(whole, layers)
    shards = sum(
        size // share for layer in stage for size, share in zip(layer, shares, strict=True)
    )
    return WeightsOfRank(whole, shards, LAYERS_AT_ONCE * max(map(sum, stage)), layers - shards)
