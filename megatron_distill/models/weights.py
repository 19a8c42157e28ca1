"""Initial weights, from a source or at random; every rank fills only its slices.

Random weights are a function of the seed, the parameter's name and the place of a tile in it,
independent of the layout. A sharded checkpoint describes every local tensor by its position in a
global one; a rank draws the tiles of the random tensor that its window touches. So a model under
any tensor, pipeline, virtual pipeline or expert layout starts from the same weights.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer import MegatronModule
from torch import Tensor

from megatron_distill.models.architecture import Architecture, MixtureOfExperts
from megatron_distill.runtime.groups import Groups


class WeightSource(Protocol):
    """A source of a model's global tensors by their names in sharded checkpoints."""

    def read_into(
        self, destination: Tensor, key: str, place: LayerIndex, start: Sequence[int]
    ) -> None:
        """Copy a window of the tensor at `place` (layer, expert) into `destination`.

        `start` is the window's first row and column. Rows past the real vocabulary become zero.
        """
        ...

    def read(
        self, key: str, place: LayerIndex, start: Sequence[int], shape: tuple[int, ...]
    ) -> Tensor | None:
        """Return a window as a memory-mapped view of one file, or None if not contiguous there.

        The window has real rows only.
        """
        ...


class WindowReader:
    """Temporary windows of a source: views of a file, or assembled in one reused buffer.

    The buffer is reused because the first touch of new memory is slow.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(
        self,
        key: str,
        place: LayerIndex,
        start: Sequence[int],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return a read-only window in `dtype`, valid until the next read."""
        found = self._source.read(key, place, start, shape)
        if found is not None and found.dtype == dtype:
            return found
        count = torch.Size(shape).numel() * dtype.itemsize
        if self._buffer.numel() < count:
            self._buffer = torch.empty(count, dtype=torch.uint8)
        window = self._buffer[:count].view(dtype).view(shape)
        self._source.read_into(window, key, place, start)
        return window


@torch.no_grad()
def fill(
    chunks: Sequence[torch.nn.Module],
    source: WeightSource,
    *,
    groups: Groups,
    keep_layers: Sequence[int] | None = None,
) -> None:
    """Fill every parameter in place, in any layout.

    `keep_layers`: for each of our layers, the source layer of its initial weights.
    """
    for part in sharded_tensors(chunks, groups):
        read_part(part, source, keep_layers=keep_layers)


def read_part(
    part: ShardedTensor, source: WeightSource, *, keep_layers: Sequence[int] | None
) -> None:
    """Fill one part of a tensor; `keep_layers` as in `fill`."""
    assert part.data is not None
    key, place = _named_place(part)
    if place and keep_layers is not None:
        place = (keep_layers[place[0]], *place[1:])
    source.read_into(part.data, key, place, part.global_offset[part.prepend_axis_num :])


LayerIndex = tuple[int, ...]  # (), (layer,) or (layer, expert)


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
        return self.key.replace(_LAYERS, f"{_LAYERS}{place[0]}.", 1), place[1:]

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


_LAYERS = "decoder.layers."
_LAYER_KEY = re.compile(rf"({re.escape(_LAYERS)})(\d+)\.(.+)")


def _named_place(part: ShardedTensor) -> tuple[str, LayerIndex]:
    """Return the name of a tensor of the model and its place, from its part of a checkpoint."""
    index = part.global_offset[: part.prepend_axis_num]
    found = _LAYER_KEY.fullmatch(part.key)
    if found is None:
        return part.key, index
    return found[1] + found[3], (int(found[2]), *index)


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


# Of the router, fp32 in models of every precision.
EXPERT_BIAS = "router.expert_bias"


