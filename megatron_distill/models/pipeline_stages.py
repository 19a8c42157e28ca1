"""The number of layers of each pipeline stage by default.

Stages are in the order of the forward pass: with virtual stages first chunk 0 of every pipeline
rank, then chunk 1.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["balanced_layers", "even_layers", "ranks_of_layers"]


def even_layers(num_layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage where all cost the same; the remainder goes to the first."""
    fewest, surplus = divmod(num_layers, stages)
    return tuple(fewest + (stage < surplus) for stage in range(stages))


def balanced_layers(num_layers: int, stages: int, *, heads: float) -> tuple[int, ...]:
    """Return the layers of each stage whose most expensive stage is cheapest.

    `heads`: the work of the output heads, which the last stage has besides its layers, in layers.
    Among equally good tables, the last stage has the most layers. Every stage has one at least,
    where there are enough.
    """
    best = even_layers(num_layers, stages)
    if stages == 1:
        return best

    def cost(layers: tuple[int, ...]) -> float:
        return max(*layers[:-1], layers[-1] + heads)

    for last in range(best[-1] - 1, 0, -1):
        layers = (*even_layers(num_layers - last, stages - 1), last)
        if cost(layers) < cost(best):
            best = layers
    return best


def ranks_of_layers(layers: Sequence[int], pipeline: int) -> tuple[int, ...]:
    """Return the pipeline rank of each layer, from the layers of each stage."""
    return tuple(stage % pipeline for stage, count in enumerate(layers) for _ in range(count))
