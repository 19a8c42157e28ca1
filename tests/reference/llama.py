"""A Llama-like GPT by its definition, in float64, on our own names of global tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

LAYER = "decoder.layers."


@dataclass(frozen=True)
class Heads:
    """How the attention is cut."""

    queries: int
    groups: int
    size: int


@dataclass(frozen=True)
class Packed:
    """Whole sequences [b, S]; positions attend to earlier ones of the same document."""

    tokens: Tensor
    positions: Tensor
    documents: Tensor


@dataclass(frozen=True)
class Run:
    """A model's outputs: each layer's output and its heads' mean map, from the first layer."""

    outputs: list[Tensor]  # [b, S, H]
    maps: list[Tensor]  # [b, S, S]: attention probabilities of the queries
    final: Tensor  # [b, S, H]: the last hidden state, in front of the head
    logits: Tensor  # [b, S, V]


def run(weights: Mapping[str, Tensor], heads: Heads, packed: Packed) -> Run:
    """Run a model.

    `weights` are float64 by name, those of layers stacked in the order of the layers.
    """
    state = weights["embedding.word_embeddings.weight"][packed.tokens]
    outputs, maps = [], []
    for layer in range(len(weights[f"{LAYER}self_attention.linear_qkv.layer_norm_weight"])):
        own = {
            name.removeprefix(LAYER): tensor[layer]
            for name, tensor in weights.items()
            if name.startswith(LAYER)
        }
        normed = _norm(state, own["self_attention.linear_qkv.layer_norm_weight"])
        attended, mean_map = _attention(own, normed, heads, packed)
        state = state + attended
        gate, up = (
            _norm(state, own["mlp.linear_fc1.layer_norm_weight"]) @ own["mlp.linear_fc1.weight"].t()
        ).chunk(2, -1)
        state = state + (gate * gate.sigmoid() * up) @ own["mlp.linear_fc2.weight"].t()
        outputs.append(state)
        maps.append(mean_map)
    final = _norm(state, weights["decoder.final_layernorm.weight"])
    return Run(outputs, maps, final, final @ weights["output_layer.weight"].t())


def _norm(state: Tensor, weight: Tensor) -> Tensor:
    return state / (state.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _attention(
    own: Mapping[str, Tensor], state: Tensor, heads: Heads, packed: Packed
) -> tuple[Tensor, Tensor]:
    batch, length, _ = state.shape
    per_group = heads.queries // heads.groups
    rows = (state @ own["self_attention.linear_qkv.weight"].t()).view(
        batch, length, heads.groups, per_group + 2, heads.size
    )
    query = _turned(rows[..., :per_group, :].flatten(2, 3), packed.positions)
    key = _turned(rows[..., per_group, :], packed.positions).repeat_interleave(per_group, 2)
    value = rows[..., per_group + 1, :].repeat_interleave(per_group, 2)
    scores = torch.einsum("bqnd,bknd->bnqk", query, key) / heads.size**0.5
    same = packed.documents[:, :, None] == packed.documents[:, None, :]
    seen = same & torch.ones(length, length, dtype=torch.bool).tril()
    chance = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    attended = torch.einsum("bnqk,bknd->bqnd", chance, value).flatten(2)
    return attended @ own["self_attention.linear_proj.weight"].t(), chance.mean(1)


def _turned(heads: Tensor, positions: Tensor) -> Tensor:
    half = heads.shape[-1] // 2
    frequency = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = (positions[..., None].double() * frequency)[:, :, None]
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
    )
