"""Layers and ends of a model chunk, computed from the weights of its modules.

A step of one position per row is short, and upstream's modules cost more than their products. Here
each layer is its products, on rows [N, H] of all tensor ranks alike: no sequence parallelism, no
dropout, no recomputation. Transformer Engine's modules have the same weights; only FP8 is lost.

Each operation costs such a step a launch. So sums and rotations are in place, and values that do
not depend on the step are prepared with the layer.

Shapes: N positions, H hidden size, g key-value heads of this rank, r query heads for each, d head
size, V rows of the head on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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

from megatron_distill.models.generation.attend import Core
from megatron_distill.models.generation.cache import KeyShape
from megatron_distill.models.generation.experts import ExpertLayer
from megatron_distill.models.generation.linear import Linear, WeightCopies
from megatron_distill.models.generation.rotation import RotaryPlanes, paired_rows, rotate_
from megatron_distill.models.layer_kinds import LayerKinds
from megatron_distill.runtime.groups import Groups

__all__ = ["GenerationNorm", "Layer", "summed"]

AttentionFunction = Callable[[Tensor, Tensor], Tensor]


def summed(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks of a group, in place.

    Collective: `group`, one all-reduce of the tensor, if there are several ranks.
    """
    if group.size() > 1:
        dist.all_reduce(part, group=group)
    return part


@dataclass(frozen=True)
class RootMeanSquare:
    """The last dimension over its root mean square, times a gain.

    One kernel of a GPU, and six operations of torch's CPU. There fp32 numbers take four, by
    x / sqrt(mean(x^2) + eps) = sqrt(H) x / hypot(|x|, sqrt(H eps)).

    Attributes:
        gain: of the last dimension, [H] or [..., H].
        length_gain: sqrt(H) gain, and floor: sqrt(H eps), on a CPU; None elsewhere.
    """

    gain: Tensor
    eps: float
    length_gain: Tensor | None
    floor: Tensor | None

    @classmethod
    def of(cls, gain: Tensor, eps: float) -> RootMeanSquare:
        """Prepare the factors of a gain."""
        if gain.device.type != "cpu" or gain.dtype is not torch.float32:
            return cls(gain, eps, None, None)
        size = gain.shape[-1]
        return cls(gain, eps, gain * math.sqrt(size), gain.new_tensor(math.sqrt(size * eps)))

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise numbers of the gain's type."""
        if self.floor is not None and self.length_gain is not None:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return torch.div(x, length.hypot_(self.floor)).mul_(self.length_gain)
        if self.gain.dim() == 1:
            return F.rms_norm(x, self.gain.shape, self.gain, self.eps)
        return F.rms_norm(x, self.gain.shape[-1:], eps=self.eps).mul_(self.gain)


@dataclass(frozen=True)
class GenerationNorm:
    """RMSNorm or LayerNorm of the last dimension."""

    weight: Tensor  # the gain itself, fp32 where it is stored as its distance from one
    bias: Tensor | None
    eps: float
    rms: RootMeanSquare | None  # None: LayerNorm

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, config: TransformerConfig) -> GenerationNorm:
        """Take the parameters of a norm of a model of this configuration."""
        gain = 1.0 + weight.float() if config.layernorm_zero_centered_gamma else weight
        eps = config.layernorm_epsilon
        if config.normalization == "RMSNorm":
            return cls(gain, None, eps, RootMeanSquare.of(gain, eps))
        return cls(gain, bias, eps, None)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise; the output has the type of x."""
        if self.rms is None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        if self.weight.dtype is x.dtype:
            return self.rms(x)
        return self.rms(x.float()).to(x.dtype)


def _norm(module: nn.Module | None, config: TransformerConfig) -> GenerationNorm | None:
    if module is None or isinstance(module, IdentityOp):
        return None
    return GenerationNorm.of(module.weight, getattr(module, "bias", None), config)  # type: ignore[arg-type]


def _norm_before(module: nn.Module, linear: nn.Module, config: TransformerConfig) -> GenerationNorm:
    """Return a sublayer's first norm: a module, or fused with the product after it."""
    own = _norm(module, config)
    if own is not None:
        return own
    bias = getattr(linear, "layer_norm_bias", None)
    return GenerationNorm.of(linear.layer_norm_weight, bias, config)  # type: ignore[arg-type]


