"""Seconds of a model's layers on one rank: products, attention, element-wise work and messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Final

from megatron_distill.models.architecture import Architecture
from megatron_distill.planning.curves import share
from megatron_distill.planning.device import LONG_DOCUMENT, SCORED_DOCUMENT, Phase
from megatron_distill.planning.operations import (
    CALLS_OF_LAYER,
    Counts,
    LayerTraits,
    Passes,
    Rank,
    Recomputed,
    layer_kinds,
    slice_of,
)
from megatron_distill.planning.stages.known import known_of
from megatron_distill.runtime.layout import Layout

__all__ = [
    "CALIBRATED_STUDENT",
    "CALIBRATED_TEACHER",
    "CALIBRATED_TOKENS",
    "CALLS_OF_CONTEXT",
    "CALLS_OF_EXCHANGE",
    "CALLS_OF_EXPERT",
    "CALLS_OF_EXPERTS",
    "CALLS_OF_SEQUENCE",
    "CALLS_OF_TILES",
    "GATHERED_FOR_EXPERTS",
    "LayerTimes",
]

# Backward of a fused attention computes the scores again: five products where forward has two.
_FUSED_BACKWARD: Final = 2.5
# Queries of a block of torch's attention on a CPU, by the least length of a document; and keys.
_QUERY_BLOCKS: Final = ((768, 256), (192, 64), (0, 32))
_KEY_BLOCK: Final = 512
# Further calls, forward and backward: with sequence parallelism; to gather keys over context ranks;
# and of attention's tiles on the busiest context rank of two, or of more.
CALLS_OF_SEQUENCE, CALLS_OF_CONTEXT = (55, 95), (45, 85)
CALLS_OF_TILES: Final = ((156, 212), (246, 301))
# Calls of a pass of a layer's experts: of the router and the order of tokens, of each expert, and
# of the exchange over a group of ranks.
CALLS_OF_EXPERTS, CALLS_OF_EXPERT, CALLS_OF_EXCHANGE = 105, 40, 55
# Gathers and scatters of a layer of experts over several ranks of a CPU, forward and backward:
# choices of experts, their weights, and tokens are gathered, and the experts' sums scattered.
GATHERED_FOR_EXPERTS: Final = ((3, 1), (1, 2))
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


class LayerTimes:
    """The times of a model's layers on one rank, each kind of layer computed once."""

    def __init__(self, shape: Architecture, rank: Rank, *, is_teacher: bool = False) -> None:
        self._shape, self._rank = shape, rank
        self._more = _layer_seconds(rank, shape.hidden_size, is_teacher=is_teacher)
        self._layers: dict[LayerTraits, _LayerTimes] = {}
        self._known: dict[object, Passes] = {}
        # Alike on all ranks.
        self._counts: dict[tuple[int, int], Counts] = known_of((shape,), "kinds of layers", dict)

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
            found = _layer(
                self._shape, self._rank, attended, has_experts=has_experts, beyond=self._more[0]
            )
            pairs = zip(found.elements, self._more, strict=True)
            ahead, back = (elements + more for elements, more in pairs)
            self._layers[kind] = replace(found, elements=(ahead, back))
        return self._layers[kind]


@dataclass(frozen=True)
class _LayerTimes:
    products: float  # forward; backward takes twice as long
    attention: tuple[float, float]
    elements: tuple[float, float]
    tensor: tuple[float, float]
    context: tuple[float, float]
    expert: tuple[float, float]
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
    layer = _layer(shape, own, attended[0], has_experts=False, beyond=0.0)
    one = _passes(layer, "none", (), trains=True)
    return ahead * one.forward, back * one.backward


def _passes(
    one: _LayerTimes, recompute: Recomputed, modules: Sequence[str], *, trains: bool
) -> Passes:
    forward = one.products + one.attention[0] + one.elements[0]
    messages = one.tensor[0] + one.context[0] + one.expert[0]
    if not trains:
        parts = one.tensor[0], one.context[0], one.expert[0]
        return Passes(forward, 0.0, messages, 0.0, *parts)
    backward = 2 * one.products + one.attention[1] + one.elements[1]
    tensor, context, expert = one.tensor[1], one.context[1], one.expert[1]
    if recompute == "full":
        backward += forward
        tensor, context = tensor + one.tensor[0], context + one.context[0]
        expert += one.expert[0]
    elif recompute == "selective":
        backward += one.attention[0] if "attention" in modules else 0.0
        backward += one.feed_forward if "mlp" in modules else 0.0
        backward += one.elements[0] / 2 if "layernorm" in modules else 0.0
        if "mlp" in modules:
            # Half of a layer's messages, and those of its experts.
            tensor, expert = tensor + one.tensor[0] / 2, expert + one.expert[0]
    return Passes(
        forward,
        backward,
        messages,
        tensor + context + expert,
        one.tensor[0] + tensor,
        one.context[0] + context,
        one.expert[0] + expert,
    )


def _layer(
    shape: Architecture, rank: Rank, attended: float, *, has_experts: bool, beyond: float
) -> _LayerTimes:
    """Return the times of one layer, forward and backward.

    beyond: seconds of its forward pass besides its work, see `_layer_seconds`.
    """
    layout, tokens, hidden = rank.layout, rank.tokens, shape.hidden_size
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
    ahead, back = (
        rank.calls(CALLS_OF_LAYER + more) + beyond * more / CALLS_OF_LAYER
        for more in _further_calls(shape, layout, has_experts=has_experts)
    )
    if layout.context > 1:
        tiles = (rank.calls(count) for count in CALLS_OF_TILES[layout.context > 2])
        ahead, back = (one + more for one, more in zip((ahead, back), tiles, strict=True))
    feed_forward, inner_elements = _feed_forward(shape, rank, has_experts=has_experts)
    elements += inner_elements
    work = products + feed_forward + attention[0] + elements + ahead + beyond
    tensor, context, expert = _messages(shape, rank, has_experts=has_experts, work=work)
    return _LayerTimes(
        products + feed_forward,
        attention,
        (elements + ahead, 2 * elements + back),
        tensor,
        context,
        expert,
        feed_forward + inner_elements,
    )


