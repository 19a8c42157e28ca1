"""Products, bytes and calls of the loss of one pair of layers, as `losses.features` computes it.

The gradient computes the loss again, block by block. Bytes are those that its operations read and
write besides the products, and calls those of torch. N tokens of this rank; projector sizes from
the student's through the inner ones to the teacher's. Maps: s queries of this rank, S keys, b
sequences, n heads and g key-value heads of this rank, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Final

from megatron_distill.planning.operations import Rank

__all__ = [
    "TOUCHED",
    "Heads",
    "PairWork",
    "PassWork",
    "Product",
    "map_blocks",
    "map_work",
    "state_work",
]

# Bytes that the operations of torch touch in the element-wise work of a layer, by which a CPU's
# memory is measured, over those that a plan counts for it.
TOUCHED: Final = 2.76
_FP32: Final = 4
# Numbers of a hidden state, and bytes of scores, of one block: `losses.features`.
_BLOCK_NUMBERS: Final = 2**23
_BLOCK_BYTES: Final = 64 * 2**20
# Bytes of a number of the teacher's state in fp32 or fp64, in the value and more in the gradient;
# kernels and calls of a block in the value, and in the gradient.
_OF_LOSS: Final = {"mse": (24, 32, 5, 13, 62, 108), "cosine": (104, 200, 10, 34, 77, 138)}
# Calls of the projector's mask, and of one matrix; of a matrix whose precision changes; and of a
# state whose precision does. In the value, and in the gradient.
_MASK_CALLS: Final = (11, 15)
_MATRIX_CALLS: Final = (13, 38)
_CAST_MATRIX_CALLS: Final = (6, 14)
_CAST_CALLS: Final = (6, 10)
# Bytes of a score of one head, and more with a soft cap; more in the student's gradient.
_SCORE: Final = 28
_CAPPED: Final = 24
_SCORE_GRADIENT, _CAPPED_GRADIENT = 51 - _SCORE, 28
# Bytes of a number of the mean map, kernels and calls of a block, in the value and the gradient.
_MAP: Final = (254, 382)
_MAP_KERNELS: Final = (22, 45)
_MAP_CALLS: Final = (219, 340)
_CAST_MAP_CALLS: Final = (12, 19)


@dataclass(frozen=True)
class Product:
    """`count` products [rows, inner] times [inner, columns]; in fp32, or in the run's precision."""

    rows: float
    inner: float
    columns: float
    count: float = 1.0
    in_fp32: bool = False

    @property
    def flops(self) -> float:
        """Operations of all of them."""
        return 2.0 * self.rows * self.inner * self.columns * self.count

    def seconds(self, rank: Rank) -> float:
        """Return their time on a rank."""
        rank = replace(rank, precision="fp32") if self.in_fp32 else rank
        return rank.product(self.rows, self.inner, self.columns, count=self.count)


@dataclass(frozen=True)
class PassWork:
    """The work of one pass of a micro-batch on one rank."""

    products: tuple[Product, ...]
    byte_count: float
    kernels: int
    calls: int

    @property
    def flops(self) -> float:
        """Operations of the products."""
        return sum(product.flops for product in self.products)

    def seconds(self, rank: Rank) -> float:
        """Return the time on a rank; on a CPU with its calls, and at the rate of its layers."""
        seconds = sum(product.seconds(rank) for product in self.products)
        elements = rank.passes(self.byte_count, kernels=self.kernels)
        if rank.device.kind != "cpu":
            return seconds + elements
        return seconds + elements / TOUCHED + self.calls * rank.device.kernel_us * 1e-6


@dataclass(frozen=True)
class PairWork:
    """The work of a pair's loss, and of its gradient in the backward pass."""

    value: PassWork
    gradient: PassWork


