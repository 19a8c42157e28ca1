"""Bytes of activations, per token of a micro-batch. The layers of the student save some for the
backward pass; a forward pass without one holds others for a moment.

Counted are the tensors that autograd saves in our layers: torch's on a CPU, fused ones on a GPU.
Source of the method: Reducing Activation Recomputation in Large Transformer Models, arXiv
2205.05198, section 4; here with grouped queries, gates, experts and attention without scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

from megatron_distill.planning.operations import LayerTraits, layer_kinds, slice_of
from megatron_distill.planning.stages.known import known_of

if TYPE_CHECKING:
    from megatron_distill.models.architecture import Architecture, MixtureOfExperts
    from megatron_distill.planning.run import Choice, PlannedRun
    from megatron_distill.runtime.layout import Layout

__all__ = [
    "Activations",
    "LayerBytes",
    "activation_bytes",
    "forward_bytes",
    "layer_bytes",
    "norm_input",
]

_FP32: Final = 4


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token that one layer saves, and those alive in its passes alone.

    saved: without recomputation. kept: with the run's recomputation. live: while a recomputed
    part runs backward.
    """

    saved: float
    kept: float
    live: float


def layer_bytes(
    run: PlannedRun, choice: Choice, *, has_experts: bool, recomputed: bool, is_fused: bool
) -> LayerBytes:
    """Return the bytes per token of one layer on one rank.

    is_fused: the layers are a GPU's. recomputed: this layer is, with `full`.
    """
    shape, width = run.student, run.width
    layout = choice.layout
    split = layout.tensor
    across = 1 / (split if layout.sequence else 1)
    hidden = shape.hidden_size
    count = 4 if shape.post_norms else 2
    # The output of a post norm goes into a sum, which saves nothing.
    norms = 2 * hidden * width * across
    inputs = count * norm_input(shape, width, is_fused=is_fused) * across
    again = choice.recompute == "selective" and "attention" in choice.modules
    scores = _core_attention(
        shape,
        width,
        split=split,
        is_fused=is_fused,
        holds_part=layout.context > 1 and not again,
    )
    if has_experts:
        inner = _experts(run, choice, is_fused=is_fused)
    else:
        inner = _feed_forward(shape, shape.ffn_hidden_size, is_fused=is_fused) * width / split
    if shape.hidden_dropout:
        inputs += 2 * hidden * across * (1 if is_fused else width)
    saved = inputs + norms + scores[0] + scores[1] + inner
    if choice.recompute == "full" and recomputed:
        return LayerBytes(saved, hidden * width * across, saved)
    if choice.recompute != "selective":
        return LayerBytes(saved, saved, 0.0)
    # A norm that is computed again keeps its input, the stream; post norms are not.
    beside = norm_input(shape, width, is_fused=is_fused) - hidden * width
    dropped = {
        "attention": scores[1],
        "mlp": inner,
        "layernorm": norms + 2 * beside * across,
    }
    gone = sum(dropped[module] for module in choice.modules)
    return LayerBytes(saved, saved - gone, max(dropped[module] for module in choice.modules))


def norm_input(shape: Architecture, width: int, *, is_fused: bool) -> float:
    """Return the bytes that a norm saves: its input, and torch's RMSNorm two fp32 matrices."""
    if is_fused or shape.norm == "layernorm":
        return shape.hidden_size * width + _FP32
    return 2 * _FP32 * shape.hidden_size + _FP32


def _core_attention(
    shape: Architecture, width: int, *, split: int, is_fused: bool, holds_part: bool
) -> tuple[float, float]:
    """Return the bytes around the scores, and those that recomputing the core attention drops.

    split: ranks that divide the heads. holds_part: keys and values are a copy of this rank's, of
    which the whole is gathered again (models/context_keys.py).
    """
    heads, groups = shape.num_attention_heads, shape.num_kv_heads
    queries, keys = heads * shape.head_size, groups * shape.head_size
    joint = queries + 2 * keys
    around = queries  # the input of the output projection
    angles = normed = 0
    if shape.positions == "rope":
        # Turned queries and keys, and the values: alone, or as a view of the joint projection.
        around += queries + keys + (keys if is_fused or holds_part else joint)
        angles = 0 if is_fused else 4 * shape.head_size * width  # cosines and sines
    else:
        around += joint + (2 * keys if holds_part else 0)
    if shape.qk_norm:
        # Their inputs, of which only the queries are copies. Of torch's RMSNorm the quotients too,
        # and below fp32 the inputs in fp32.
        normed = (queries + (keys if is_fused else 0)) * width
        if not is_fused and shape.norm != "layernorm":
            normed = _FP32 * (2 * (queries + keys) - (keys if width == _FP32 else 0))
        normed += _FP32 * (heads + groups)
    return (around * width + normed) / split + angles, _FP32 * heads / split


