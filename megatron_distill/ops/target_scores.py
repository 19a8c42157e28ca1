"""Log-probabilities of given ids on vocabulary shards, and whether each id is the likeliest."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.frozen_head import output_chunks
from megatron_distill.ops.log_softmax import log_normalizer
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import accumulation_dtype, chunk_tokens_for
from megatron_distill.runtime.segments import copied
from megatron_distill.signals import HiddenState, LogitRule, LogitSource

__all__ = ["TargetScores", "log_probs_at", "target_scores"]


class TargetScores(NamedTuple):
    """Scores of Q pairs of a row and an id, the same on every rank.

    Attributes:
        log_prob: ``[Q]`` fp64, over the whole real vocabulary.
        is_greedy: ``[Q]`` bool, whether the id is the row's likeliest, the lowest among equals.
    """

    log_prob: Tensor
    is_greedy: Tensor


@torch.no_grad()
def target_scores(
    state: HiddenState,
    shard: VocabShard,
    group: dist.ProcessGroup | None,
    *,
    rows: Sequence[int],
    ids: Tensor,
    chunk_tokens: int | None = None,
) -> TargetScores:
    """Score ids at rows of hidden states; logits exist for one chunk of rows at a time.

    Shapes: rows ``[Q]``, ascending, index the state's tokens ``[N]``. They are on the host, which
    then has those of each chunk without a wait. Ids ``[Q]`` int64 are global. A row may have
    several ids. An id outside of the real vocabulary has no probability.

    Collective: over ``group`` per chunk one all-gather of 12 bytes per row and one all-reduce of 4
    bytes per pair (twice that for fp64 states).
    """
    total, device = state.tokens, state.weight.device
    log_prob = torch.empty(len(rows), dtype=torch.float64, device=device)
    is_greedy = torch.empty(len(rows), dtype=torch.bool, device=device)
    most = chunk_tokens or chunk_tokens_for(shard.width, device)
    counted = torch.arange(total, device=device)
    rows_Q = copied(torch.tensor(rows, dtype=torch.int64), device)
    first = begin = 0
    for chunk in output_chunks(state, counted, chunk_tokens=most, columns=shard.real_width):
        stop = first + chunk.rows.numel()
        end = bisect_left(rows, stop)
        pairs = slice(begin, end)
        found = _chunk_scores(
            chunk.raw, state.rule, shard, group, rows=rows_Q[pairs] - first, ids=ids[pairs]
        )
        log_prob[pairs], is_greedy[pairs] = found
        first, begin = stop, end
    return TargetScores(log_prob, is_greedy)


def _chunk_scores(
    raw: Tensor,
    rule: LogitRule,
    shard: VocabShard,
    group: dist.ProcessGroup | None,
    *,
    rows: Tensor,
    ids: Tensor,
) -> TargetScores:
    logits = rule.apply_(raw.to(accumulation_dtype(raw.dtype), copy=True))
    own = shard.owns(ids)
    targets = logits.new_zeros(ids.shape)
    if logits.shape[1]:
        targets = torch.where(own, logits[rows, shard.local(ids)], 0.0)
    is_known = own.to(logits.dtype)
    peaks, normalizer, best = _merged(_local_peaks(logits, shard), group)
    if group is not None and group.size() > 1:
        packed = torch.stack((targets, is_known))
        dist.all_reduce(packed, group=group)
        targets, is_known = packed
    log_prob = targets.double() - normalizer[rows]
    is_real = is_known > 0
    is_greedy = is_real & (best[rows] == ids) & peaks[rows].isfinite()
    return TargetScores(log_prob.masked_fill(~is_real, -torch.inf), is_greedy)


def _local_peaks(logits: Tensor, shard: VocabShard) -> Tensor:
    """The largest logit, the sum of exponentials below it and its lowest id, ``[3, N]``."""
    count, lowest = logits.shape[0], torch.finfo(logits.dtype).min / 4
    found = logits.new_zeros((3, count))
    found[0] = lowest
    found[2] = shard.size
    if not logits.shape[1]:
        return found
    peak = logits.amax(1)
    columns = torch.arange(logits.shape[1], device=logits.device, dtype=logits.dtype)
    # argmax promises no order among equals.
    first = torch.where(logits == peak.unsqueeze(1), columns, float(logits.shape[1])).amin(1)
    found[0] = peak
    found[1] = logits.sub_(peak.unsqueeze(1)).exp_().sum(1)
    found[2] = first + shard.start
    return found


def _merged(local: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the ranks' peaks; returns the peak, the log-normaliser and the id of the peak, fp64."""
    parts = local.unsqueeze(0)
    if group is not None and group.size() > 1:
        gathered = local.new_empty((group.size() * local.shape[0], local.shape[1]))
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        parts = gathered.view(group.size(), *local.shape)
    peaks, masses, ids = parts.double().unbind(1)
    peak = peaks.amax(0)
    normalizer = (peaks + masses.log()).logsumexp(0)
    best = torch.where(peaks == peak, ids, torch.inf).amin(0)
    return peak, normalizer, best


@torch.no_grad()
def log_probs_at(
    source: LogitSource,
    ids_nK: Tensor,
    valid_nK: Tensor,
    rows_n: Tensor,
    *,
    temperature: float,
    shard: VocabShard,
    group: dist.ProcessGroup | None,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of K ids of some tokens, and of all further ids together.

    Shapes: ``ids_nK`` int64 global ids of the tokens ``rows_n``, each at most once where
    ``valid_nK``; an id that is not valid counts as further. Returns ``[n, K]`` and ``[n]`` in the
    dtype of statistics, at ``temperature``; ids that are not valid have any value.

    The further ids are summed by themselves, so that a small mass keeps its digits.

    Collective: over ``group`` per chunk two all-gathers of 8 bytes per token. One all-reduce of
    4 K bytes per token (16 and 8 K in fp64).
    """
    dtype, width = accumulation_dtype(source.dtype), shard.real_width
    at_nK = torch.empty(ids_nK.shape, dtype=dtype, device=ids_nK.device)
    further_n = torch.empty(len(ids_nK), dtype=dtype, device=ids_nK.device)
    for start in range(0, len(rows_n), chunk_tokens):
        part = slice(start, start + chunk_tokens)
        own_rows, ids = rows_n[part], ids_nK[part]
        raw = source.outputs(partial(_tokens, own_rows), width)
        logits = source.rule.apply_(raw.to(dtype, copy=source.formed is not None))
        logits.div_(temperature)
        normalizer = log_normalizer(logits, group)
        is_own = shard.owns(ids) & valid_nK[part]
        # A column behind the last one takes the ids of other shards.
        columns = torch.where(is_own, shard.local(ids), width)
        logits = torch.nn.functional.pad(logits, (0, 1))
        found = logits.gather(1, columns)
        if group is not None:
            dist.all_reduce(found, group=group)
        logits.scatter_(1, columns, -torch.inf)
        at_nK[part] = found.sub_(normalizer.unsqueeze(1))
        further_n[part] = log_normalizer(logits[:, :width], group).sub_(normalizer)
    return at_nK, further_n


def _tokens(rows_n: Tensor, values: Tensor) -> Tensor:
    return values.index_select(0, rows_n)