def _further_calls(
    shape: Architecture, layout: Layout, *, has_experts: bool
) -> tuple[float, float]:
    """Return the calls of a layer's two passes beyond those of a dense one on one rank."""
    found = [0.0, 0.0]
    for place in (0, 1):
        found[place] += CALLS_OF_SEQUENCE[place] * layout.sequence
        found[place] += CALLS_OF_CONTEXT[place] * (layout.context > 1)
        if has_experts and shape.moe is not None:
            found[place] += CALLS_OF_EXPERTS + CALLS_OF_EXCHANGE * (layout.expert > 1)
            found[place] += shape.moe.num_experts / layout.expert * CALLS_OF_EXPERT
    return found[0], found[1]


def _messages(
    shape: Architecture, rank: Rank, *, has_experts: bool, work: float
) -> tuple[tuple[float, float], tuple[float, float], tuple[float, float]]:
    """Return a layer's messages, forward and backward: of tensor, of context, and of expert ranks.

    work: seconds of the forward pass, a part of which lies between two messages.
    """
    layout, tokens = rank.layout, rank.tokens
    split, context, width = layout.tensor, layout.context, rank.width
    device = rank.device
    # The ranks of a layer's experts gather all tokens on a CPU, and exchange rows on GPUs.
    expert_ranks = layout.expert * (split if layout.sequence else 1)
    has_own = has_experts and device.kind == "cpu" and expert_ranks > 1
    exchanges = has_experts and not has_own and layout.expert > 1
    of_half = (2 if layout.sequence else 1) * (split > 1)  # attention, or the feed-forward part
    of_experts = sum(GATHERED_FOR_EXPERTS[0]) if has_own else of_half + 2 * exchanges
    count = of_half + of_experts + (context > 1)
    # A rank that shares its core waits until its peer has one, however close messages are.
    after = work / count if count and device.core_share == 1.0 else None
    link, message = device.link(split), tokens * shape.hidden_size * width
    if layout.sequence:
        gather, scatter = (
            (1 - hidden) * one(message, ranks=split, after=after)
            for one, hidden in zip((link.gathered, link.scattered), rank.overlapped, strict=True)
        )
        # In backward the gathered inputs are needed again. A product hides the wait for them, and
        # on a CPU not their bytes, which take its core.
        is_hidden = device.kind == "cpu" and split > 1
        waits = 2 * link.gather_waited(after) if is_hidden else 0.0
        tensor = (2 * gather + 2 * scatter, 4 * gather + 2 * scatter - waits)
    else:
        sums = 2 * link.summed(message, ranks=split, after=after)
        tensor = (sums, sums)
    keys = shape.num_kv_heads * shape.head_size / split
    of_keys, link = 2 * keys * width * tokens * context, device.link(split * context)
    keys_once = link.gathered(of_keys, ranks=context, after=after)
    keys_back = keys_once + link.scattered(of_keys, ranks=context, after=after)
    expert = (0.0, 0.0)
    if has_own:  # in place of half of the messages of tensor ranks
        tensor = tensor[0] / 2, tensor[1] / 2
        expert = _gathered_for_experts(rank, shape.hidden_size, expert_ranks, after)
    elif exchanges and shape.moe is not None:
        sent = tokens / split * shape.moe.top_k * shape.hidden_size * width
        link = device.link(split * layout.expert)
        once = 2 * _IMBALANCE * link.gathered(sent, ranks=layout.expert, after=after)
        expert = once, once
    return tensor, (keys_once, keys_back), expert


def _gathered_for_experts(
    rank: Rank, hidden: int, ranks: int, after: float | None
) -> tuple[float, float]:
    """Return the messages of a layer whose `ranks` gather all tokens for their experts.

    One gather and one scatter of each pass are of tokens; the others have few bytes.
    """
    link = rank.device.link(ranks)
    tokens = rank.tokens * rank.layout.expert * hidden * rank.width
    of_tokens = link.gathered(tokens, ranks=ranks, after=after)
    of_tokens += link.scattered(tokens, ranks=ranks, after=after)
    ahead, back = (
        of_tokens + (gathers - 1) * link.gather_waited(after) + (scatters - 1) * link.waited(after)
        for gathers, scatters in GATHERED_FOR_EXPERTS
    )
    return ahead, back


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


def _feed_forward(shape: Architecture, rank: Rank, *, has_experts: bool) -> tuple[float, float]:
    """Return products and element-wise work of one pass, forward."""
    gates = 2 if shape.is_gated else 1

    def dense(tokens: float, inner: float, *, count: float = 1.0) -> tuple[float, float]:
        products = rank.product(tokens, shape.hidden_size, gates * inner, count=count)
        products += rank.product(tokens, inner, shape.hidden_size, count=count)
        return products, rank.passes(count * tokens * inner * rank.element_width * (gates + 1))

    moe, layout, tokens = shape.moe, rank.layout, rank.tokens
    if not has_experts or moe is None:
        return dense(tokens, shape.ffn_hidden_size / layout.tensor)
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
    return products, elements
