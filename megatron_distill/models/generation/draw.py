"""The next token from vocabulary shards, without a gathered vocabulary.

A draw is the largest of logit / temperature plus Gumbel noise (Gumbel-max: Maddison, Tarlow and
Minka, arXiv 1411.0030, section 2). The noise of a token is a hash of (seed, sample, position, token
id). So a draw is the same in any layout and batch.

Shapes: b rows, V real columns of this rank's shard.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.models.generation.request import Sampling
from megatron_distill.ops import VocabShard
from megatron_distill.ops.split_mix import INCREMENT, mix_, mixed_integer, shifted, signed

__all__ = ["Drawn", "draw", "draw_keys", "gumbel_noise", "row_key"]


class Drawn(NamedTuple):
    """Tokens, int64 [b], and their log-probabilities under the uncut softmax, fp64 [b]."""

    ids_b: Tensor
    log_probs_b: Tensor


def row_key(seed: int, sample: int) -> int:
    """Return the part of the key of draws that a row has at every position, as a signed 64 bits."""
    return signed(mixed_integer(mixed_integer(seed + INCREMENT) ^ (sample * INCREMENT % 2**64)))


def draw_keys(row_keys_b: Tensor, positions_b: Tensor) -> Tensor:
    """Return the keys of draws, int64 [b], from `row_key` and the position of the drawn token."""
    return mix_(row_keys_b + positions_b * signed(INCREMENT))


def gumbel_noise(keys_b: Tensor, *, start: int, count: int) -> Tensor:
    """Return standard Gumbel noise of tokens [start, start + count), fp64 [b, count]."""
    ids_V = torch.arange(start + 1, start + count + 1, device=keys_b.device)
    bits_bV = mix_(keys_b[:, None] + ids_V * signed(INCREMENT))
    # 53 bits, in the middle of their intervals: never 0 or 1.
    uniform_bV = shifted(bits_bV, 11).to(torch.float64).add_(0.5).mul_(2.0**-53)
    return uniform_bV.log_().neg_().log_().neg_()


def draw(
    logits_bV: Tensor,
    *,
    shard: VocabShard,
    group: dist.ProcessGroup,
    sampling: Sampling,
    keys_b: Tensor,
) -> Drawn:
    """Draw one token per row from this rank's real columns, fp32 [b, V].

    keys_b: of `draw_keys`. A logit that is NaN makes its row's log-probability NaN.

    Collective: `group`, one all-gather of 32 bytes per row. For `top_p` and `min_p` one more of 8.
    For `top_k` and `top_p` three all-reduces of 16 KiB per row each and an all-gather of 8 bytes.
    """
    chosen_bV = logits_bV
    if sampling.temperature > 0:
        chosen_bV = logits_bV.to(torch.float64)
        if sampling.temperature != 1.0:
            chosen_bV = chosen_bV / sampling.temperature
        hidden_bV = _cut(logits_bV, group=group, sampling=sampling)
        noise_bV = gumbel_noise(keys_b, start=shard.start, count=logits_bV.shape[1])
        chosen_bV = noise_bV.add_(chosen_bV)
        if hidden_bV is not None:
            chosen_bV.masked_fill_(hidden_bV, -math.inf)
    if group.size() == 1:
        score_b, ids_b = _largest(chosen_bV)
        largest_b = score_b if chosen_bV is logits_bV else None
        return Drawn(ids_b, _log_probs(logits_bV, ids_b, largest_b=largest_b).to(torch.float64))
    if not logits_bV.shape[1]:  # a shard of padding
        columns_b = torch.zeros_like(keys_b)
        score_b = own_b = sum_b = logits_bV.new_full(keys_b.shape, -math.inf, dtype=torch.float64)
    else:
        score_b, columns_b = _largest(chosen_bV)
        if chosen_bV is logits_bV:  # greedy: `logsumexp`, whose largest logit is known
            own_b = score_b
            sum_b = (logits_bV - own_b[:, None]).exp_().sum(dim=1).log_().add_(own_b)
        else:
            own_b = logits_bV.gather(1, columns_b[:, None])[:, 0]
            sum_b = logits_bV.logsumexp(dim=1)
    ids_b = columns_b + shard.start
    mine_b4 = torch.stack([part.to(torch.float64) for part in (score_b, ids_b, own_b, sum_b)], 1)
    ranks_tb4 = _gathered(mine_b4, group)
    best_b = ranks_tb4[..., 0].argmax(dim=0)  # the first rank of equal ones: the lowest ids
    best_b4 = ranks_tb4.gather(0, best_b[None, :, None].expand(1, -1, 4))[0]
    return Drawn(best_b4[:, 1].to(torch.int64), best_b4[:, 2] - ranks_tb4[..., 3].logsumexp(dim=0))


def _log_probs(logits_bV: Tensor, ids_b: Tensor, *, largest_b: Tensor | None) -> Tensor:
    """Return log-probabilities [b] of ids; largest_b: each row's largest logit if it is the id's.

    A CPU computes the sum alone. Exponentials below the least normal number cost it some ten times
    as much as others: those that change no digit of the sum are taken as e^-80 of its largest one.
    """
    if logits_bV.device.type != "cpu":
        return logits_bV.log_softmax(dim=1).gather(1, ids_b[:, None])[:, 0]
    peak_b = logits_bV.amax(dim=1) if largest_b is None else largest_b
    shares_bV = (logits_bV - peak_b[:, None]).clamp_(min=-80.0).exp_()
    found_b = shares_bV.sum(dim=1).log_().neg_()
    if largest_b is not None:
        return found_b
    return found_b.add_(logits_bV.gather(1, ids_b[:, None])[:, 0] - peak_b)


# Columns of a block in `_largest`: of some thousand columns, about as many as there are blocks.
_BLOCK = 64


def _largest(values_bV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest value of each row and its column, the first of equal ones; V is not 0.

    A CPU finds places some ten times slower than values. There it finds the block of columns with
    the largest value, and the place in this block alone.
    """
    width = values_bV.shape[1]
    if values_bV.device.type != "cpu" or width < _BLOCK:
        value_b, column_b = values_bV.max(dim=1)
        return value_b, column_b
    whole = width - width % _BLOCK
    blocks_bBK = values_bV[:, :whole].unflatten(1, (-1, _BLOCK))
    block_b1 = blocks_bBK.amax(2).argmax(1, keepdim=True)
    near_b1K = blocks_bBK.gather(1, block_b1[:, :, None].expand(-1, 1, _BLOCK))
    value_b, place_b = near_b1K[:, 0].max(dim=1)
    column_b = place_b.add_(block_b1[:, 0], alpha=_BLOCK)
    if whole == width:
        return value_b, column_b
    last_b, place_b = values_bV[:, whole:].max(dim=1)
    is_last_b = last_b > value_b
    return last_b.where(is_last_b, value_b), place_b.add_(whole).where(is_last_b, column_b)


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(ranks, part.contiguous(), group=group)
    return torch.stack(ranks)


