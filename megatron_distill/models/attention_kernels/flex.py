"""Soft-capped attention on CUDA in 16 bits: FlexAttention over blocks of a document mask.

FlexAttention (arXiv 2412.05496) compiles the soft cap into its kernel and visits only the blocks
of 128 queries and 128 keys in which some query sees some key. Which blocks these are follows from
the documents' lengths on the host. Within a block the mask is computed from each query's first and
last visible key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron_distill.models.attention_kernels.rule import ScoreRule
from megatron_distill.runtime.segments import Segments, copied

_BLOCK = 128


def takes(query: Tensor, rule: ScoreRule) -> bool:
    """Whether the kernel computes this rule on these queries."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and rule.softcap is not None
        and not rule.dropout
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: ScoreRule
) -> Tensor:
    """Attend on CUDA with soft-capped scores; shapes as in `varlen.attend`."""
    return attend_with(_compiled(), query, key, value, segments, rule)


def attend_with(
    kernel: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    rule: ScoreRule,
) -> Tensor:
    """Attend through a form of `flex_attention`, compiled or not."""
    softcap = rule.softcap
    assert softcap is not None

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    mask = segments.derived(
        ("flex", rule.window, query.device),
        partial(block_mask, segments, rule.window, query.device),
    )
    attended = kernel(
        *(x.permute(1, 2, 0, 3) for x in (query, key, value)),
        score_mod=capped,
        block_mask=mask,
        scale=rule.scale,
        enable_gqa=key.shape[2] != query.shape[2],
    )
    return attended.permute(2, 0, 1, 3)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def block_mask(segments: Segments, window: int | None, device: torch.device) -> BlockMask:
    """Return the mask of a micro-batch as blocks; built on the host, copied without waiting.

    A block of queries lists the blocks of keys with a visible key, [b, 1, s / 128, S / 128]
    integers in all.
    """
    ranges = segments.key_ranges(window, device)
    first, last = ranges.first_bs, ranges.last_s
    first_bs, last_s = segments.key_ranges(window).first_bs, ranges.last_on_host_s
    samples, queries, keys = len(segments.bounds), segments.queries, segments.keys
    # Blocks of keys between the earliest first and the latest last key of each block of queries;
    # between the two pieces of a context rank lie some that no query sees, which only costs time.
    rows = -(-queries // _BLOCK)
    columns = torch.arange(-(-keys // _BLOCK))
    padding = (0, rows * _BLOCK - queries)
    earliest = torch.nn.functional.pad(first_bs, padding, value=keys).unflatten(1, (rows, _BLOCK))
    latest = torch.nn.functional.pad(last_s, padding, value=0).unflatten(0, (rows, _BLOCK))
    seen = (columns >= (earliest.amin(2) // _BLOCK)[..., None]) & (
        columns <= (latest.amax(1) // _BLOCK)[None, :, None]
    )
    counts = seen.sum(-1, dtype=torch.int32)
    order = torch.argsort(seen.int(), dim=-1, descending=True, stable=True).to(torch.int32)

    def sees(sample: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[sample, query]) & (key <= last[query])

    assert counts.shape == (samples, rows)
    return BlockMask.from_kv_blocks(
        copied(counts.unsqueeze(1), device),
        copied(order.unsqueeze(1), device),
        BLOCK_SIZE=_BLOCK,
        mask_mod=sees,
        seq_lengths=(queries, keys),
    )
