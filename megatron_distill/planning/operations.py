"""Seconds of the operations of a model's layers on one rank, from a device's rates.

A product takes its FLOPs over the device's peak and the share that products of this size reach.
Everything else takes its bytes over the memory's rate. One micro-batch, one rank; n tokens of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Final, Literal

from megatron_distill.models.architecture import Architecture
from megatron_distill.planning.curves import share
from megatron_distill.planning.device import (
    LONG_DOCUMENT,
    SCORED_DOCUMENT,
    DeviceProfile,
    Phase,
    Precision,
)
from megatron_distill.runtime.layout import Layout

__all__ = [
    "CALIBRATED_STUDENT",
    "CALIBRATED_TEACHER",
    "CALIBRATED_TOKENS",
    "CALLS_OF_LAYER",
    "LayerTimes",
    "Passes",
    "Rank",
    "Recomputed",
    "attended_positions",
    "element_seconds",
    "layer_kinds",
    "slice_of",
]

Recomputed = Literal["none", "selective", "full"]
# Backward of a fused attention computes the scores again: five products where forward has two.
_FUSED_BACKWARD: Final = 2.5
# Queries of a block of torch's attention on a CPU, by the least length of a document; and keys.
_QUERY_BLOCKS: Final = ((768, 256), (192, 64), (0, 32))
_KEY_BLOCK: Final = 512
# Calls of torch in one pass of a layer on a CPU, views and new tensors included. They run one after
# the other on one thread, however small the work is.
CALLS_OF_LAYER: Final = 340
# Layers of the run by whose steps `calibrate` refines a CPU, and its sequences of a micro-batch.
CALIBRATED_STUDENT, CALIBRATED_TEACHER = (
    Architecture(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=8,
        num_kv_heads=4,
        head_size=hidden // 8,
        vocab_size=20_480,
        max_position_embeddings=384,
    )
    for layers, hidden, ffn in ((3, 320, 864), (5, 448, 1216))
)
CALIBRATED_TOKENS: Final = 384, 2
_ONE_RANK: Final = Layout()
# Time of the slowest expert rank over the mean of all.
_IMBALANCE: Final = 1.2


@dataclass(frozen=True)
class Rank:
    """One rank of a layout on a device, and a micro-batch on it.

    Attributes:
        tokens: of the micro-batch on this rank.
        attended: mean number of positions that a token attends to, in layers without and with a
            sliding window.
        scores: whether attention writes its scores to memory, as before fused attention.
        overlapped: the share of the tensor-parallel messages that products hide.
    """

    device: DeviceProfile
    precision: Precision
    layout: Layout
    tokens: int
    attended: tuple[float, float]
    scores: bool = False
    overlapped: float = 0.0

    @property
    def width(self) -> int:
        """Bytes of one number of activations."""
        return 4 if self.precision == "fp32" else 2

    @property
    def element_width(self) -> int:
        """Bytes of one number of element-wise work, by which its time goes.

        A CPU converts bf16 to fp32 and back, which takes as long as fp32 does.
        """
        return 4 if self.device.kind == "cpu" else self.width

    def calls(self, count: float) -> float:
        """Return the time of so many calls of torch on a CPU; on a GPU kernels hide them."""
        return count * self.device.kernel_us * 1e-6 if self.device.kind == "cpu" else 0.0

    def calls_of_losses(self, count: float) -> float:
        """Return the time of so many calls in losses, whose code is evicted as that of layers."""
        evicted = self.device.layer_seconds("forward") / CALLS_OF_LAYER
        return self.calls(count) + count * evicted

    def product(self, rows: float, inner: float, columns: float, *, count: float = 1.0) -> float:
        """Return the time of `count` products [rows, inner] times [inner, columns]."""
        flops = 2.0 * rows * inner * columns
        if not flops:
            return 0.0
        device = self.device
        # An A100 has no FP8, a CPU neither: there the products are those of the next precision.
        instead: Precision | None = "bf16" if self.precision == "fp8" else None
        peak = device.peak_flops(self.precision, instead=instead)
        reached = share(device.product_efficiency, flops / 1e9)
        work = max(flops / (peak * reached), self._traffic(rows, inner, columns))
        return count * (work + device.kernel_us * 1e-6)

    def _traffic(self, rows: float, inner: float, columns: float) -> float:
        numbers = rows * inner + inner * columns + rows * columns
        return numbers * self.width / (self.device.memory_gb_per_s * 1e9)

    def passes(self, byte_count: float, *, kernels: int = 1) -> float:
        """Return the time of element-wise work that reads and writes `byte_count` in all."""
        return element_seconds(self.device, byte_count, kernels=kernels)

    @property
    def attention_peak(self) -> float:
        """The highest FLOP/s of attention's products.

        A CPU's attention computes in fp32 whatever it is given.
        """
        in_fp32 = self.precision == "fp32" or self.device.kind == "cpu"
        return self.device.peak_flops("fp32" if in_fp32 else "bf16")

    def fused_attention(
        self, flops: float, scores: float, *, backward: bool, is_long: bool = False
    ) -> float:
        """Return the time of a fused attention's products, and of the softmax of its scores.

        is_long: at the rates of long documents, which were measured.
        """
        device = self.device
        efficiency, score_ns = device.attention_efficiency, device.score_ns
        if is_long and device.long_attention_efficiency and device.long_score_ns:
            efficiency, score_ns = device.long_attention_efficiency, device.long_score_ns
        softmax = scores * score_ns[backward] * 1e-9
        products = flops / (self.attention_peak * efficiency[backward])
        return products + softmax + device.kernel_us * 1e-6


def element_seconds(device: DeviceProfile, byte_count: float, *, kernels: int = 1) -> float:
    """Return the time of element-wise work that reads and writes `byte_count` in all."""
    if not byte_count:
        return 0.0
    reached = share(device.memory_efficiency, byte_count / kernels / 1e6)
    return byte_count / (device.memory_gb_per_s * 1e9 * reached) + kernels * device.kernel_us * 1e-6


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch: forward and backward work, and messages in both.

    `backward` includes recomputation. tensor, context, expert: messages of both passes that no
    work hides.
    """

    forward: float = 0.0
    backward: float = 0.0
    forward_messages: float = 0.0
    backward_messages: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0

    def __add__(self, other: Passes) -> Passes:
        # Spelled out: a search adds a hundred thousand of them.
        return Passes(
            self.forward + other.forward,
            self.backward + other.backward,
            self.forward_messages + other.forward_messages,
            self.backward_messages + other.backward_messages,
            self.tensor + other.tensor,
            self.context + other.context,
            self.expert + other.expert,
        )

    def times(self, factor: float) -> Passes:
        """Return the time of `factor` such passes."""
        return Passes(*(factor * value for value in self._values))

    def scaled(self, forward: float, backward: float) -> Passes:
        """Return the passes with measured factors of each; the parts of messages by their mean."""
        before = self.forward_messages + self.backward_messages
        messages = self.forward_messages * forward, self.backward_messages * backward
        mean = sum(messages) / before if before else 1.0
        parts = (mean * part for part in (self.tensor, self.context, self.expert))
        return Passes(self.forward * forward, self.backward * backward, *messages, *parts)

    @property
    def _values(self) -> tuple[float, ...]:
        return tuple(vars(self).values())

    @property
    def forward_seconds(self) -> float:
        """Time of the forward pass."""
        return self.forward + self.forward_messages

    @property
    def backward_seconds(self) -> float:
        """Time of the backward pass."""
        return self.backward + self.backward_messages


