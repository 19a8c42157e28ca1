"""The tensors of a GPT, by the names and shapes that every layout, and a checkpoint, agree on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from megatron_distill.models.architecture import Architecture

Place = tuple[int, ...]  # (), (layer,) or (layer, expert)


@dataclass(frozen=True)
class Parameter:
    """A global tensor, whole: `shape` is that of one layer and one expert.

    key: as in a sharded checkpoint, whether Transformer Engine or torch computes the layer. Its
    tensor there has an axis for the layers and one for the experts in front, where there are such.
    """

    key: str
    shape: tuple[int, ...]
    per_layer: bool = False
    per_expert: bool = False
    is_vocabulary: bool = False  # rows are tokens, without padding here

    def leading_shape(self, architecture: Architecture) -> tuple[int, ...]:
        """Return the sizes of the axes of layers and experts."""
        sizes: tuple[int, ...] = (architecture.num_layers,) if self.per_layer else ()
        if self.per_expert:
            assert architecture.moe is not None
            sizes += (architecture.moe.num_experts,)
        return sizes


def placed(architecture: Architecture) -> Iterator[tuple[Parameter, Place]]:
    """Yield every tensor of every layer and expert, layer by layer, with its place."""
    everything = parameters(architecture)
    first_layer = next(i for i, parameter in enumerate(everything) if parameter.per_layer)
    layers = [parameter for parameter in everything if parameter.per_layer]
    for parameter in everything[:first_layer]:
        yield parameter, ()
    for layer in range(architecture.num_layers):
        for parameter in layers:
            for inner in _indices(parameter.leading_shape(architecture)[1:]):
                yield parameter, (layer, *inner)
    for parameter in everything[first_layer + len(layers) :]:
        yield parameter, ()


def places(parameter: Parameter, architecture: Architecture) -> Iterator[Place]:
    """Yield every layer and expert that has a tensor of this name."""
    return _indices(parameter.leading_shape(architecture))


def _indices(sizes: Sequence[int]) -> Iterator[Place]:
    return product(*map(range, sizes))


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
    width, inner = architecture.hidden_size, architecture.ffn_hidden_size
    prefix, per_expert = "decoder.layers.mlp.", architecture.moe is not None
    yield from _norm(f"{prefix}linear_fc1.layer_norm_", architecture)
    if architecture.moe is not None:
        experts = architecture.moe.num_experts
        yield Parameter(f"{prefix}router.weight", (experts, width), per_layer=True)
        prefix, inner = f"{prefix}experts.experts.", architecture.moe.ffn_hidden_size
    first = inner * (2 if architecture.is_gated else 1)
    for name, shape in (("linear_fc1", (first, width)), ("linear_fc2", (width, inner))):
        yield Parameter(f"{prefix}{name}.weight", shape, per_layer=True, per_expert=per_expert)
        if architecture.linear_bias:
            bias = f"{prefix}{name}.bias"
            yield Parameter(bias, shape[:1], per_layer=True, per_expert=per_expert)
    if architecture.post_norms:
        yield from _norm("decoder.layers.mlp.post_norm.", architecture)


def _norm(
    prefix: str, architecture: Architecture, *, size: int | None = None, per_layer: bool = True
) -> Iterator[Parameter]:
    shape = (architecture.hidden_size if size is None else size,)
    yield Parameter(f"{prefix}weight", shape, per_layer=per_layer)
    if architecture.norm == "layernorm":
        yield Parameter(f"{prefix}bias", shape, per_layer=per_layer)