def _cut(logits_bV: Tensor, *, group: dist.ProcessGroup, sampling: Sampling) -> Tensor | None:
    """Return the columns that `sampling` excludes, bool [b, V]; None: no column."""
    hidden_bV: Tensor | None = None
    if sampling.top_k is not None:
        counts_bV = torch.ones_like(logits_bV, dtype=torch.int64)
        target_b = counts_bV.new_full((logits_bV.shape[0],), sampling.top_k)
        hidden_bV = _beyond(logits_bV, counts_bV, target_b, group=group)
    if sampling.top_p == 1.0 and sampling.min_p == 0.0:
        return hidden_bV
    peak_b = (
        logits_bV.amax(1)
        if logits_bV.shape[1]
        else logits_bV.new_full(logits_bV.shape[:1], -math.inf)
    )
    if group.size() > 1:
        peak_b = _gathered(peak_b, group).amax(0)
    gaps_bV = (logits_bV.to(torch.float64) - peak_b[:, None]) / sampling.temperature
    if sampling.top_p < 1.0:
        # Integers, so that sums do not depend on their order; 2^38 of them fit any vocabulary.
        masses_bV = gaps_bV.exp().mul_(2.0**38).round_().to(torch.int64)
        if hidden_bV is not None:
            masses_bV.masked_fill_(hidden_bV, 0)
        total_b = masses_bV.sum(1)
        if group.size() > 1:
            dist.all_reduce(total_b, group=group)
        target_b = (total_b.to(torch.float64) * sampling.top_p).ceil().to(torch.int64).clamp(min=1)
        beyond_bV = _beyond(logits_bV, masses_bV, target_b, group=group)
        hidden_bV = beyond_bV if hidden_bV is None else hidden_bV | beyond_bV
    if sampling.min_p > 0.0:
        unlikely_bV = gaps_bV < math.log(sampling.min_p)
        hidden_bV = unlikely_bV if hidden_bV is None else hidden_bV | unlikely_bV
    return hidden_bV


