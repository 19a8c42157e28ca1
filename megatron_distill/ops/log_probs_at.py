"""A model's log-probabilities of given ids, from logits that exist for one chunk at a time."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.log_softmax import log_normalizer
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import accumulation_dtype
from megatron_distill.signals import LogitSource

__all__ = ["log_probs_at"]


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
