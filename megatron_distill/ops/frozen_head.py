"""Logits of a frozen head, chunk by chunk, and the statistics of a chunk's tokens.

The tokens with a weight come first, in the chunks of `fused_linear`. A product of another shape
rounds differently, and stored values would differ from those of a live teacher's objective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.chunk import Chunk
from megatron_distill.ops.statistics import LocalStatistics, StatisticsSpec
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import (
    Rows,
    Scratch,
    accumulation_dtype,
    allocate_logits,
    equal_chunks,
)
from megatron_distill.signals import HiddenState, LogitRule

__all__ = ["OutputChunk", "RowStatistics", "output_chunks", "row_statistics"]


class OutputChunk(NamedTuple):
    """Raw outputs ``[n, V]`` over real columns of tokens ``[n]``; valid until the next chunk."""

    rows: Tensor
    raw: Tensor


class RowStatistics(NamedTuple):
    """Statistics of N tokens over the whole vocabulary, the same on every rank.

    Attributes:
        log_sum_exp: ``[T, N]`` of the logits divided by each temperature, fp64.
        entropy: ``[N]`` at temperature one, in nats, fp64.
        label_log_prob: ``[N]`` at temperature one, fp64.
        top_log_prob: ``[N]`` of the most probable token at temperature one, fp64.
    """

    log_sum_exp: Tensor
    entropy: Tensor
    label_log_prob: Tensor
    top_log_prob: Tensor


def output_chunks(
    state: HiddenState, counted: Tensor, *, chunk_tokens: int, columns: int
) -> Iterator[OutputChunk]:
    """Raw outputs of every token over the leading columns: counted tokens first, then the rest.

    Shapes: counted ``[n]`` int64, ascending. Logits exist for ``chunk_tokens`` tokens at once. The
    number of remaining tokens is known, so that nothing waits for the device.
    """
    total, device = state.tokens, state.weight.device
    uncounted = counted[:0]
    if counted.numel() < total:
        is_uncounted = torch.ones(total, dtype=torch.bool, device=device)
        is_uncounted.index_fill_(0, counted, False)
        uncounted = is_uncounted.nonzero_static(size=total - counted.numel()).squeeze(1)
    # The same selection as in the objective: without a copy where all tokens count.
    both = ((Rows.of_indices(total, counted), counted), (Rows(total, uncounted), uncounted))
    for rows, indices in both:
        chunks = equal_chunks(indices.numel(), chunk_tokens)
        if not chunks:
            continue
        buffer = allocate_logits(chunks[0].stop, columns, state.dtype, device)
        for chunk in chunks:
            selected = indices[chunk]
            take = partial(rows.take, chunk=chunk)
            yield OutputChunk(selected, state.outputs(take, columns, buffer[: selected.numel()]))


def row_statistics(
    raw: Tensor,
    rule: LogitRule,
    shard: VocabShard,
    group: dist.ProcessGroup | None,
    *,
    labels: Tensor,
    temperatures: Sequence[float] = (),
    infinite: bool = False,
) -> RowStatistics:
    """Statistics of raw outputs ``[N, V]`` at temperature one and then at further ones.

    ``labels [N]`` are global ids inside the vocabulary. ``infinite``: outputs may be -inf.

    Collective: over ``group`` one all-gather of 32 bytes per token and 8 more per temperature.
    """
    # A spec with one model names it the student; here it stands for the teacher.
    spec = StatisticsSpec(
        ("student",), (), full=True, infinite=infinite, student_temperatures=tuple(temperatures)
    )
    dtype = accumulation_dtype(raw.dtype)
    local = LocalStatistics.empty(spec, raw.shape[0], dtype, raw.device)
    scratch = Scratch(raw.shape[0], raw.shape[1], dtype, raw.device)
    Chunk(spec, {"student": raw}, {"student": rule}, shard, scratch, labels).measure(local)
    merged = local.merge(group)
    sums = [merged.log_normalizer("student", value) for value in (1.0, *temperatures)]
    label = -merged.cross_entropy("student")
    top = merged["student_peak"].amax(0) - sums[0]
    return RowStatistics(torch.stack(sums), merged.entropy("student"), label, top)
