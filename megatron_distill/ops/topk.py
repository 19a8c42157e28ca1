"""Top-k of a vocabulary that is split over ranks, with the same result for every split.

Ids are ordered by (value, lowest id first). A rank contributes its k best candidates and the
partial softmax sum of its remaining columns. Every rank makes the same choice from the same
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.kernels import kernels_run
from megatron_distill.ops.row_math import LOG2_E, descending, keys_of, packed, places_of
from megatron_distill.ops.statistics import LocalStatistics, StatisticsSpec
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import Scratch, accumulation_dtype, load_logits, row_blocks
from megatron_distill.signals import LogitRule, TopK

__all__ = [
    "Outside",
    "gather_ranks",
    "largest",
    "local_values",
    "select",
    "vocab_parallel_gather",
    "vocab_parallel_topk",
]


_UNDERFLOW = 1e-20
# Bytes of the copy that is in memory at one time on a GPU: enough rows for all its multiprocessors.
_COPIED = 2**28


def vocab_parallel_topk(
    logits: Tensor,
    k: int,
    shard: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    temperature: float = 1.0,
) -> TopK:
    """The ``k`` most probable ids of ``softmax(logits / temperature)`` over the whole vocabulary.

    Shapes: logits ``[N, V]`` over this rank's columns -> ids ``[N, k]`` int64, log-probs ``[N, k]``
    and log tail ``[N]`` fp32 (fp64 for fp64 logits). Ties go to the lowest id, so that the choice
    does not depend on the split. Nothing is differentiable; the input is not modified.

    Collective: over ``group`` one all-gather of ``8 k + 8`` bytes per token, none where it is None.

    Raises:
        ValueError: k is not between 1 and the size of the vocabulary, or the shard does not fit.
    """
    shard = shard or VocabShard(logits.shape[1], 0, logits.shape[1])
    if logits.dim() != 2 or logits.shape[1] != shard.width:
        raise ValueError(f"logits are {tuple(logits.shape)}; the shard has {shard.width} columns")
    raw = logits.detach()[:, : shard.real_width]
    (top_k,) = select(raw, LogitRule(), shard, group, k=k, temperatures=[temperature])
    return top_k


def vocab_parallel_gather(
    logits: Tensor,
    ids: Tensor,
    shard: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The logits at global ids, on every rank.

    Shapes: logits ``[N, V]`` over this rank's columns, ids ``[N, K]`` int64 -> ``[N, K]`` fp32
    (fp64 for fp64 logits). It is -inf at ids that no rank holds. Not differentiable.

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
) -> list[TopK]:
    """`vocab_parallel_topk` of raw outputs over the shard's real columns, at several temperatures.

    The ids are the same at every temperature. If not ``normalised``, log-probs are normalised over
    the top-k ids alone, without a tail; the remaining columns are not summed.

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
    local = torch.cat(
        [
            torch.nn.functional.pad(values, (0, missing), value=-math.inf),
            torch.nn.functional.pad(columns + shard.start, (0, missing)).to(dtype),
            torch.stack([rest.peak, *rest.masses], 1),
        ],
        1,
    )
    gathered = gather_ranks(local, group)
    candidates = gathered[:, :, :k].transpose(0, 1).flatten(1)
    ids = gathered[:, :, k : 2 * k].transpose(0, 1).flatten(1)
    # Candidates are ordered by rank, hence by id, and a stable sort puts the lowest id first.
    ordered, order = descending(candidates)
    ordered = ordered.double()
    chosen = ids.gather(1, order[:, :k]).long()
    found = []
    for number, temperature in enumerate(temperatures):
        peaks, masses = gathered[:, :, 2 * k].double(), gathered[:, :, 2 * k + 1 + number].double()
        outside = (peaks / temperature + masses.log()).t()
        candidates_left = ordered[:, k:] if normalised else ordered[:, :0]
        tail = torch.cat([outside, candidates_left / temperature], 1).logsumexp(1)
        inside = ordered[:, :k] / temperature
        total = torch.cat([inside, tail.unsqueeze(1)], 1).logsumexp(1)
        log_probs = inside - total.unsqueeze(1)
        tails = (tail - total).to(dtype)
        found.append(TopK(chosen, log_probs.to(dtype), tails, temperature))
    return found


