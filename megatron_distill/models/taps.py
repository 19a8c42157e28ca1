"""Taps: hooks on layer outputs or attention inputs that can observe them and add gradients.

A recomputed layer runs again in the backward pass, when its schedule is at a later micro-batch. So
the micro-batch's documents and number reach each layer and each attention as an argument of the
call, which recomputation repeats. The argument is upstream's attention bias, which our models do
not use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from megatron_distill.runtime.segments import KeyRanges, Segments


@dataclass(frozen=True)
class LayerCall:
    """Arguments of every layer of one forward pass."""

    segments: Segments  # the micro-batch's documents
    micro_batch: int | None = None  # its number in the step; None: taps are not called

    @property
    def arguments(self) -> dict[str, LayerCall]:
        """The named arguments of upstream's layers."""
        return {"attention_bias": self}


class LayerTap(Protocol):
    """A hook on a layer's output."""

    def __call__(self, hidden_sbH: Tensor, *, micro_batch: int) -> Tensor:
        """Return the layer's output with the same values [s, b, H].

        Called again with the same arguments where the layer is recomputed, with gradients enabled.
        """
        ...


@dataclass(frozen=True)
class VisibleKeys:
    """The keys that the queries of a layer see."""

    segments: Segments
    window: int | None

    def on(self, device: torch.device) -> KeyRanges:
        """Return the range of each query, copied once for all layers of the micro-batch."""
        make = partial(self.segments.key_ranges, self.window, device)
        ranges: KeyRanges = self.segments.derived(("ranges", self.window, device), make)
        return ranges


class AttentionTap(Protocol):
    """A hook on the queries and keys of a layer's attention."""

    def __call__(
        self, query: Tensor, key: Tensor, visible: VisibleKeys, *, micro_batch: int
    ) -> tuple[Tensor, Tensor]:
        """Return the same queries [s, b, n, d] and keys [S, b, g, d], of this tensor rank's heads.

        Keys are in the order of the sequence. Called again like a layer's tap.
        """
        ...
