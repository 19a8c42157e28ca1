"""Taps: hooks on layer outputs or attention inputs that can observe them and add gradients.

A recomputed layer runs again in the backward pass, when its schedule is at a later micro-batch. So
the micro-batch's number reaches each layer and each attention as an argument of the call, which
recomputation repeats. The argument is upstream's attention bias, which our models do not use.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class LayerTap(Protocol):
    """A hook on a layer's output."""

    def __call__(self, hidden_sbH: Tensor, *, micro_batch: int) -> Tensor:
        """Return the layer's output with the same values [s, b, H].

        Called again with the same arguments where the layer is recomputed, with gradients enabled.
        """
        ...


class AttentionTap(Protocol):
    """A hook on the queries and keys of a layer's attention."""

    def __call__(
        self, query: Tensor, key: Tensor, mask: Tensor | None, *, micro_batch: int
    ) -> tuple[Tensor, Tensor]:
        """Return the same queries [s, b, n, d] and keys [S, b, g, d], of this tensor rank's heads.

        The mask is that of the attention: bool [b, 1, s, S], true where the query sees the key, or
        None for a causal mask. Called again like a layer's tap.
        """
        ...


def numbered(micro_batch: int | None) -> dict[str, Tensor] | None:
    """Return the arguments that make a model's layers call their taps."""
    return None if micro_batch is None else {"attention_bias": torch.tensor(micro_batch)}


def micro_batch_of(attention_bias: Tensor | None) -> int | None:
    """Return the number of the micro-batch, from host memory: no device synchronisation."""
    return None if attention_bias is None else int(attention_bias)