def attended_positions(length: int, window: int | None, document: int | None) -> float:
    """Return the mean number of positions that a token attends to, itself included.

    document: mean length of the documents that attention does not cross; None: one per sequence.
    """
    visible = min(length, document or length)
    if window is None or window >= visible:
        return (visible + 1) / 2
    return window * (2 * visible - window + 1) / (2 * visible)


class LayerTimes:
    """The times of a model's layers on one rank, each kind of layer computed once."""

    def __init__(self, shape: Architecture, rank: Rank, *, is_teacher: bool = False) -> None:
        self._shape, self._rank = shape, rank
        self._more = _layer_seconds(rank, shape.hidden_size, is_teacher=is_teacher)
        self._layers: dict[LayerTraits, _LayerTimes] = {}
        self._known: dict[object, Passes] = {}
        self._counts: dict[tuple[int, int], Counts] = {}

    def passes(
        self,
        layers: range,
        *,
        recompute: Recomputed,
        modules: tuple[str, ...] = (),
        trains: bool = True,
    ) -> Passes:
        """Return the time of these layers; a model that does not train has no backward pass.

        modules: of a layer that `selective` computes again.
        """
        counts = self.kinds(layers)
        key = (counts, recompute, modules, trains)
        if key not in self._known:
            total = Passes()
            for kind, count in counts:
                one = _passes(self._of_kind(kind), recompute, modules, trains=trains)
                total += one.times(count)
            self._known[key] = total
        return self._known[key]

    def kinds(self, layers: range) -> Counts:
        """Return the kinds of these layers, each with its number."""
        key = layers.start, layers.stop
        if key not in self._counts:
            counts = Counter(layer_kinds(self._shape)[slice_of(layers)])
            self._counts[key] = tuple(sorted(counts.items()))
        return self._counts[key]

    def _of_kind(self, kind: LayerTraits) -> _LayerTimes:
        if kind not in self._layers:
            has_experts, is_windowed = kind
            attended = self._rank.attended[is_windowed]
            found = _layer(self._shape, self._rank, attended, has_experts=has_experts)
            pairs = zip(found.elements, self._more, strict=True)
            ahead, back = (elements + more for elements, more in pairs)
            self._layers[kind] = replace(found, elements=(ahead, back))
        return self._layers[kind]


