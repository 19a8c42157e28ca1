"""Layers whose outputs can be looked at and given a gradient of their own, on any pipeline stage.

A layer that is recomputed runs again in the backward pass, when its schedule is at another
micro-batch long since. So the micro-batch's number comes to the layer as the hidden state does: as
an argument, which recomputation keeps and hands over again. Upstream has a place for one more
tensor, the context of cross-attention, which a GPT has none of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor


class Tap(Protocol):
    """What is done with a layer's output."""

    def __call__(self, hidden_sbH: Tensor, *, micro_batch: int) -> Tensor:
        """Return what goes on from the layer: the same numbers [s, b, H].

        Called again with the same arguments where the layer is recomputed, gradients enabled then.
        """
        ...


class TappedLayer(TransformerLayer):
    """A layer of the stock kind that shows its output to its tap, if it has one."""

    tap: Tap | None = None

    def forward(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        hidden_sbH, context = super().forward(*arguments, **named)
        if self.tap is not None and context is not None:
            # The number lies in host memory: nothing waits for the device.
            tapped_sbH = self.tap(hidden_sbH, micro_batch=int(context))
            # Schedules free what they have sent, and refuse to free a view.
            hidden_sbH = make_viewless_tensor(
                tapped_sbH, requires_grad=tapped_sbH.requires_grad, keep_graph=True
            )
        return hidden_sbH, context


def numbered(micro_batch: int | None) -> dict[str, Tensor] | None:
    """Return what a model's layers must be given so that their taps know the micro-batch."""
    return None if micro_batch is None else {"context": torch.tensor(micro_batch)}


def tap_layers(chunks: Sequence[GPTModel], taps: Mapping[int, Tap]) -> None:
    """Give those of the chunks' layers that the mapping names, from 1, their taps."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            layer.tap = taps.get(layer.layer_number)