@dataclass(frozen=True)
class HeadNorm:
    """Norms of the queries and the key of each group of heads, in one.

    gains: [r + 1, d], with one row of the key's, and so are biases.
    """

    gains: Tensor
    biases: Tensor | None
    eps: float
    rms: RootMeanSquare | None  # None: LayerNorm

    @classmethod
    def of(
        cls,
        query: GenerationNorm | None,
        key: GenerationNorm | None,
        queries: int,
        order_d: Tensor | None,
    ) -> HeadNorm | None:
        """Join the norms of `queries` heads and a key, if there are any; order_d: of `Layer.of`."""
        if query is None:
            return None
        assert key is not None
        assert (query.eps, query.rms is None) == (key.eps, key.rms is None)

        def rows(one: Tensor, other: Tensor) -> Tensor:
            stacked = torch.stack([one] * queries + [other])
            return stacked if order_d is None else stacked[:, order_d]

        biases = None
        if query.bias is not None:
            assert key.bias is not None
            biases = rows(query.bias, key.bias)
        # Numbers of 16 bits are rounded once, behind the gain, as the model's own norms are.
        gains = rows(query.weight, key.weight).float()
        rms = None if query.rms is None else RootMeanSquare.of(gains, query.eps)
        return cls(gains, biases, query.eps, rms)

    def __call__(self, heads: Tensor) -> Tensor:
        """Return normalised heads [N, g, r + 1, d]; the output has their type."""
        x = heads if heads.dtype is self.gains.dtype else heads.float()
        if self.rms is not None:
            found = self.rms(x)
        else:
            found = F.layer_norm(x, [x.shape[-1]], eps=self.eps).mul_(self.gains)
        if self.biases is not None:
            found.add_(self.biases)
        return found.to(heads.dtype)


@dataclass(frozen=True)
class FeedForward:
    """A dense feed-forward; with a gate, the first product is gate and rows up in one."""

    first: Linear
    second: Linear
    activation: Callable[[Tensor], Tensor]
    is_gated: bool

    @classmethod
    def of(cls, module: Any, copies: WeightCopies) -> FeedForward:
        """Take the weights of upstream's module."""
        config = module.config
        return cls(
            Linear.of(module.linear_fc1, copies),
            Linear.of(module.linear_fc2, copies),
            config.activation_func,
            config.gated_linear_unit,
        )

    def __call__(self, x_NH: Tensor) -> Tensor:
        """Return this tensor rank's part of the output, without the last bias."""
        return self.second.product(self.inner(x_NH))

    def inner(self, x_NH: Tensor) -> Tensor:
        """Return what the second product reads."""
        inner = self.first(x_NH)
        if not self.is_gated:
            return self.activation(inner)
        gate, up = inner.chunk(2, dim=-1)
        return self.activation(gate).mul_(up)


def _mixed(module: Any, order_d: Tensor | None, groups: int, copies: WeightCopies) -> Linear:
    """Return the product that makes queries, keys and values, in their order."""
    linear = Linear.of(module, copies)
    if order_d is None:
        return linear
    bias = None if linear.bias is None else paired_rows(linear.bias, order_d, groups=groups)
    return Linear(paired_rows(module.weight, order_d, groups=groups).t(), bias, copies)


