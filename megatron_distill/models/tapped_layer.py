"""Layers of the stock kind that show their outputs to a tap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_distill.models.taps import AttentionTap, LayerTap, micro_batch_of


class TappedLayer(TransformerLayer):
    """A stock layer whose output passes its tap, if it has one."""

    tap: LayerTap | None = None

    def forward(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        hidden_sbH, context = super().forward(*arguments, **named)
        micro_batch = micro_batch_of(named.get("attention_bias"))
        if self.tap is not None and micro_batch is not None:
            tapped_sbH = self.tap(hidden_sbH, micro_batch=micro_batch)
            # Schedules free what they have sent, and refuse to free a view.
            hidden_sbH = make_viewless_tensor(
                tapped_sbH, requires_grad=tapped_sbH.requires_grad, keep_graph=True
            )
        return hidden_sbH, context


def tap_layers(
    chunks: Sequence[GPTModel],
    layers: Mapping[int, LayerTap],
    attentions: Mapping[int, AttentionTap],
) -> None:
    """Give taps to those of the chunks' layers and attentions that are named, from 1."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            layer.tap = layers.get(layer.layer_number)
            layer.self_attention.core_attention.tap = attentions.get(layer.layer_number)