def state_work(loss: str, tokens: float, sizes: Sequence[int], *, width: int) -> PairWork:
    """Return the work of a loss between hidden states.

    loss: `mse` or `cosine`. tokens: N. sizes: of the student's state, the projector's inner one
    and the teacher's state; one alone: there is no projector. width: bytes of a number.
    """
    once, more, kernels, gradient_kernels, calls, gradient_calls = _OF_LOSS[loss]
    student, teacher, steps = sizes[0], sizes[-1], list(pairwise(sizes))
    cast = _FP32 + width if width < _FP32 else 0  # reads one and writes the other
    parameters = sum(fan_in * fan_out + fan_out for fan_in, fan_out in steps)
    within = sum(sizes[1:-1])
    blocks = ceil(tokens / max(1, _BLOCK_NUMBERS // max(student, teacher)))
    # Both states masked and, in bf16, converted.
    value = tokens * teacher * (2 * 2 * width + 2 * cast + once)
    gradient = value + tokens * teacher * (more + cast + 2 * width)
    # Written to the whole and added to the gradient that comes back.
    gradient += tokens * student * (2 + 3) * width
    counts = [kernels, gradient_kernels]
    made = [calls, gradient_calls]
    if steps:
        masked, activated = tokens * student * 2 * width, tokens * within * 2 * width
        value += masked + activated + blocks * parameters * cast
        biases = tokens * (within + teacher) * width
        gradient += 2 * masked + 2.5 * activated + biases
        gradient += blocks * parameters * (2 * cast + 3 * _FP32)
        for place in (0, 1):
            counts[place] += len(steps) * (2, 6)[place]
            made[place] += _MASK_CALLS[place] + len(steps) * _MATRIX_CALLS[place]
    if cast:
        for place in (0, 1):
            made[place] += _CAST_CALLS[place] + len(steps) * _CAST_MATRIX_CALLS[place]
    ahead = tuple(Product(tokens / blocks, fan_in, fan_out, blocks) for fan_in, fan_out in steps)
    back = tuple(
        one
        for fan_in, fan_out in steps
        for one in (
            Product(tokens / blocks, fan_out, fan_in, blocks),  # of the input
            Product(fan_out, tokens / blocks, fan_in, blocks),  # of the weight
        )
    )
    return PairWork(
        PassWork(ahead, value, blocks * counts[0], blocks * made[0]),
        PassWork(ahead + back, gradient, blocks * counts[1], blocks * made[1]),
    )


@dataclass(frozen=True)
class Heads:
    """The heads of one model's attention on a rank."""

    queries: int
    groups: int
    size: int
    is_capped: bool = False


@dataclass(frozen=True)
class Blocks:
    """Blocks of queries: how many, the sum of the keys of each, and of queries times keys."""

    count: int
    keys: float
    scores: float


def map_blocks(heads: int, batch: int, length: int, context: int) -> Blocks:
    """Return the blocks of the first context rank's queries in sequences of `length`.

    A block has the keys up to the last one that a query sees, whatever the documents. The rank has
    the first and the last of 2 `context` parts of a sequence; others have no more scores.
    """
    queries, part = length // context, length // (2 * context)
    rows = max(1, _BLOCK_BYTES // (_FP32 * heads * batch * length))
    whole, early = queries // rows, part // rows
    gap = length - queries  # of positions between both parts
    # Block i of 1, 2, ... ends before row i times `rows`.
    keys = rows * whole * (whole + 1) / 2 + gap * (whole - early)
    rest = queries - whole * rows
    return Blocks(whole + (rest > 0), keys + (rest > 0) * length, rows * keys + rest * length)


def map_work(
    student: Heads, teacher: Heads, *, batch: int, length: int, context: int, width: int
) -> PairWork:
    """Return the work of a loss between attention maps; b, S and the ranks that share sequences."""
    blocks = map_blocks(max(student.queries, teacher.queries), batch, length, context)
    queries, maps = batch * length / context, batch * blocks.scores

    def scores(heads: Heads) -> tuple[Product, float]:
        """Return the product of queries and keys, and the bytes of one computation of the map."""
        product = Product(
            queries / blocks.count * heads.queries,
            heads.size,
            blocks.scores * context / length,
            blocks.count,
            in_fp32=True,
        )
        cast = _FP32 + width if width < _FP32 else 0
        byte_count = heads.queries * maps * (_SCORE + _CAPPED * heads.is_capped)
        # Masked, and a copy of the keys for every head of a group, which the product reads.
        byte_count += queries * heads.queries * heads.size * (2 * width + cast)
        of_keys = heads.groups * (_FP32 + cast) + heads.queries * _FP32
        return product, byte_count + batch * blocks.keys * heads.size * of_keys

    (own, own_bytes), (theirs, their_bytes) = scores(student), scores(teacher)
    value = own_bytes + their_bytes + maps * _MAP[0]
    capped = _CAPPED_GRADIENT * student.is_capped
    gradient = own_bytes + their_bytes + maps * _MAP[1]
    gradient += student.queries * maps * (_SCORE_GRADIENT + capped)
    cast = _FP32 + width if width < _FP32 else 0
    gradient += queries * student.queries * student.size * (4 * width + cast + 3 * width)
    # The gradient of every head's copy is summed, and that of all keys added once for a block.
    summed = batch * blocks.keys * student.queries * _FP32
    added = batch * blocks.count * length * student.groups * 4 * _FP32
    gradient += student.size * (summed + added)
    calls = [
        blocks.count * (made + (more if width < _FP32 else 0))
        for made, more in zip(_MAP_CALLS, _CAST_MAP_CALLS, strict=True)
    ]
    kernels = [blocks.count * each for each in _MAP_KERNELS]
    of_query = replace(own, inner=own.columns, columns=own.inner)
    # Of all heads alike: [d, q] times [q, K] of each is as much as [q, K] times [K, d].
    return PairWork(
        PassWork((own, theirs), value, kernels[0], calls[0]),
        PassWork((own, theirs, of_query, of_query), gradient, kernels[1], calls[1]),
    )