@dataclass(frozen=True)
class Layer:
    """One transformer layer."""

    core: Core
    attention_norm: GenerationNorm
    mixed: Linear  # queries, keys and values, by groups of heads
    head_norm: HeadNorm | None
    output: Linear
    attention_post_norm: GenerationNorm | None
    feed_forward_norm: GenerationNorm
    feed_forward: FeedForward | ExpertLayer
    feed_forward_post_norm: GenerationNorm | None
    groups: Groups
    share: int  # tensor ranks that share one group of heads; 0 or 1: none
    queries: int  # of each group on this rank
    keys: KeyShape
    plane: int | None  # of the rotations; None: positions are learned
    rotary_width: int

    @classmethod
    def of(
        cls,
        module: Any,
        *,
        kinds: LayerKinds,
        groups: Groups,
        rotary_width: int,
        order_d: Tensor | None,
        copies: WeightCopies,
    ) -> Layer:
        """Take the weights of a layer's modules.

        order_d: of the numbers of queries and keys, `paired_order`; None: as they are stored.
        """
        attention, mlp, config = module.self_attention, module.mlp, module.config
        rotation = kinds.layers[module.layer_number - 1].rotation
        if isinstance(mlp, MoELayer):
            shared = mlp.shared_experts
            feed_forward: FeedForward | ExpertLayer = ExpertLayer.of(
                mlp, None if shared is None else FeedForward.of(shared, copies), groups=groups
            )
            own_norm = _norm(module.pre_mlp_layernorm, config)
            assert own_norm is not None
            first_norm = own_norm
        else:
            assert isinstance(mlp, MLP), type(mlp)
            feed_forward = FeedForward.of(mlp, copies)
            first_norm = _norm_before(module.pre_mlp_layernorm, mlp.linear_fc1, config)
        ranks, kv_heads = groups.tensor.size(), config.num_query_groups
        own_groups = max(1, kv_heads // ranks)
        queries = config.num_attention_heads // ranks // own_groups
        query_norm = _norm(attention.q_layernorm, config)
        return cls(
            core=Core.of(attention.core_attention),
            attention_norm=_norm_before(module.input_layernorm, attention.linear_qkv, config),
            mixed=_mixed(attention.linear_qkv, order_d, own_groups, copies),
            head_norm=HeadNorm.of(
                query_norm, _norm(attention.k_layernorm, config), queries, order_d
            ),
            output=Linear.of(attention.linear_proj, copies),
            attention_post_norm=_norm(attention.post_norm, config),
            feed_forward_norm=first_norm,
            feed_forward=feed_forward,
            feed_forward_post_norm=_norm(getattr(mlp, "post_norm", None), config),
            groups=groups,
            share=ranks // kv_heads,
            queries=queries,
            keys=KeyShape(own_groups, config.kv_channels, attention.core_attention.window),
            plane=None if rotation is None else kinds.rotations.index(rotation),
            rotary_width=rotary_width,
        )

    def __call__(
        self, hidden_NH: Tensor, rotations: Sequence[RotaryPlanes], attend: AttentionFunction
    ) -> Tensor:
        """Return the hidden state after the layer, in place; `attend`: `Step.attend` of this layer.

        Collective: tensor group, two all-reduces of H numbers per position, plus those of experts.
        """
        heads = self._heads(self.attention_norm(hidden_NH), rotations)
        query, pair = heads.split_with_sizes([self.queries, 2], 2)
        attended = attend(query, pair).flatten(1)
        self._add_(hidden_NH, attended, self.output, self.attention_post_norm)
        x_NH = self.feed_forward_norm(hidden_NH)
        if isinstance(self.feed_forward, FeedForward):
            inner = self.feed_forward.inner(x_NH)
            self._add_(hidden_NH, inner, self.feed_forward.second, self.feed_forward_post_norm)
            return hidden_NH
        update = self.feed_forward(x_NH)
        if self.feed_forward_post_norm is not None:
            update = self.feed_forward_post_norm(update)
        return hidden_NH.add_(update)

    def _add_(
        self, hidden_NH: Tensor, x: Tensor, linear: Linear, norm: GenerationNorm | None
    ) -> None:
        """Add the product of x to the hidden state: the sum over tensor ranks, bias and norm."""
        if norm is None and self.groups.tensor.size() == 1:
            linear.add_(hidden_NH, x)
            return
        update = summed(linear.product(x), self.groups.tensor)
        if linear.bias is not None:
            update.add_(linear.bias)
        hidden_NH.add_(update if norm is None else norm(update))

    def _heads(self, x_NH: Tensor, rotations: Sequence[RotaryPlanes]) -> Tensor:
        """Return queries, key and value [N, g, r + 2, d], the first two normalised and rotated."""
        mixed = self.mixed(x_NH)
        if self.share > 1:
            mixed = self._of_group(mixed)
        heads = mixed.view(mixed.shape[0], self.keys.heads, -1, self.keys.head_size)
        if self.share > 1:  # this rank's queries of the group, its key and its value
            start = self.groups.tensor.rank() % self.share * self.queries
            own = heads[:, :, start : start + self.queries]
            heads = torch.cat([own, heads[:, :, -2:]], 2)
        both = heads.narrow(2, 0, self.queries + 1)
        found = both if self.head_norm is None else self.head_norm(both)
        if self.plane is not None:
            rotate_(found, rotations[self.plane], self.rotary_width, out=both)
        elif found is not both:
            both.copy_(found)
        return heads

    def _of_group(self, mixed: Tensor) -> Tensor:
        """Return the queries, key and value of the group that this rank has a share of.

        With fewer key-value heads than tensor ranks, a rank's rows of the weight are a slice of
        them. Collective: tensor group, one all-gather of the row.
        """
        ranks = [torch.empty_like(mixed) for _ in range(self.groups.tensor.size())]
        dist.all_gather(ranks, mixed.contiguous(), group=self.groups.tensor)
        first = self.groups.tensor.rank() // self.share * self.share
        return torch.cat(ranks[first : first + self.share], -1)