_DIGITS = (21, 10, 0)  # bit positions of three digits of an fp32 number
_BASE = 2**11


def _beyond(
    logits_bV: Tensor, weights_bV: Tensor, target_b: Tensor, *, group: dist.ProcessGroup
) -> Tensor:
    """Return the columns outside of the smallest set of largest logits with a weight of `target_b`.

    weights: int64, not negative. A radix selection on the bits of fp32. Each of three rounds sums
    the weights by digit, and finds the digit at which the sum from above reaches the target. Among
    equal logits at the limit the lowest ids are inside.

    Collective: as in `draw`.
    """
    keys_bV = _ordered_bits(logits_bV)
    missing_b = target_b.clone()
    inside_bV = torch.ones_like(keys_bV, dtype=torch.bool)  # equal to the limit so far
    limit_b = torch.zeros_like(target_b)
    for shift in _DIGITS:
        digits_bV = (keys_bV >> shift) & (_BASE - 1)
        sums_bD = torch.zeros(
            (keys_bV.shape[0], _BASE), dtype=torch.int64, device=keys_bV.device
        ).scatter_add_(1, digits_bV, weights_bV * inside_bV)
        if group.size() > 1:
            dist.all_reduce(sums_bD, group=group)
        from_above_bD = sums_bD.flip(1).cumsum(1).flip(1)
        # The largest digit whose sum from above is enough; if none is, the smallest in use.
        enough_bD = from_above_bD >= missing_b[:, None]
        found_b = enough_bD.sum(1).sub_(1)
        lowest_b = (sums_bD > 0).to(torch.int8).argmax(1)
        digit_b = torch.where(found_b < 0, lowest_b, found_b)
        above_b = (from_above_bD - sums_bD).gather(1, digit_b[:, None])[:, 0]
        missing_b = missing_b - above_b
        inside_bV &= digits_bV == digit_b[:, None]
        limit_b = limit_b | (digit_b << shift)
    # Weights at the limit, in the order of ids: those of lower ranks come first.
    at_limit_bV = weights_bV * inside_bV
    before_bV = at_limit_bV.cumsum(1) - at_limit_bV
    if group.size() > 1:
        own_b = at_limit_bV.sum(1)
        before_bV = before_bV + _gathered(own_b, group)[: group.rank()].sum(0)[:, None]
    return (keys_bV < limit_b[:, None]) | (inside_bV & (before_bV >= missing_b[:, None]))


def _ordered_bits(logits_bV: Tensor) -> Tensor:
    """Return non-negative int64 numbers in the order of fp32 logits; both zeros are equal."""
    bits_bV = (logits_bV.float() + 0.0).view(torch.int32).to(torch.int64)
    return torch.where(bits_bV < 0, ~bits_bV & 0xFFFFFFFF, bits_bV | 0x80000000)
