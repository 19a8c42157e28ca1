"""Places in a model where what passes can be looked at and given a gradient of its own.

A layer that is recomputed runs again in the backward pass, when its schedule is at another
micro-batch long since. So the micro-batch's number comes to each layer and each attention as an
argument of the call, which recomputation repeats with the arguments that it had. Upstream hands all
of them one more, a bias of the attention, which our models have none of.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class LayerTap(Protocol):
    """What is done with a layer's output."""

    def __call__(self, hidden_sbH: Tensor, *, micro_batch: int) -> Tensor:
        """Return what goes on from the layer: the same numbers [s, b, H].

        Called again with the same arguments where the layer is recomputed, gradients enabled then.
        """
        ...


class AttentionTap(Protocol):
    """What is done with the queries and keys of a layer's attention."""

    def __call__(
        self, query: Tensor, key: Tensor, mask: Tensor | None, *, micro_batch: int
    ) -> tuple[Tensor, Tensor]:
        """Return the same queries [s, b, n, d] and keys [S, b, g, d], of this tensor rank's heads.

        The mask is that of the attention: bool [b, 1, s, S], true where the query sees the key, or
        None for plain causality. Called again like a layer's tap.
        """
        ...


def numbered(micro_batch: int | None) -> dict[str, Tensor] | None:
    """Return what a model's layers must be given so that their taps are called."""
    return None if micro_batch is None else {"attention_bias": torch.tensor(micro_batch)}


def micro_batch_of(attention_bias: Tensor | None) -> int | None:
    """Return the number of the micro-batch, which lies in host memory: nothing waits for it."""
    return None if attention_bias is None else int(attention_bias)
