"""The most probable ids of a vocabulary that is split over ranks, the same for every split.

Ids are ordered by (value, lowest id first). A rank sends its own best candidates and what its other
columns sum up to; every rank then makes the same choice from the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.blocks import Scratch, accumulation_dtype, row_blocks
from megatron_distill.ops.exponentials import exponentiate
from megatron_distill.ops.largest import largest
from megatron_distill.ops.logits import LogitRule
from megatron_distill.ops.ordering import descending
from megatron_distill.ops.vocab import VocabShard

_UNDERFLOW = 1e-20

__all__ = [
    "Kept",
    "Outside",
    "gather_ranks",
    "select",
    "vocab_parallel_gather",
    "vocab_parallel_topk",
]


class Kept(NamedTuple):
    """The most probable ids of each token, most probable first.

    Attributes:
        ids: ``[N, K]`` int64.
        log_probs: ``[N, K]`` fp32, normalised over the whole vocabulary.
        log_tail: ``[N]`` fp32, log of the mass of all other ids; -inf if there are none.
    """

    ids: Tensor
    log_probs: Tensor
    log_tail: Tensor


def vocab_parallel_topk(
    logits: Tensor,
    k: int,
    shard: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    temperature: float = 1.0,
) -> Kept:
    """The ``k`` most probable ids of ``softmax(logits / temperature)`` over the whole vocabulary.

    Shapes: logits ``[N, V]`` over this rank's columns -> ids ``[N, k]`` int64, log-probs ``[N, k]``
    and log tail ``[N]`` fp32 (fp64 for fp64 logits). Equal logits go by the lowest id, so that the
    choice does not depend on the split. Nothing is differentiable; the input is not modified.

    Collective: over ``group`` one all-gather of ``8 k + 8`` bytes per token, none where it is None.

    Raises:
        ValueError: k is not between 1 and the size of the vocabulary, or the shard does not fit.
    """
    shard = shard or VocabShard(logits.shape[1], 0, logits.shape[1])
    if logits.dim() != 2 or logits.shape[1] != shard.width:
        raise ValueError(f"logits are {tuple(logits.shape)}; the shard has {shard.width} columns")
    raw = logits.detach()[:, : shard.real_width]
    (kept,) = select(raw, LogitRule(), shard, group, k=k, temperatures=[temperature])
    return kept


def vocab_parallel_gather(
    logits: Tensor,
    ids: Tensor,
    shard: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The logits at global ids, on every rank.

    Shapes: logits ``[N, V]`` over this rank's columns, ids ``[N, K]`` int64 -> ``[N, K]`` fp32
    (fp64 for fp64 logits); -inf at ids that no rank holds. Not differentiable.

    Collective: over ``group`` one all-gather of 4 bytes per id; none where ``group`` is None.

    Raises:
        ValueError: the shard does not fit.
    """
    shard = shard or VocabShard(logits.shape[1], 0, logits.shape[1])
    if logits.dim() != 2 or logits.shape[1] != shard.width:
        raise ValueError(f"logits are {tuple(logits.shape)}; the shard has {shard.width} columns")
    raw = logits.detach()[:, : shard.real_width]
    return gather_ranks(local_values(raw, LogitRule(), shard, ids), group).amax(0)


def select(
    raw: Tensor,
    rule: LogitRule,
    shard: VocabShard,
    group: dist.ProcessGroup | None,
    *,
    k: int,
    temperatures: Sequence[float],
    normalised: bool = True,
) -> list[Kept]:
    """`vocab_parallel_topk` of raw outputs over the shard's real columns, at several temperatures.

    The ids are the same at every temperature. If not ``normalised``, log-probs are so over the kept
    ids alone and nothing is left for a tail: the other columns need not be summed up.

    Collective: one all-gather over ``group`` of ``8 k`` bytes per token and 4 more, and 4 per
    temperature.
    """
    if not 1 <= k <= shard.size:
        raise ValueError(f"k is {k}; it must be between 1 and the vocabulary of {shard.size}")
    dtype = accumulation_dtype(raw.dtype)
    values, columns = largest(raw, min(k, raw.shape[1]))
    values = rule.apply_(values.to(dtype))
    measured = raw if normalised else raw[:, :0]
    rest = Outside.measure(measured, rule, columns, None, temperatures)
    missing = k - values.shape[1]
    packet = torch.cat(
        [
            torch.nn.functional.pad(values, (0, missing), value=-math.inf),
            torch.nn.functional.pad(columns + shard.start, (0, missing)).to(dtype),
            torch.stack([rest.peak, *rest.masses], 1),
        ],
        1,
    )
    gathered = gather_ranks(packet, group)
    candidates = gathered[:, :, :k].transpose(0, 1).flatten(1)
    ids = gathered[:, :, k : 2 * k].transpose(0, 1).flatten(1)
    # Ranks stand in the order of their ids, and so do equal values within one: what keeps their
    # order keeps the lowest id first.
    ordered, order = descending(candidates)
    ordered = ordered.double()
    chosen = ids.gather(1, order[:, :k]).long()
    kept = []
    for number, temperature in enumerate(temperatures):
        peaks, masses = gathered[:, :, 2 * k].double(), gathered[:, :, 2 * k + 1 + number].double()
        others = (peaks / temperature + masses.log()).t()
        candidates_left = ordered[:, k:] if normalised else ordered[:, :0]
        tail = torch.cat([others, candidates_left / temperature], 1).logsumexp(1)
        inside = ordered[:, :k] / temperature
        total = torch.cat([inside, tail.unsqueeze(1)], 1).logsumexp(1)
        log_probs = inside - total.unsqueeze(1)
        kept.append(Kept(chosen, log_probs.to(dtype), (tail - total).to(dtype)))
    return kept


