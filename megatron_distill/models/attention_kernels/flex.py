"""Soft-capped attention on CUDA in 16 bits: FlexAttention over blocks of a document mask.

FlexAttention (arXiv 2412.05496) compiles the soft cap into its kernel. It visits only blocks of 128
queries and 128 keys in which some query sees some key. Which blocks these are follows from the
documents' lengths on the host. Within a block the mask is computed from each query's first and last
visible key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from megatron_distill.models.attention_kernels.rule import AttentionRule
from megatron_distill.runtime.segments import KeyRanges, Segments, copied

# FlexAttention is imported where it is used: it loads torch's compiler, which takes a process most
# of a second.
if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_BLOCK = 128
_SMALLEST_HEAD = 16  # of the products of Triton, which the kernel is compiled to
# Kernels for the shapes, caps and passes of all models of a process. Beyond its own limit of 8
# torch goes on without compiling, and all scores of a layer are in memory.
_MOST_KERNELS = 64


def takes(query: Tensor, rule: AttentionRule) -> bool:
    """Whether the kernel computes this rule on these queries."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and rule.softcap is not None
        and not rule.dropout
        and query.shape[-1] >= _SMALLEST_HEAD
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule
) -> Tensor:
    """Attend on CUDA with soft-capped scores; shapes as in `varlen.attend`."""
    return attend_with(_compiled(), query, key, value, segments, rule)


def attend_with(
    kernel: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    rule: AttentionRule,
) -> Tensor:
    """Attend through a form of `flex_attention`, compiled or not."""
    from torch._dynamo import config as dynamo_config

    softcap = rule.softcap
    assert softcap is not None

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    mask = segments.derived(
        ("flex", rule.window, query.device),
        partial(block_mask, segments, rule.window, query.device),
    )
    # Student and teacher may have other caps and scales. Dynamo makes a number that changes a
    # tensor, with which it cannot trace the gradient of `capped`.
    with dynamo_config.patch(specialize_float=True, recompile_limit=_MOST_KERNELS):
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
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def block_mask(segments: Segments, window: int | None, device: torch.device) -> BlockMask:
    """Return the mask of a micro-batch as blocks; built on the host, copied without waiting.

    A block of queries lists the blocks of keys that it sees in part, and those that it sees whole,
    which need no mask. These are integers [b, 1, s / 128, S / 128] in all.
    """
    from torch.nn.attention.flex_attention import BlockMask

    ranges = segments.key_ranges(window, device)
    first, last = ranges.first_bs, ranges.last_s
    queries, keys = segments.queries, segments.keys

    def sees(sample: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[sample, query]) & (key <= last[query])

    seen, whole = _blocks(segments.key_ranges(window), keys)
    (part_counts, parts), (whole_counts, wholes) = (
        [copied(listed, device) for listed in _lists(chosen)] for chosen in (seen & ~whole, whole)
    )
    return BlockMask.from_kv_blocks(
        part_counts,
        parts,
        whole_counts,
        wholes,
        BLOCK_SIZE=_BLOCK,
        mask_mod=sees,
        seq_lengths=(queries, keys),
    )


def _blocks(ranges: KeyRanges, keys: int) -> tuple[Tensor, Tensor]:
    """Return which blocks some query sees, and which all queries see whole, bool [b, 1, q, k].

    Where a block of queries spans both pieces of a context rank, the blocks of keys between them
    count as seen, which only costs time.
    """
    padding = (0, -ranges.last_s.shape[0] % _BLOCK)
    first = functional.pad(ranges.first_bs, padding, value=keys).unflatten(1, (-1, _BLOCK))
    # Rows past the last query see no key: they add no block, and leave none whole.
    latest = functional.pad(ranges.last_s, padding, value=-1).unflatten(0, (-1, _BLOCK))
    start = torch.arange(0, keys, _BLOCK)
    stop = (start + _BLOCK).clamp_max(keys)
    seen = (stop > first.amin(2)[..., None]) & (start <= latest.amax(1)[:, None])
    whole = (start >= first.amax(2)[..., None]) & (stop - 1 <= latest.amin(1)[:, None])
    return seen.unsqueeze(1), (whole & (stop - start == _BLOCK)).unsqueeze(1)


def _lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries has, and their numbers first."""
    order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)