def gather_ranks(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The tensors of all ranks: ``[ranks, ...]``. Collective: one all-gather over ``group``."""
    world = 1 if group is None else dist.get_world_size(group)
    if world == 1:
        return local.unsqueeze(0)
    local = local.contiguous()
    gathered = local.new_empty(world * local.shape[0], *local.shape[1:])
    dist.all_gather_into_tensor(gathered, local, group=group)
    return gathered.view(world, *local.shape)


def local_values(raw: Tensor, rule: LogitRule, shard: VocabShard, ids: Tensor) -> Tensor:
    """Logits ``[N, K]`` at the ids that this shard owns, -inf elsewhere."""
    dtype = accumulation_dtype(raw.dtype)
    if raw.shape[1] == 0:
        return torch.full(ids.shape, -math.inf, dtype=dtype, device=raw.device)
    values = rule.apply_(raw.gather(1, shard.local(ids)).to(dtype))
    return values.masked_fill_(~shard.owns(ids), -math.inf)


@dataclass(frozen=True)
class Outside:
    """Partial softmax statistics of the columns outside of given ones.

    Attributes:
        peak: ``[N]`` their largest logit, or a number far below all logits.
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
        """Sums over raw outputs ``[N, V]``; ``columns [N, K]`` are left out where ``owned``.

        No column may be left out twice.
        """
        count, width = raw.shape
        dtype = accumulation_dtype(raw.dtype)
        peak = torch.full((count,), torch.finfo(dtype).min / 4, dtype=dtype, device=raw.device)
        masses = tuple(torch.zeros_like(peak) for _ in temperatures)
        if width == 0 or count == 0:
            return cls(peak, masses)
        if raw.stride(1) == 1 and kernels_run(raw.device, raw.dtype) and rule.softcap is None:
            step = max(1, _COPIED // (width * raw.itemsize))
            for first in range(0, count, step):
                part = slice(first, first + step)
                left = _Left(columns[part], None if owned is None else owned[part])
                masses_n = [mass[part] for mass in masses]
                _measure_by_kernel(raw[part], rule, left, temperatures, peak[part], masses_n)
            return cls(peak, masses)
        scratch = Scratch(count, width, dtype, raw.device)
        for rows in row_blocks(count, width, raw.device):
            left = _Left(columns[rows], None if owned is None else owned[rows])
            logits = load_logits(rule, raw[rows], scratch, "logits")
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
        """The columns of some rows."""
        return _Left(self.columns[rows], None if self.owned is None else self.owned[rows])

    def without(self, logits: Tensor) -> Tensor:
        """A copy of the logits, -inf in the columns."""
        away = torch.full_like(self.columns, -math.inf, dtype=logits.dtype)
        if self.owned is not None:
            away.masked_fill_(~self.owned, 0.0)
        return logits.scatter_add(1, self.columns, away)

    def zero_columns_(self, exponentials: Tensor) -> Tensor:
        """Set the columns' exponentials to zero exactly: each is subtracted from itself."""
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
        torch.sub(logits, peak.unsqueeze(1), out=buffer).mul_(LOG2_E / temperature).exp2_()
        torch.sum(left.zero_columns_(buffer), 1, out=mass)
    # Where the top-k ids have nearly all mass, the remaining exponentials underflow, and the loss
    # would be infinite.
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
    outside = left.without(logits)
    peak.copy_(outside.amax(1).clamp_(min=torch.finfo(peak.dtype).min / 4))
    outside.sub_(peak.unsqueeze(1))
    for temperature, mass in zip(temperatures, masses, strict=True):
        mass.copy_((outside / temperature).exp_().sum(1))


def _measure_by_kernel(
    raw: Tensor,
    rule: LogitRule,
    left: _Left,
    temperatures: Sequence[float],
    peak: Tensor,
    masses: Sequence[Tensor],
) -> None:
    """Fill peak and masses ``[n]`` like `_measure_closely`, from a copy in the dtype of ``raw``."""
    # Imported only where Triton is installed.
    from megatron_distill.ops.kernels.measure import measure

    spec = StatisticsSpec(("student",), (), False, True, student_temperatures=tuple(temperatures))
    local = LocalStatistics.empty(spec, raw.shape[0], peak.dtype, raw.device)
    measure(local, {"student": left.without(raw)}, {"student": rule})
    peak.copy_(local.rows["student_peak"])
    for temperature, mass in zip(temperatures, masses, strict=True):
        mass.copy_(local.rows[f"student_mass@{temperature}"])


# Columns per segment of the first maximum; fewest segments and most candidates, as multiples of k.
_SEGMENT = 64
_GPU_SEGMENT = 32
_SEGMENTS_OF_K = 3
_MOST_LEFT = 4


def largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest values of each row of ``[N, V]`` and their columns, by (value, column).

    torch.topk does not specify the choice and order of equal values.
    """
    count, width = logits.shape
    if k == 0:  # a shard that is all padding
        return logits.new_empty(count, 0), logits.new_empty(count, 0, dtype=torch.int64)
    if logits.dtype == torch.float64 or width < _SEGMENTS_OF_K * k * _SEGMENT:
        return _largest_of_all(logits, k)
    if logits.device.type != "cpu":
        return _largest_of_segments(logits, k)
    values, columns = logits.new_empty(count, k), logits.new_empty(count, k, dtype=torch.int64)
    # After the maxima only a few segments are read again, so blocks may be large.
    for block in row_blocks(count, _SEGMENT * k, logits.device):
        few = _largest_of_few(logits[block], k)
        values[block], columns[block] = few or _largest_of_all(logits[block], k)
    return values, columns


def _largest_of_segments(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`largest` among the k segments with the largest maxima, without a wait for a GPU.

    In order of (maximum, lowest segment): an id outside of these has k ids before it.
    """
    count, width = logits.shape
    segments = width // _GPU_SEGMENT
    inside = segments * _GPU_SEGMENT
    maxima = logits[:, :inside].view(count, segments, _GPU_SEGMENT).amax(2)
    within = torch.arange(_GPU_SEGMENT, device=logits.device)
    columns = (_first_places(maxima, None, k).unsqueeze(2) * _GPU_SEGMENT + within).flatten(1)
    rest = torch.arange(inside, width, device=logits.device).expand(count, -1)
    columns = torch.cat([columns, rest], 1)
    columns = _first_places(logits.gather(1, columns), columns, k)
    return logits.gather(1, columns), columns


def _first_places(values: Tensor, places: Tensor | None, k: int) -> Tensor:
    """The places ``[N, k]`` of the k largest of ``[N, C]``, by (value, lowest place).

    Places are int64 ``[N, C]``; None: the columns. NaN comes first.
    """
    if places is None:
        places = torch.arange(values.shape[1], device=values.device)
    keys = keys_of(values).masked_fill_(values.isnan(), torch.iinfo(torch.int32).max)
    return places_of(packed(keys.bitwise_not_(), places).topk(k, 1, largest=False).values)


def _kth_largest(values: Tensor, k: int) -> Tensor:
    """The k-th largest of each row ``[N, C]``: ``[N, 1]``. On a CPU numpy is ten times as fast."""
    place = values.shape[1] - k
    return torch.from_numpy(np.partition(values.numpy(), place, axis=1)[:, place : place + 1])


def _largest_of_few(logits: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """`largest` among the segments whose maximum is at least the k-th largest maximum.

    None if a row has too many candidates (equal logits), or a NaN, which no comparison finds.
    """
    count, width = logits.shape
    segments = width // _SEGMENT
    parts = logits[:, : segments * _SEGMENT].view(count, segments, _SEGMENT)
    rest = logits[:, segments * _SEGMENT :]
    maxima = _maxima(parts)
    if maxima.isnan().any() or rest.isnan().any():
        return None
    least = _kth_largest(maxima, k)
    chosen = torch.from_numpy(np.flatnonzero((maxima >= least).numpy()))
    if len(chosen) > _MOST_LEFT * k * count:
        return None
    row, segment = chosen // segments, chosen % segments
    if parts.is_contiguous():
        candidates = parts.flatten(0, 1).index_select(0, chosen)
    else:
        candidates = parts[row, segment]
    column = segment * _SEGMENT
    if width > segments * _SEGMENT:
        lacking = _SEGMENT - rest.shape[1]
        rest = torch.nn.functional.pad(rest, (0, lacking), value=-math.inf)
        row = torch.cat([row, torch.arange(count)])
        column = torch.cat([column, column.new_full((count,), segments * _SEGMENT)])
        candidates = torch.cat([candidates, rest])
    reaches = candidates.to(least.dtype).numpy() >= least[row].numpy()
    place = torch.from_numpy(np.flatnonzero(reaches))
    part, offset = place // _SEGMENT, place % _SEGMENT
    row, column, value = row[part], column[part] + offset, candidates.flatten()[place]
    if width > segments * _SEGMENT:
        row, order = row.sort(stable=True)
        column, value = column[order], value[order]
    columns = _largest_of_ragged(row, column, value, count, k)
    return None if columns is None else (logits.gather(1, columns), columns)


def _maxima(parts: Tensor) -> Tensor:
    """Maxima over the last dimension of ``[N, S, W]``, in the dtype of statistics.

    Blocks are converted first: torch compares narrower dtypes slowly.
    """
    dtype = accumulation_dtype(parts.dtype)
    if parts.dtype == dtype:
        return parts.amax(2)
    count, segments, width = parts.shape
    maxima = parts.new_empty(count, segments, dtype=dtype)
    scratch = Scratch(count, segments * width, dtype, parts.device)
    for rows in row_blocks(count, segments * width, parts.device):
        block = parts[rows]
        wide = scratch.take("wide", len(block)).view(block.shape).copy_(block)
        torch.amax(wide, 2, out=maxima[rows])
    return maxima


def _largest_of_ragged(
    row: Tensor, column: Tensor, value: Tensor, count: int, k: int
) -> Tensor | None:
    """Columns ``[N, k]`` of `largest` among candidates ``[M]``, which are ordered by row.

    None if a row has too many or not enough.
    """
    found = row.bincount(minlength=count)
    most = int(found.max())
    if most > _MOST_LEFT * k or int(found.min()) < k:
        return None
    padded = np.full((count, most), np.iinfo(np.int64).max)
    padded[np.arange(most) < found.numpy()[:, None]] = packed(keys_of(value).bitwise_not_(), column)
    padded.sort(axis=1)
    return places_of(torch.from_numpy(padded[:, :k]))


def _largest_of_all(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`largest` by torch.topk, with ties moved to the lowest columns."""
    values, columns = logits.topk(k, 1)
    return _ordered(values, _lowest_columns(logits, values, columns))


def _ordered(values: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """By (value, lowest column)."""
    columns, order = columns.sort(1)
    values, order = descending(values.gather(1, order))
    return values, columns.gather(1, order)


def _lowest_columns(logits: Tensor, values: Tensor, columns: Tensor) -> Tensor:
    """The columns, with those of the least value replaced by the lowest columns of that value."""
    least, width = values[:, -1:], logits.shape[1]
    # Columns are exact in fp32 up to 2^24.
    reversed_columns = torch.arange(width, 0, -1, dtype=torch.float32, device=logits.device)
    ties = torch.where(logits == least, reversed_columns, 0.0).topk(values.shape[1], 1).values
    lowest = (width - ties).long()
    is_least = values == least
    return torch.where(is_least, lowest.gather(1, (is_least.cumsum(1) - 1).clamp_(min=0)), columns)
