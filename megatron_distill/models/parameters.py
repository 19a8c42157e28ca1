"""The tensors of a model by their names in checkpoints, and their numbers on a rank, by shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Final

from megatron_distill.models.architecture import Architecture, MixtureOfExperts
from megatron_distill.runtime.layout import Layout

__all__ = [
    "EXPERT_BIAS",
    "LAYERS",
    "LAYERS_AT_ONCE",
    "LayerIndex",
    "Parameter",
    "WeightsOfRank",
    "parameters",
    "placed",
    "places",
    "weights_of_rank",
]

LayerIndex = tuple[int, ...]  # (), (layer,) or (layer, expert)


LAYERS = "decoder.layers."


# Of the router, fp32 in models of every precision.
EXPERT_BIAS = "router.expert_bias"


@dataclass(frozen=True)
class Parameter:
    """A global tensor; `shape` is that of one layer and one expert.

    key: its name, the same for Transformer Engine and torch. layers: those that have it, of a
    tensor `per_layer`; None: all.
    """

    key: str
    shape: tuple[int, ...]
    per_layer: bool = False
    per_expert: bool = False
    is_vocabulary: bool = False  # rows of the vocabulary, without padding here
    layers: tuple[int, ...] | None = None

    def is_in(self, layer: int) -> bool:
        """Whether a layer has this tensor."""
        return self.layers is None or layer in self.layers

    def stored(self, place: LayerIndex, architecture: Architecture) -> tuple[str, LayerIndex]:
        """Return its key in a sharded checkpoint, and its index along the leading axes there.

        Megatron-Core stacks the layers of a tensor where all layers have the same tensors.
        Otherwise the number of the layer is a part of the key.
        """
        if not self.per_layer or not architecture.has_mixed_layers:
            return self.key, place
        return self.key.replace(LAYERS, f"{LAYERS}{place[0]}.", 1), place[1:]

    def stored_keys(self, architecture: Architecture) -> tuple[str, ...]:
        """Return the keys of its tensors in a sharded checkpoint."""
        return tuple({self.stored(at, architecture)[0]: None for at in places(self, architecture)})

    def leading_shape(self, architecture: Architecture) -> tuple[int, ...]:
        """Return the sizes of the axes of layers and experts in a sharded checkpoint."""
        stacked = self.per_layer and not architecture.has_mixed_layers
        sizes: tuple[int, ...] = (architecture.num_layers,) if stacked else ()
        return sizes + self.expert_shape(architecture)

    def expert_shape(self, architecture: Architecture) -> tuple[int, ...]:
        """Return the size of the axis of experts, if there is one."""
        if not self.per_expert:
            return ()
        assert architecture.moe is not None
        return (architecture.moe.num_experts,)


def placed(architecture: Architecture) -> Iterator[tuple[Parameter, LayerIndex]]:
    """Yield every tensor of every layer and expert, layer by layer, with its place."""
    everything = parameters(architecture)
    first_layer = next(i for i, parameter in enumerate(everything) if parameter.per_layer)
    layers = [parameter for parameter in everything if parameter.per_layer]
    for parameter in everything[:first_layer]:
        yield parameter, ()
    for layer in range(architecture.num_layers):
        for parameter in layers:
            if parameter.is_in(layer):
                for expert in product(*map(range, parameter.expert_shape(architecture))):
                    yield parameter, (layer, *expert)
    for parameter in everything[first_layer + len(layers) :]:
        yield parameter, ()


def places(parameter: Parameter, architecture: Architecture) -> Iterator[LayerIndex]:
    """Yield every layer and expert that has a tensor of this name."""
    experts = map(range, parameter.expert_shape(architecture))
    if not parameter.per_layer:
        return product(*experts)
    layers = range(architecture.num_layers) if parameter.layers is None else parameter.layers
    return product(layers, *experts)


def parameters(architecture: Architecture) -> tuple[Parameter, ...]:
    """Return every tensor of a model, in the order of its computation."""
    return (
        *_embeddings(architecture),
        *_attention(architecture),
        *_feed_forward(architecture),
        *_norm("decoder.final_layernorm.", architecture, per_layer=False),
        *_head(architecture),
    )


def _embeddings(architecture: Architecture) -> Iterator[Parameter]:
    width = architecture.hidden_size
    yield Parameter(
        "embedding.word_embeddings.weight", (architecture.vocab_size, width), is_vocabulary=True
    )
    if architecture.positions == "learned":
        positions = architecture.max_position_embeddings
        yield Parameter("embedding.position_embeddings.weight", (positions, width))


def _head(architecture: Architecture) -> Iterator[Parameter]:
    if not architecture.tied_embeddings:
        shape = (architecture.vocab_size, architecture.hidden_size)
        yield Parameter("output_layer.weight", shape, is_vocabulary=True)


def _attention(architecture: Architecture) -> Iterator[Parameter]:
    width, head = architecture.hidden_size, architecture.head_size
    queries = architecture.num_attention_heads * head
    projected = queries + 2 * architecture.num_kv_heads * head
    prefix = "decoder.layers.self_attention."
    yield from _norm(f"{prefix}linear_qkv.layer_norm_", architecture)
    yield Parameter(f"{prefix}linear_qkv.weight", (projected, width), per_layer=True)
    if architecture.qkv_bias:
        yield Parameter(f"{prefix}linear_qkv.bias", (projected,), per_layer=True)
    if architecture.qk_norm:
        yield from _norm(f"{prefix}q_layernorm.", architecture, size=head)
        yield from _norm(f"{prefix}k_layernorm.", architecture, size=head)
    yield Parameter(f"{prefix}linear_proj.weight", (width, queries), per_layer=True)
    if architecture.linear_bias:
        yield Parameter(f"{prefix}linear_proj.bias", (width,), per_layer=True)
    if architecture.post_norms:
        yield from _norm(f"{prefix}post_norm.", architecture)


def _feed_forward(architecture: Architecture) -> Iterator[Parameter]:
    prefix, moe, dense = "decoder.layers.mlp.", architecture.moe, architecture.ffn_hidden_size
    yield from _norm(f"{prefix}linear_fc1.layer_norm_", architecture)
    if moe is None:
        yield from _mlp(prefix, dense, architecture)
    else:
        if moe.dense_layers:
            yield from _mlp(prefix, dense, architecture, layers=moe.dense_layers)
        yield from _mixture(prefix, moe, architecture)
    if architecture.post_norms:
        yield from _norm("decoder.layers.mlp.post_norm.", architecture)


def _mixture(prefix: str, moe: MixtureOfExperts, architecture: Architecture) -> Iterator[Parameter]:
    width, experts = architecture.hidden_size, moe.num_experts
    layers = architecture.expert_layers if moe.dense_layers else None
    yield Parameter(f"{prefix}router.weight", (experts, width), per_layer=True, layers=layers)
    if moe.correction_bias:
        yield Parameter(f"{prefix}{EXPERT_BIAS}", (experts,), per_layer=True, layers=layers)
    yield from _mlp(
        f"{prefix}experts.experts.",
        moe.ffn_hidden_size,
        architecture,
        per_expert=True,
        layers=layers,
    )
    if moe.shared_ffn_hidden_size is not None:
        shared = f"{prefix}shared_experts."
        yield from _mlp(shared, moe.shared_ffn_hidden_size, architecture, layers=layers)
        if moe.shared_gate:
            yield Parameter(f"{shared}gate_weight", (1, width), per_layer=True, layers=layers)


def _mlp(
    prefix: str,
    inner: int,
    architecture: Architecture,
    *,
    per_expert: bool = False,
    layers: tuple[int, ...] | None = None,
) -> Iterator[Parameter]:
    width = architecture.hidden_size
    first = inner * (2 if architecture.is_gated else 1)
    for name, shape in (("linear_fc1", (first, width)), ("linear_fc2", (width, inner))):
        sizes: dict[str, tuple[int, ...]] = {"weight": shape}
        if architecture.linear_bias:
            sizes["bias"] = shape[:1]
        for kind, size in sizes.items():
            yield Parameter(
                f"{prefix}{name}.{kind}", size, per_layer=True, per_expert=per_expert, layers=layers
            )


def _norm(
    prefix: str, architecture: Architecture, *, size: int | None = None, per_layer: bool = True
) -> Iterator[Parameter]:
    shape = (architecture.hidden_size if size is None else size,)
    yield Parameter(f"{prefix}weight", shape, per_layer=per_layer)
    if architecture.norm == "layernorm":
        yield Parameter(f"{prefix}bias", shape, per_layer=per_layer)


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
