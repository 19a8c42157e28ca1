"""Parameters of each pipeline rank, exactly, from a model's shape and layout; nothing is built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from math import lcm, prod
from typing import Final

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.parameters import EXPERT_BIAS, Parameter, parameters
from megatron_distill.runtime.layout import Layout

__all__ = [
    "Bucket",
    "RankNumbers",
    "adam_numbers",
    "bucket_ranks",
    "dividing",
    "fullest_state",
    "stage_numbers",
]

# Numbers at whose multiples the distributed optimizer begins each tensor in its buffers.
_TENSOR_START: Final = 64
# Numbers, and ranks that share them, at whose multiples Megatron's buckets end.
_BUCKET_END: Final = 128
# Bytes in which Adam counts the steps of each tensor.
_COUNTER: Final = 4
# Tensors that the tensor-parallel ranks share; every other one is whole on each.
_CUT: Final = (
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_proj.weight",
    "linear_fc1.weight",
    "linear_fc1.bias",
    "linear_fc2.weight",
)


# Tensors of a layer by a part of their keys, in the order of the modules that a layer makes.
_MADE: Final = (
    "linear_qkv.layer_norm_",
    "linear_proj.",
    "linear_qkv.",
    "q_layernorm.",
    "k_layernorm.",
    "self_attention.post_norm.",
    "linear_fc1.layer_norm_",
    "mlp.router.",
    "mlp.experts.",
    "shared_experts.gate_weight",
    "shared_experts.",
    "mlp.linear_fc",
    "mlp.post_norm.",
)


@dataclass(frozen=True)
class Bucket:
    """Tensors that lie in a row in one of Megatron's buffers, with gaps between them.

    sizes: of the tensors, in the order of the model; the buffer has the reverse. spaced: their sum
    with the gaps, without that at the end.
    """

    sizes: tuple[int, ...] = ()
    spaced: int = 0

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Bucket:
        """Return the bucket of these tensors."""
        # A layer has thousands of tensors of experts, of one size.
        return cls(tuple(sizes), sum(_aligned(one) * n for one, n in Counter(sizes).items()))

    @classmethod
    def joined(cls, parts: Sequence[Bucket]) -> Bucket:
        """Return one bucket of all parts in their order."""
        sizes = tuple(chain.from_iterable(part.sizes for part in parts))
        return cls(sizes, sum(part.spaced for part in parts))

    @cached_property  # thousands of tensors of experts, asked for once per choice
    def total(self) -> int:
        """The parameters, without gaps."""
        return sum(self.sizes)

    def held(self, ranks: int) -> int:
        """Return the numbers of the bucket where so many ranks share it, with all gaps."""
        end = lcm(ranks, _BUCKET_END)
        return -(-self.spaced // end) * end


@dataclass(frozen=True)
class RankNumbers:
    """Parameters on one rank; `experts` are those that an expert group divides.

    buckets: of both, for each chunk, and for a tied embedding in stages, which has one of its own.
    """

    dense: int
    experts: int
    largest_layer: int = 0
    buckets: tuple[tuple[Bucket, Bucket], ...] = ()

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts


def stage_numbers(
    shape: Architecture, layout: Layout, layers: tuple[int, ...], *, width: int = 2
) -> tuple[RankNumbers, ...]:
    """Return the parameters of a rank of each pipeline stage.

    layers: of each stage, virtual ones included, in the order of the forward pass. width: bytes of
    a weight, which decide whether the experts of a layer lie in tensors of all.
    """
    return _stage_numbers(shape, dividing(layout), layers, width)


@lru_cache(maxsize=4096)
def dividing(layout: Layout) -> Layout:
    """Return the layout with the sizes alone that divide parameters."""
    return Layout(layout.tensor, layout.pipeline, expert=layout.expert)


@lru_cache(maxsize=4096)
def _stage_numbers(
    shape: Architecture, layout: Layout, layers: tuple[int, ...], width: int
) -> tuple[RankNumbers, ...]:
    everything = parameters(shape)
    per_layer = _layers(shape, layout.tensor, layout.expert, width)
    first = _ends(shape, layout, everything, prefix="embedding.")
    last = _ends(shape, layout, everything, prefix="decoder.final_layernorm.")
    last += _ends(shape, layout, everything, prefix="output_layer.")
    tied: list[int] = []
    if shape.tied_embeddings and layout.pipeline > 1:
        # The last stage has a copy of the word embeddings, without the positions'.
        tied, first = first[:1], first[1:]
    found = []
    for rank in range(layout.pipeline):
        is_first, is_last = rank == 0, rank == layout.pipeline - 1
        buckets, largest = [], 0
        for stage in range(rank, len(layers), layout.pipeline):
            begin = sum(layers[:stage])
            own = per_layer[begin : begin + layers[stage]]
            largest = max([largest, *(dense.total + experts.total for dense, experts in own)])
            dense = [one for one, _ in own]
            if is_first and stage == rank:
                dense.insert(0, Bucket.of(first))
            if is_last and stage == len(layers) - 1:
                dense.append(Bucket.of(last))
            buckets.append((Bucket.joined(dense), Bucket.joined([one for _, one in own])))
        if tied and (is_first or is_last):
            buckets.append((Bucket.of(tied), Bucket()))
        dense_numbers, expert_numbers = (
            sum(both[kind].total for both in buckets) for kind in (0, 1)
        )
        found.append(RankNumbers(dense_numbers, expert_numbers, largest, tuple(buckets)))
    return tuple(found)


def fullest_state(
    numbers: RankNumbers, layout: Layout, *, ranks: int, state: int, is_distributed: bool
) -> int:
    """Return the most bytes that Adam keeps on one rank.

    The distributed optimizer cuts each bucket into equal parts, gaps included, for the ranks with
    the same weights. ranks: of the student. state: bytes of each parameter.
    """
    if not is_distributed:
        parts = [bucket for both in numbers.buckets for bucket in both]
        return state * numbers.total + _COUNTER * sum(len(bucket.sizes) for bucket in parts)
    return _fullest_shards(numbers.buckets, dividing(layout), ranks, state)


@lru_cache(maxsize=4096)
def _fullest_shards(
    buckets: tuple[tuple[Bucket, Bucket], ...], layout: Layout, ranks: int, state: int
) -> int:
    stage = ranks // layout.pipeline
    kinds = (stage // layout.tensor, layout.tensor), (stage // layout.expert, layout.expert)
    shards = [
        (_shards(bucket, count, state), width)
        for both in buckets
        for bucket, (count, width) in zip(both, kinds, strict=True)
        if bucket.sizes
    ]
    # Where a sum of them may differ from that of the rank before.
    changes = {
        rank
        for one, width in shards
        for shard in one.others
        for rank in (shard * width, (shard + 1) * width)
        if rank < stage
    }
    most = 0
    for rank in changes:
        total = 0
        for one, width in shards:
            shard = rank // width
            total += one.others.get(shard, one.within if shard < one.used else 0)
        most = max(most, total)
    return most


def bucket_ranks(numbers: RankNumbers, layout: Layout, *, ranks: int) -> list[tuple[Bucket, int]]:
    """Return each bucket of a rank with the number of ranks that have the same weights.

    ranks: of the student.
    """
    stage = ranks // layout.pipeline
    counts = stage // layout.tensor, stage // layout.expert
    return [pair for both in numbers.buckets for pair in zip(both, counts, strict=True)]


@lru_cache(maxsize=4096)
def adam_numbers(
    shape: Architecture,
    numbers: RankNumbers,
    layout: Layout,
    *,
    ranks: int,
    is_distributed: bool,
) -> int:
    """Return the most numbers that torch's AdamW makes at once on one rank without a fused kernel.

    Of each tensor, or its part on this rank, these are the root of the second moment and the
    quotient. That of the tensor before is in its variable. Vectors have groups of their own.
    """
    vectors = {
        part
        for one in parameters(shape)
        if len(one.shape) == 1
        for part in (one.shape[0], one.shape[0] // layout.tensor)
    }
    most = 0
    for bucket, count in bucket_ranks(numbers, layout, ranks=ranks):
        # The parts of a buffer begin with the last tensor; whole ones are in the model's order.
        sizes = bucket.sizes[::-1] if is_distributed else bucket.sizes
        size = bucket.held(count) // count if is_distributed else 0
        end, before = 0, Counter[int]()
        for one in sizes:
            begin = _aligned(end)
            end = begin + one
            if one in vectors:
                continue
            parts = range(begin // size, (end - 1) // size + 1) if size else range(1)
            for shard in parts:
                part = min(end, (shard + 1) * size) - max(begin, shard * size) if size else one
                most = max(most, 2 * part + before[shard])
                before[shard] = part
    return most


@dataclass(frozen=True)
class _Shards:
    """Adam's bytes of equal parts of a bucket.

    others: of those that are not within one tensor. used: parts before those that are empty.
    """

    within: int
    others: Mapping[int, int]
    used: int


@lru_cache(maxsize=256)
def _shards(bucket: Bucket, count: int, state: int) -> _Shards:
    """Return Adam's bytes of each of `count` equal parts of a bucket."""
    size, begin, end = bucket.held(count) // count, 0, 0
    found: Counter[int] = Counter()
    for numbers in reversed(bucket.sizes):  # a buffer begins with the last tensor
        begin = _aligned(end)
        end = begin + numbers
        first, last = begin // size, (end - 1) // size
        for shard in {first, last}:
            part = min(end, (shard + 1) * size) - max(begin, shard * size)
            found[shard] += state * part + _COUNTER
    return _Shards(state * size + _COUNTER, found, -(-end // size))


def _aligned(count: int) -> int:
    return -(-count // _TENSOR_START) * _TENSOR_START


@lru_cache(maxsize=256)
def _layers(
    shape: Architecture, tensor: int, expert: int, width: int
) -> list[tuple[Bucket, Bucket]]:
    """Return the tensors of every layer, dense ones and those of divided experts."""
    is_grouped = shape.groups_experts(width, tensor=1 if expert > 1 else tensor)
    sizes: list[tuple[list[int], list[int]]] = [([], []) for _ in range(shape.num_layers)]
    everything = parameters(shape)
    made = [one for one in everything if one.per_layer and not one.key.endswith(EXPERT_BIAS)]
    for parameter in sorted(made, key=_place):
        count = prod(parameter.shape)
        divided = parameter.per_expert and expert > 1
        if parameter.key.endswith(_CUT) and not divided:
            count //= tensor
        tensors = 1
        if parameter.per_expert:
            assert shape.moe is not None
            tensors = shape.moe.num_experts // expert
            if is_grouped:
                count, tensors = count * tensors, 1
        for layer in range(shape.num_layers):
            if parameter.is_in(layer):
                sizes[layer][divided].extend([count] * tensors)
    return [(Bucket.of(dense), Bucket.of(experts)) for dense, experts in sizes]


def _place(parameter: Parameter) -> int:
    return next(place for place, part in enumerate(_MADE) if part in parameter.key)


def _rows(shape: Architecture, layout: Layout) -> int:
    return shape.padded_vocab_size(layout.tensor) // layout.tensor


def _ends(
    shape: Architecture, layout: Layout, everything: Sequence[Parameter], *, prefix: str
) -> list[int]:
    return [
        _rows(shape, layout) * one.shape[1] if one.is_vocabulary else prod(one.shape)
        for one in everything
        if one.key.startswith(prefix)
    ]