def converted_dtype(key: str, own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor after a conversion to `wanted`; None: its own.

    The router's bias stays as it is, because it is fp32 in models of every precision.
    """
    return own if wanted is None or key.endswith(EXPERT_BIAS) else wanted


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


# Projections into the residual stream start smaller (GPT-2, section 2.3).
_RESIDUAL_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")
_VOCABULARY_TENSORS = ("word_embeddings.weight", "output_layer.weight")


def sharded_parameters(
    chunks: Sequence[torch.nn.Module], groups: Groups
) -> Iterator[tuple[Tensor, list[ShardedTensor]]]:
    """Yield every tensor of the model on this rank, with the sharding description of its parts.

    Most tensors are one part; gate and up projection are one tensor and two parts.
    """
    for chunk in chunks:
        for value in described_tensors(chunk, groups):
            yield value.data, parts_of(value)


def described_tensors(
    chunk: torch.nn.Module, groups: Groups
) -> list[ShardedTensor | ShardedTensorFactory]:
    """Return the sharding description of every tensor of a chunk, by shape alone."""
    state = cast(MegatronModule, chunk).sharded_state_dict(
        metadata={"dp_cp_group": groups.data_context}
    )
    kinds = (ShardedTensor, ShardedTensorFactory)
    return [value for value in nested_values(state) if isinstance(value, kinds)]


def parts_of(value: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """Return the parts of a described tensor, which refer to its memory."""
    parts = value.build() if isinstance(value, ShardedTensorFactory) else value
    return [part for part in nested_values({"part": parts}) if isinstance(part, ShardedTensor)]


def sharded_tensors(chunks: Sequence[torch.nn.Module], groups: Groups) -> Iterator[ShardedTensor]:
    """Yield the sharding description of every part of every tensor of the model on this rank."""
    for _, parts in sharded_parameters(chunks, groups):
        yield from parts


@torch.no_grad()
def initialise(
    chunks: Sequence[torch.nn.Module], architecture: Architecture, *, seed: int, groups: Groups
) -> None:
    """Fill every parameter in place; padded vocabulary rows become zero.

    Extra memory: `_TILE` rows of a local tensor at a time.
    """
    for part in sharded_tensors(chunks, groups):
        initialise_part(part, architecture, seed=seed)


def initialise_part(part: ShardedTensor, architecture: Architecture, *, seed: int) -> None:
    """Fill one part of a tensor as `initialise` does."""
    assert part.data is not None
    assert part.flattened_range is None
    layers = part.prepend_axis_num
    key = part.key
    if key.endswith("bias"):
        part.data.zero_()
    elif "norm" in key:
        part.data.fill_(0.0 if architecture.is_zero_centered else 1.0)
    else:
        std = architecture.init_std
        if key.endswith(_RESIDUAL_PROJECTIONS):
            std /= math.sqrt(2.0 * architecture.num_layers)
        name = f"{seed}/{key}/{'.'.join(map(str, part.global_offset[:layers]))}"
        row, column = part.global_offset[layers:]
        vocabulary = architecture.vocab_size if key.endswith(_VOCABULARY_TENSORS) else None
        _fill_random(part.data, name, row, column, std=std, end=vocabulary)


def _fill_random(
    window: Tensor, name: str, row: int, column: int, *, std: float, end: int | None
) -> None:
    """Fill `window [rows, columns]` with its part of a random matrix, from `row` and `column` on.

    Rows from `end` on are zero.
    """
    stop = row + window.shape[0]
    drawn = stop if end is None else min(stop, end)
    window[max(drawn - row, 0) :].zero_()
    if drawn <= row:  # a rank of padding alone
        return
    for first in range(row - row % _TILE, drawn, _TILE):
        top, bottom = max(first, row), min(first + _TILE, drawn)
        rows = random_rows(name, (top, bottom), (column, column + window.shape[1]))
        window[top - row : bottom - row].copy_(rows.mul_(std))


# A tile is seeded by itself. Large enough that seeding costs little, small beside a matrix.
_TILE = 256


def random_rows(name: str, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    """Return a window of the standard normal matrix of a name, fp32; `rows` are of one tile.

    The matrix has no end, so neither padding nor a layout changes it.
    """
    (top, bottom), (left, right) = rows, columns
    first = top - top % _TILE
    assert bottom <= first + _TILE, rows
    window = torch.empty(bottom - top, right - left)
    for start in range(left - left % _TILE, right, _TILE):
        digest = hashlib.sha256(f"{name}/{first // _TILE}.{start // _TILE}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        tile = torch.randn(_TILE, _TILE, generator=generator)
        begin, stop = max(start, left), min(start + _TILE, right)
        window[:, begin - left : stop - left] = tile[
            top - first : bottom - first, begin - start : stop - start
        ]
    return window