# Whether a layer has experts, and whether its attention has the sliding window.
LayerTraits = tuple[bool, bool]
Counts = tuple[tuple[LayerTraits, int], ...]


@lru_cache(maxsize=64)
def layer_kinds(shape: Architecture) -> tuple[LayerTraits, ...]:
    """Return the kind of every layer of a model."""
    moe = shape.moe
    return tuple(
        (
            moe is not None and layer not in moe.dense_layers,
            shape.sliding_window is not None
            and (shape.sliding_layers is None or layer in shape.sliding_layers),
        )
        for layer in range(shape.num_layers)
    )


def slice_of(layers: range) -> slice:
    """Return consecutive layers as a slice of all."""
    return slice(layers.start, layers.stop)


@dataclass(frozen=True)
class _LayerTimes:
    products: float  # forward; backward takes twice as long
    attention: tuple[float, float]
    elements: tuple[float, float]
    tensor: tuple[float, float]
    context: tuple[float, float]
    expert: float
    feed_forward: float  # forward, its element-wise work included


def _layer_seconds(rank: Rank, width: int, *, is_teacher: bool) -> tuple[float, float]:
    """Return the time of a layer of this width beyond its work, forward and backward.

    As measured: `layer_us`. A state that is smaller than those of `calibrate`'s second run, of half
    the width and half the tokens, evicts less of a layer's code, and takes its share of that time.
    Else what a layer of `calibrate`'s steps took longer on several threads:
    `DeviceProfile.layer_excess`.
    """
    device, shape = rank.device, CALIBRATED_TEACHER if is_teacher else CALIBRATED_STUDENT
    phase: Phase = "teacher" if is_teacher else "forward"
    measured = device.layer_seconds(phase), device.layer_seconds("backward")
    if any(measured):
        part = min(1.0, 4 * rank.tokens * width / (prod(CALIBRATED_TOKENS) * shape.hidden_size))
        return measured[0] * part, measured[1] * part
    ahead = device.layer_excess(phase, rank.precision)
    back = 0.0 if is_teacher else device.layer_excess("backward", rank.precision)
    if not (ahead or back):
        return 0.0, 0.0
    length, sequences = CALIBRATED_TOKENS
    attended = (length + 1) / 2, (length + 1) / 2
    own = Rank(device, rank.precision, _ONE_RANK, length * sequences, attended)
    one = _passes(_layer(shape, own, attended[0], has_experts=False), "none", (), trains=True)
    return ahead * one.forward, back * one.backward


