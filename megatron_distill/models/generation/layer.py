"""Layers and ends of a model chunk, computed from the weights of its modules.

A step of one position per row is short, and upstream's modules cost more than their products. Here
each layer is its products, on rows [N, H] of all tensor ranks alike: no sequence parallelism, no
dropout, no recomputation. Transformer Engine's modules have the same weights; only FP8 is lost.

Shapes: N positions, H hidden size, g key-value heads of this rank, r query heads for each, d head
size, V rows of the head on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from megatron_distill.models.attention import TorchAttention
from megatron_distill.models.generation.cache import KeyShape
from megatron_distill.models.generation.experts import Experts
from megatron_distill.models.layer_kinds import LayerKinds
from megatron_distill.runtime.groups import Groups

__all__ = ["Layer", "Norm", "Rotation", "summed"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines of the positions, each [N, 1, 1, d]; see `rotated`."""


def summed(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks of a group, in place.

    Collective: `group`, one all-reduce of the tensor, if there are several ranks.
    """
    if group.size() > 1:
        dist.all_reduce(part, group=group)
    return part


@dataclass(frozen=True)
class Norm:
    """RMSNorm or LayerNorm of the last dimension."""

    weight: Tensor  # the gain itself, fp32 where it is stored as its distance from one
    bias: Tensor | None
    eps: float
    is_rms: bool

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, config: TransformerConfig) -> Norm:
        """Take the parameters of a norm of a model of this configuration."""
        gain = 1.0 + weight.float() if config.layernorm_zero_centered_gamma else weight
        is_rms = config.normalization == "RMSNorm"
        return cls(gain, None if is_rms else bias, config.layernorm_epsilon, is_rms)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise; the output has the type of x."""
        if not self.is_rms:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        if self.weight.dtype is x.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


def _norm(module: nn.Module | None, config: TransformerConfig) -> Norm | None:
    if module is None or isinstance(module, IdentityOp):
        return None
    return Norm.of(module.weight, getattr(module, "bias", None), config)  # type: ignore[arg-type]


def _norm_before(module: nn.Module, linear: nn.Module, config: TransformerConfig) -> Norm:
    """Return a sublayer's first norm: a module, or fused with the product after it."""
    own = _norm(module, config)
    if own is not None:
        return own
    return Norm.of(linear.layer_norm_weight, getattr(linear, "layer_norm_bias", None), config)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Linear:
    """A matrix [out, in], and a bias [out] or None."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, module: Any) -> Linear:
        """Take the parameters of a linear module; an empty bias is none."""
        bias = getattr(module, "bias", None)
        return cls(module.weight, bias if bias is not None and bias.numel() else None)


@dataclass(frozen=True)
class FeedForward:
    """A dense feed-forward; with a gate, the first product is gate and rows up in one."""

    first: Linear
    second: Linear
    activation: Callable[[Tensor], Tensor]
    is_gated: bool

    @classmethod
    def of(cls, module: Any) -> FeedForward:
        """Take the weights of upstream's module."""
        config = module.config
        return cls(
            Linear.of(module.linear_fc1),
            Linear.of(module.linear_fc2),
            config.activation_func,
            config.gated_linear_unit,
        )

    def __call__(self, x_NH: Tensor) -> Tensor:
        """Return this tensor rank's part of the output, without the last bias."""
        inner = F.linear(x_NH, self.first.weight, self.first.bias)
        if self.is_gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = self.activation(gate) * up
        else:
            inner = self.activation(inner)
        return F.linear(inner, self.second.weight)


def rotated(heads: Tensor, rotation: Rotation, width: int) -> Tensor:
    """Rotate the first `width` numbers of each head [N, g, h, d], in halves.

    Cosines are 1 and sines 0 for further numbers; the sines of the first half are negative.
    Source: RoFormer, arXiv 2104.09864, equation 34.
    """
    cosines, sines = rotation
    half = width // 2
    parts = [heads[..., half:width], heads[..., :half]]
    if width < heads.shape[-1]:
        parts.append(heads[..., width:])
    return torch.addcmul(heads * cosines, torch.cat(parts, -1), sines)


@dataclass(frozen=True)
class Layer:
    """One transformer layer."""

    core: TorchAttention
    attention_norm: Norm
    mixed: Linear  # queries, keys and values, by groups of heads
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    attention_post_norm: Norm | None
    feed_forward_norm: Norm
    feed_forward: FeedForward | Experts
    feed_forward_bias: Tensor | None
    feed_forward_post_norm: Norm | None
    groups: Groups
    total_kv_heads: int
    keys: KeyShape
    plane: int | None  # of the rotations; None: positions are learned
    rotary_width: int

    @classmethod
    def of(cls, module: Any, *, kinds: LayerKinds, groups: Groups, rotary_width: int) -> Layer:
        """Take the weights of a layer's modules."""
        attention, mlp, config = module.self_attention, module.mlp, module.config
        rotation = kinds.layers[module.layer_number - 1].rotation
        if isinstance(mlp, MoELayer):
            shared = mlp.shared_experts
            feed_forward: FeedForward | Experts = Experts.of(
                mlp, None if shared is None else FeedForward.of(shared), groups=groups
            )
            first_norm, bias = _norm(module.pre_mlp_layernorm, config), None
            assert first_norm is not None
        else:
            assert isinstance(mlp, MLP), type(mlp)
            feed_forward = FeedForward.of(mlp)
            first_norm = _norm_before(module.pre_mlp_layernorm, mlp.linear_fc1, config)
            bias = feed_forward.second.bias
        return cls(
            core=attention.core_attention,
            attention_norm=_norm_before(module.input_layernorm, attention.linear_qkv, config),
            mixed=Linear.of(attention.linear_qkv),
            query_norm=_norm(attention.q_layernorm, config),
            key_norm=_norm(attention.k_layernorm, config),
            output=Linear.of(attention.linear_proj),
            attention_post_norm=_norm(attention.post_norm, config),
            feed_forward_norm=first_norm,
            feed_forward=feed_forward,
            feed_forward_bias=bias,
            feed_forward_post_norm=_norm(getattr(mlp, "post_norm", None), config),
            groups=groups,
            total_kv_heads=config.num_query_groups,
            keys=KeyShape(
                max(1, config.num_query_groups // groups.tensor.size()),
                config.kv_channels,
                attention.core_attention.window,
            ),
            plane=None if rotation is None else kinds.rotations.index(rotation),
            rotary_width=rotary_width,
        )

    def __call__(self, hidden_NH: Tensor, rotations: list[Rotation], attend: Attend) -> Tensor:
        """Return the hidden state after the layer; `attend` as `Step.attend` for this layer.

        Collective: tensor group, two all-reduces of H numbers per position, plus those of experts.
        """
        query, key, value = self._heads(self.attention_norm(hidden_NH), rotations)
        attended = attend(query, key, value).flatten(1)
        update = summed(F.linear(attended, self.output.weight), self.groups.tensor)
        hidden_NH = hidden_NH + _finished(update, self.output.bias, self.attention_post_norm)
        update = self.feed_forward(self.feed_forward_norm(hidden_NH))
        if isinstance(self.feed_forward, FeedForward):
            update = summed(update, self.groups.tensor)
        return hidden_NH + _finished(update, self.feed_forward_bias, self.feed_forward_post_norm)

    def _heads(self, x_NH: Tensor, rotations: list[Rotation]) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [N, g, r, d], key and value [N, g, d], normalised and rotated."""
        mixed = F.linear(x_NH, self.mixed.weight, self.mixed.bias)
        share = self.groups.tensor.size() // self.total_kv_heads
        if share > 1:
            mixed = self._of_group(mixed, share)
        heads = mixed.view(mixed.shape[0], self.keys.heads, -1, self.keys.head_size)
        both, value = heads[:, :, :-1], heads[:, :, -1]
        if share > 1:  # this rank's queries of the group, and its key
            size = (both.shape[2] - 1) // share
            start = self.groups.tensor.rank() % share * size
            both = torch.cat([both[:, :, start : start + size], both[:, :, -1:]], 2)
        if self.query_norm is not None:
            assert self.key_norm is not None
            query, key = self.query_norm(both[:, :, :-1]), self.key_norm(both[:, :, -1:])
            both = torch.cat([query, key], 2)
        if self.plane is not None:
            both = rotated(both, rotations[self.plane], self.rotary_width)
        return both[:, :, :-1], both[:, :, -1], value

    def _of_group(self, mixed: Tensor, share: int) -> Tensor:
        """Return the queries, key and value of the group that this rank has a share of.

        With fewer key-value heads than tensor ranks, a rank's rows of the weight are a slice of
        them. Collective: tensor group, one all-gather of the row.
        """
        ranks = [torch.empty_like(mixed) for _ in range(self.groups.tensor.size())]
        dist.all_gather(ranks, mixed.contiguous(), group=self.groups.tensor)
        first = self.groups.tensor.rank() // share * share
        return torch.cat(ranks[first : first + share], -1)


def _finished(update: Tensor, bias: Tensor | None, norm: Norm | None) -> Tensor:
    if bias is not None:
        update = update + bias
    return update if norm is None else norm(update)