def gather_ranks(packet: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The packets of all ranks: ``[ranks, ...]``. Collective: one all-gather over ``group``."""
    world = 1 if group is None else dist.get_world_size(group)
    if world == 1:
        return packet.unsqueeze(0)
    packet = packet.contiguous()
    gathered = packet.new_empty(world * packet.shape[0], *packet.shape[1:])
    dist.all_gather_into_tensor(gathered, packet, group=group)
    return gathered.view(world, *packet.shape)


def local_values(raw: Tensor, rule: LogitRule, shard: VocabShard, ids: Tensor) -> Tensor:
    """Logits ``[N, K]`` at the ids that this shard owns, -inf at the others."""
    dtype = accumulation_dtype(raw.dtype)
    if raw.shape[1] == 0:
        return torch.full(ids.shape, -math.inf, dtype=dtype, device=raw.device)
    values = rule.apply_(raw.gather(1, shard.local(ids)).to(dtype))
    return values.masked_fill_(~shard.owns(ids), -math.inf)


@dataclass(frozen=True)
class Outside:
    """What the columns sum up to that are not among given ones.

    Attributes:
        peak: ``[N]`` their largest logit, or the lowest number there is.
        masses: per temperature, ``[N]`` sum of ``e^((z - peak) / T)`` over them.
    """

    peak: Tensor
    masses: tuple[Tensor, ...]

    @classmethod
    def measure(
        cls,
        raw: Tensor,
        rule: LogitRule,
        columns: Tensor,
        owned: Tensor | None,
        temperatures: Sequence[float],
    ) -> Outside:
        """Sweep over raw outputs ``[N, V]``; ``columns [N, K]`` are left out where ``owned``.

        No column may be left out twice.
        """
        count, width = raw.shape
        dtype = accumulation_dtype(raw.dtype)
        peak = torch.full((count,), torch.finfo(dtype).min / 4, dtype=dtype, device=raw.device)
        masses = tuple(torch.zeros_like(peak) for _ in temperatures)
        if width == 0 or count == 0:
            return cls(peak, masses)
        scratch = Scratch(count, width, dtype, raw.device)
        for rows in row_blocks(count, width, raw.device):
            left = _Left(columns[rows], None if owned is None else owned[rows])
            logits = rule.load(raw[rows], scratch, "logits")
            parts = [mass[rows] for mass in masses]
            if raw.device.type == "cpu":
                _measure(logits, left, temperatures, peak[rows], parts, scratch)
            else:
                _measure_closely(logits, left, temperatures, peak[rows], parts)
        return cls(peak, masses)


@dataclass(frozen=True)
class _Left:
    """Columns ``[n, K]`` to leave out, where they are owned."""

    columns: Tensor
    owned: Tensor | None

    def rows(self, rows: Tensor) -> _Left:
        """Those of some rows."""
        return _Left(self.columns[rows], None if self.owned is None else self.owned[rows])

    def without(self, logits: Tensor) -> Tensor:
        """A copy of the logits, -inf in the columns."""
        away = torch.full_like(self.columns, -math.inf, dtype=logits.dtype)
        if self.owned is not None:
            away.masked_fill_(~self.owned, 0.0)
        return logits.scatter_add(1, self.columns, away)

    def cut_(self, exponentials: Tensor) -> Tensor:
        """Take the columns' exponentials away: exactly, since each is subtracted from itself."""
        own = exponentials.gather(1, self.columns)
        if self.owned is not None:
            own.masked_fill_(~self.owned, 0.0)
        return exponentials.scatter_add_(1, self.columns, own.neg_())


def _measure(
    logits: Tensor,
    left: _Left,
    temperatures: Sequence[float],
    peak: Tensor,
    masses: Sequence[Tensor],
    scratch: Scratch,
) -> None:
    """Fill peak and masses ``[n]`` of a block, most rows relative to the peak of all columns."""
    peak.copy_(logits.amax(1).clamp_(min=torch.finfo(peak.dtype).min / 4))
    for temperature, mass in zip(temperatures, masses, strict=True):
        buffer = scratch.take("exponentials", logits.shape[0])
        exponentiate(logits, peak, temperature, buffer)
        torch.sum(left.cut_(buffer), 1, out=mass)
    # A student that is sure of the kept ids has others that underflow, and an infinite loss.
    small = torch.stack([mass < _UNDERFLOW for mass in masses]).any(0)
    rows = small.nonzero().squeeze(1)
    if rows.numel():
        own, parts = peak[rows], [mass[rows] for mass in masses]
        _measure_closely(logits[rows], left.rows(rows), temperatures, own, parts)
        peak[rows] = own
        for mass, part in zip(masses, parts, strict=True):
            mass[rows] = part


def _measure_closely(
    logits: Tensor,
    left: _Left,
    temperatures: Sequence[float],
    peak: Tensor,
    masses: Sequence[Tensor],
) -> None:
    """Fill peak and masses ``[n]`` relative to the peak of the columns that are not left out."""
    others = left.without(logits)
    peak.copy_(others.amax(1).clamp_(min=torch.finfo(peak.dtype).min / 4))
    others.sub_(peak.unsqueeze(1))
    for temperature, mass in zip(temperatures, masses, strict=True):
        mass.copy_((others / temperature).exp_().sum(1))