def _passes(
    one: _LayerTimes, recompute: Recomputed, modules: Sequence[str], *, trains: bool
) -> Passes:
    forward = one.products + one.attention[0] + one.elements[0]
    messages = one.tensor[0] + one.context[0] + one.expert
    if not trains:
        parts = one.tensor[0], one.context[0], one.expert
        return Passes(forward, 0.0, messages, 0.0, *parts)
    backward = 2 * one.products + one.attention[1] + one.elements[1]
    tensor, context, expert = one.tensor[1], one.context[1], one.expert
    if recompute == "full":
        backward += forward
        tensor, context = tensor + one.tensor[0], context + one.context[0]
        expert *= 2
    elif recompute == "selective":
        backward += one.attention[0] if "attention" in modules else 0.0
        backward += one.feed_forward if "mlp" in modules else 0.0
        backward += one.elements[0] / 2 if "layernorm" in modules else 0.0
        if "mlp" in modules:
            # Half of a layer's messages, and those of its experts.
            tensor, expert = tensor + one.tensor[0] / 2, 2 * expert
    return Passes(
        forward,
        backward,
        messages,
        tensor + context + expert,
        one.tensor[0] + tensor,
        one.context[0] + context,
        one.expert + expert,
    )


def _layer(shape: Architecture, rank: Rank, attended: float, *, has_experts: bool) -> _LayerTimes:
    """Return the times of one layer, forward and backward."""
    layout, tokens, hidden, width = rank.layout, rank.tokens, shape.hidden_size, rank.width
    split = layout.tensor
    queries = shape.num_attention_heads * shape.head_size / split
    keys = shape.num_kv_heads * shape.head_size / split
    attention = _attention(shape, rank, attended)
    products = rank.product(tokens, hidden, queries + 2 * keys)
    products += rank.product(tokens, queries, hidden)
    whole = tokens / split if layout.sequence else tokens
    of_element = rank.element_width
    # Two norms read and write, two residual sums read two and write one; queries and keys turn.
    elements = rank.passes(whole * hidden * of_element * 10, kernels=6 if shape.post_norms else 4)
    elements += rank.passes(tokens * (queries + keys) * of_element * 2, kernels=2)
    if shape.hidden_dropout:
        elements += rank.passes(2 * whole * hidden * (1 + of_element), kernels=2)
    feed_forward, inner_elements, expert = _feed_forward(shape, rank, has_experts=has_experts)
    elements += inner_elements
    calls = rank.calls(CALLS_OF_LAYER)
    message = tokens * hidden * width
    link, shown = rank.device.link(split), 1 - rank.overlapped
    if layout.sequence:
        gather, scatter = (
            shown * one(message, ranks=split) for one in (link.gathered, link.scattered)
        )
        # In backward the gathered inputs are needed again.
        tensor = (2 * gather + 2 * scatter, 4 * gather + 2 * scatter)
    else:
        sums = 2 * shown * link.summed(message, ranks=split)
        tensor = (sums, sums)
    context_bytes = 2 * keys * width * tokens * layout.context
    link = rank.device.link(split * layout.context)
    keys_once = link.gathered(context_bytes, ranks=layout.context)
    keys_back = keys_once + link.scattered(context_bytes, ranks=layout.context)
    return _LayerTimes(
        products + feed_forward,
        attention,
        (elements + calls, 2 * elements + calls),
        tensor,
        (keys_once, keys_back),
        expert,
        feed_forward + inner_elements,
    )