def _feed_forward(shape: Architecture, inner: int, *, is_fused: bool) -> float:
    """Return the numbers of a feed-forward: its activation's inputs and its product's."""
    if not shape.is_gated:
        return 2.0 * inner
    # Gate and up projection and their product; unfused also both activations of the gate.
    return (3.0 if is_fused and shape.activation == "swiglu" else 5.0) * inner


def _experts(run: PlannedRun, choice: Choice, *, is_fused: bool) -> float:
    """Return the bytes per token of the router, the sorted rows and the experts."""
    shape, moe, width = run.student, run.student.moe, run.width
    assert moe is not None
    layout = choice.layout
    sorted_rows = _sorted_rows(moe, shape.hidden_size, layout) * width
    # Tokens of an expert group are divided over its ranks, and so are those of tensor ranks.
    rows = moe.top_k * width / layout.tensor
    inner = _feed_forward(shape, moe.ffn_hidden_size, is_fused=is_fused) * rows
    router = _FP32 * moe.num_experts + 48.0 * moe.top_k
    shared = 0.0
    if moe.shared_ffn_hidden_size:
        shared = _feed_forward(shape, moe.shared_ffn_hidden_size, is_fused=is_fused)
        shared *= width / layout.tensor
    return inner + sorted_rows + router + shared


def _sorted_rows(moe: MixtureOfExperts, hidden_size: int, layout: Layout) -> float:
    """Return the numbers per token of the rows that the experts read, sorted by expert."""
    rows = float(hidden_size * moe.top_k)
    return rows if layout.expert == 1 else 2 * rows / layout.tensor


def forward_bytes(shape: Architecture, layout: Layout, width: int, *, is_fused: bool) -> float:
    """Return the bytes per token at the widest point of a forward pass without a backward pass.

    Alive are the embeddings, the layer's input, its sum after attention, the input of its half and
    the widest tensors within that. width: bytes of a number.
    """
    split, hidden = layout.tensor, shape.hidden_size
    across = split if layout.sequence else 1
    joint = (shape.num_attention_heads + 2 * shape.num_kv_heads) * shape.head_size
    # The joint projection, queries and keys turned and before, and the output.
    halves = [3 * hidden / across + 4 * joint / split]
    moe = shape.moe
    if moe is None or moe.dense_layers:
        inner = _feed_forward(shape, shape.ffn_hidden_size, is_fused=is_fused)
        halves.append(4 * hidden / across + inner / split)
    if moe is not None:
        rows = _sorted_rows(moe, hidden, layout)
        inner = (4.0 if shape.is_gated else 2.0) * moe.top_k * moe.ffn_hidden_size
        halves.append(4 * hidden / across + rows + inner / split)
    gathered = hidden if layout.sequence else 0
    return width * (gathered + max(halves))


@dataclass(frozen=True)
class Activations:
    """Bytes of a pipeline rank's activations.

    in_flight: of all chunks that wait for their backward pass, at the most. one: of the last of
    them. live: within the backward pass of one layer, recomputed tensors and gradients, less the
    saved tensors that are gone by then.
    """

    in_flight: float
    one: float
    live: float


@dataclass(frozen=True)
class _Moment:
    """Bytes that a moment of a layer's backward pass adds to what its forward pass has saved.

    weights: of the gradient of a matrix, before it is added to the fp32 buffer.
    """

    per_token: float
    weights: float = 0.0


@dataclass(frozen=True)
class _ChunkBytes:
    """Bytes per token of a chunk: kept of all of its layers, and the most that one computes again.

    moments: of the backward passes of its kinds of layers.
    """

    kept: float
    live: float
    moments: tuple[_Moment, ...]


def _chunks_bytes(
    run: PlannedRun, choice: Choice, stage: int, *, is_fused: bool
) -> list[_ChunkBytes]:
    """Return the bytes of each chunk of a pipeline rank; chunks of the same layers are alike."""
    layout, kinds = choice.layout, layer_kinds(run.student)
    recomputed = choice.recompute, choice.modules, choice.recomputed_layers
    sizes = layout.tensor, layout.context, layout.expert, layout.sequence
    found = []
    for chunk in choice.chunk_layers(stage):
        layers = kinds[slice_of(chunk)]
        key = ("activations", layers, recomputed, sizes, is_fused)
        made = partial(_chunk_bytes, run, choice, layers, is_fused=is_fused)
        found.append(known_of((run,), key, made))
    return found


def _chunk_bytes(
    run: PlannedRun, choice: Choice, layers: Sequence[LayerTraits], *, is_fused: bool
) -> _ChunkBytes:
    known: dict[tuple[bool, bool], LayerBytes] = {}
    limit, total = choice.recomputed_layers, 0.0
    for index, (has_experts, _) in enumerate(layers):
        key = (has_experts, limit is None or index < limit)
        if key not in known:
            known[key] = layer_bytes(
                run, choice, has_experts=key[0], recomputed=key[1], is_fused=is_fused
            )
        total += known[key].kept
    moments = (
        _moments(run, choice, has_experts=has_experts, is_fused=is_fused)
        for has_experts in {has_experts for has_experts, _ in known}
    )
    return _ChunkBytes(
        total,
        max((one.live for one in known.values()), default=0.0),
        tuple(chain.from_iterable(moments)),
    )


def activation_bytes(run: PlannedRun, choice: Choice, stage: int, *, is_fused: bool) -> Activations:
    """Return the activations of a pipeline rank.

    1F1B holds min(m, p - stage) micro-batches. With v chunks the first rank holds
    (v - 1) p + 2 (p - 1) + 1 chunks (Megatron-LM, arXiv 2104.04473, section 2.2).
    """
    tokens = choice.micro_batch_size * run.sequence_length / choice.layout.context
    chunks = _chunks_bytes(run, choice, stage, is_fused=is_fused)
    per_chunk = [one.kept * tokens for one in chunks]
    moments = [
        moment.per_token * tokens + moment.weights for one in chunks for moment in one.moments
    ]
    live = max(one.live for one in chunks) * tokens + max(moments, default=0.0)
    count = choice.micro_batches(run)
    return Activations(_in_flight(choice, stage, count, per_chunk), per_chunk[0], live)


def _moments(
    run: PlannedRun, choice: Choice, *, has_experts: bool, is_fused: bool
) -> tuple[_Moment, _Moment, _Moment]:
    """Return the backward pass of a layer's feed-forward, which comes first.

    Beside the gradient of the layer's output it has those of the product and of the second matrix,
    while all that was saved is there; those of the activation's inputs, without the product; those
    of the first matrix and of its input, without anything that was saved within.
    """
    shape, width, layout = run.student, run.width, choice.layout
    hidden, split = shape.hidden_size, layout.tensor
    across = split if layout.sequence else 1
    inner = shape.ffn_hidden_size / split
    # Ranks of a sequence gather the gradient of the output; experts have a row of each choice.
    rows = hidden if across > 1 else 0
    if has_experts:
        assert shape.moe is not None
        inner = shape.moe.top_k * shape.moe.ffn_hidden_size / split
        rows = hidden * shape.moe.top_k
    matrix = _whole_matrix(run, choice, has_experts=has_experts, is_fused=is_fused) * width
    halves = 2 if shape.is_gated else 1
    saved = _feed_forward(shape, 1, is_fused=is_fused) * inner
    output = hidden / across
    return (
        _Moment((output + rows + inner) * width, matrix),
        _Moment((output + halves * inner) * width),
        _Moment((output + halves * inner + max(rows, hidden) - saved) * width, halves * matrix),
    )


def _whole_matrix(run: PlannedRun, choice: Choice, *, has_experts: bool, is_fused: bool) -> float:
    """Return the numbers of a second matrix whose gradient exists before it is added to fp32.

    Transformer Engine adds it within the product: in FP8, and of experts that ranks of a GPU share,
    which are taken to be its own. Those of grouped experts are one matrix.
    """
    shape, layout, moe = run.student, choice.layout, run.student.moe
    split = layout.tensor
    if is_fused and run.student_fp8:
        return 0.0
    if not has_experts:
        return shape.ffn_hidden_size * shape.hidden_size / split
    assert moe is not None
    if is_fused and split * layout.expert > 1:
        return 0.0
    ranks = 1 if layout.expert > 1 else split  # that share each expert
    is_grouped = shape.groups_experts(run.width, tensor=ranks)
    experts = moe.num_experts // layout.expert if is_grouped else 1
    return experts * moe.ffn_hidden_size * shape.hidden_size / ranks


def _in_flight(choice: Choice, stage: int, micro_batches: int, per_chunk: list[float]) -> float:
    """Return the most bytes of chunks that wait for their backward pass at once."""
    pipeline, chunks = choice.layout.pipeline, len(per_chunk)
    if chunks == 1:
        return min(micro_batches, pipeline - stage) * per_chunk[0]
    # Forward passes before the first backward pass, in groups of `pipeline` micro-batches.
    warm = min(2 * (pipeline - stage - 1) + (chunks - 1) * pipeline + 1, micro_batches * chunks)
    return sum(per_chunk[number // pipeline % chunks] for number in range(warm))