def _attention(shape: Architecture, rank: Rank, attended: float) -> tuple[float, float]:
    """Return forward and backward time of scores, softmax and the sum of values."""
    heads = shape.num_attention_heads / rank.layout.tensor
    length = 2 * attended - 1
    if not rank.scores:
        seen, is_long = rank.tokens * heads * attended, False
        if rank.device.kind == "cpu" and attended == rank.attended[0]:  # without a window
            largest_block, _ = _QUERY_BLOCKS[0]
            is_long = length >= largest_block and rank.device.long_score_ns is not None
            measured = LONG_DOCUMENT if is_long else SCORED_DOCUMENT
            seen *= _computed_share(round(length)) / _computed_share(measured)
        flops = 4.0 * seen * shape.head_size
        return (
            rank.fused_attention(flops, seen, backward=False, is_long=is_long),
            rank.fused_attention(_FUSED_BACKWARD * flops, seen, backward=True, is_long=is_long),
        )
    # Every score of the square is in memory: causal masks save nothing.
    sequences = rank.tokens * rank.layout.context / length
    batched = sequences * heads
    # All heads of all sequences are one batched product.
    flops = 4.0 * batched * length * length * shape.head_size
    reached = share(rank.device.product_efficiency, flops / 2e9)
    once = flops / (rank.attention_peak * reached)
    scores = batched * length * length
    # Softmax reads and writes, dropout too with a byte of mask; the products read and write once.
    softmax = rank.passes(scores * (6 * rank.width + 1), kernels=3)
    return once + softmax, 2 * once + rank.passes(scores * (8 * rank.width + 1), kernels=3)


@lru_cache(maxsize=64)
def _computed_share(length: int) -> float:
    """Return the scores that torch computes on a CPU over those that a causal document needs.

    Of each block of queries all blocks of keys that one of them sees are computed whole.
    """
    block = next(size for least, size in _QUERY_BLOCKS if length >= least)
    computed = 0
    for start in range(0, length, block):
        stop = min(start + block, length)
        seen = -(-stop // _KEY_BLOCK) * _KEY_BLOCK
        computed += (stop - start) * min(seen, length)
    return computed / (length * (length + 1) / 2)


def _feed_forward(
    shape: Architecture, rank: Rank, *, has_experts: bool
) -> tuple[float, float, float]:
    """Return products, element-wise work and the experts' messages of one pass, forward."""
    gates = 2 if shape.is_gated else 1

    def dense(tokens: float, inner: float, *, count: float = 1.0) -> tuple[float, float]:
        products = rank.product(tokens, shape.hidden_size, gates * inner, count=count)
        products += rank.product(tokens, inner, shape.hidden_size, count=count)
        return products, rank.passes(count * tokens * inner * rank.element_width * (gates + 1))

    moe, layout, tokens = shape.moe, rank.layout, rank.tokens
    if not has_experts or moe is None:
        return *dense(tokens, shape.ffn_hidden_size / layout.tensor), 0.0
    # The ranks of an expert group exchange tokens; each then has as many as before.
    own = moe.num_experts / layout.expert
    if layout.expert > 1:
        rows = tokens / layout.tensor * moe.top_k * _IMBALANCE
        products, elements = dense(rows / own, moe.ffn_hidden_size, count=own)
    else:
        rows = float(tokens * moe.top_k)
        products, elements = dense(rows / own, moe.ffn_hidden_size / layout.tensor, count=own)
    products += rank.product(tokens, shape.hidden_size, moe.num_experts)
    # Rows are sorted by expert and back, and weighted.
    elements += rank.passes(rows * shape.hidden_size * rank.element_width * 6, kernels=6)
    if moe.shared_ffn_hidden_size:
        more = dense(tokens, moe.shared_ffn_hidden_size / layout.tensor)
        products, elements = products + more[0], elements + more[1]
    messages = 0.0
    if layout.expert > 1:
        link = rank.device.link(layout.tensor * layout.expert)
        sent = tokens / layout.tensor * moe.top_k * shape.hidden_size * rank.width
        messages = 2 * _IMBALANCE * link.gathered(sent, ranks=layout.expert)
    return products, elements, messages
