"""The head and tail of a distribution for adaptive KL, exact for any split of the vocabulary.

The tail is the least probable ids whose masses, added up from the smallest, stay within a bound;
ties go by the lowest id. The boundary is found by a radix search, eight bits of the logits at a
time. The masses of each bin are summed over the ranks. Masses are integers there, whose sums are
the same bits in any order: of a GPU's atomics, and of any split. On one CPU rank the vocabulary is
sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.row_math import keys_of, places_by
from megatron_distill.ops.topk import gather_ranks

__all__ = ["TeacherBlock", "head_share"]

_BITS = 8
_BINS = 1 << _BITS
# Integer mass of probability one: finer than fp32 probabilities, and its multiples fit in int64.
_ONE = 1 << 52


@dataclass(frozen=True)
class TeacherBlock:
    """Teacher logits and both models' probabilities of some tokens, ``[n, V]`` of this shard."""

    rows: slice
    logits: Tensor
    teacher: Tensor
    student: Tensor


def head_share(
    blocks: Callable[[], Iterable[TeacherBlock]],
    tokens: int,
    *,
    head_mass: float,
    group: dist.ProcessGroup | None,
    device: torch.device,
    shared_class: Tensor | None = None,
) -> Tensor:
    """The head's share ``[N, 1]`` of ``sum |p - q|``, fp64; one half where p and q are equal.

    ``shared_class``: the teacher's logit ``[N]`` of a class of which each rank's last column is an
    equal part. It is the last class in the order of ids.

    Collective: six all-gathers over ``group``: four of 2 KiB per token, two of 8 and 16 bytes.
    """
    gaps = torch.zeros(tokens, 2, dtype=torch.float64, device=device)
    if group is not None and shared_class is not None:
        blocks = partial(_with_whole_class, blocks, shared_class, group)
    if group is None and device.type == "cpu":
        for block in blocks():
            gaps[block.rows] = _gaps_alone(block, head_mass)
    else:
        boundary = _Boundary.find(blocks, tokens, head_mass=head_mass, group=group, device=device)
        for block in blocks():
            gap = (block.teacher - block.student).abs_()
            gaps[block.rows] = _split(gap, boundary.is_tail(block))
    head, tail = gather_ranks(gaps, group).sum(0).unbind(1)
    share = torch.where(head + tail > 0, head / (head + tail).clamp_min(1e-300), 0.5)
    return share.unsqueeze(1)


def _with_whole_class(
    blocks: Callable[[], Iterable[TeacherBlock]], logit: Tensor, group: dist.ProcessGroup
) -> Iterator[TeacherBlock]:
    """The blocks with a class that all ranks share whole on the last rank, and on no other.

    A part of it would have a lower place in the order than the class.
    """
    ranks = dist.get_world_size(group)
    is_last = dist.get_rank(group) == ranks - 1
    for block in blocks():
        logits, teacher, student = (
            values[:, :-1] for values in (block.logits, block.teacher, block.student)
        )
        if is_last:
            whole = logit[block.rows].to(logits.dtype).unsqueeze(1)
            logits = torch.cat([logits, whole], 1)
            teacher = torch.cat([teacher, block.teacher[:, -1:] * ranks], 1)
            student = torch.cat([student, block.student[:, -1:] * ranks], 1)
        yield TeacherBlock(block.rows, logits, teacher, student)


def _split(gap: Tensor, is_tail: Tensor) -> Tensor:
    """Sums ``[n, 2]`` fp64 of the head and of the tail; overwrites the gaps ``[n, V]``."""
    tail = torch.where(is_tail, gap, 0.0).sum(1)
    return torch.stack([gap.masked_fill_(is_tail, 0.0).sum(1), tail], 1).double()


def _gaps_alone(block: TeacherBlock, head_mass: float) -> Tensor:
    """`_split` of the gaps on a CPU, by sorting the whole vocabulary.

    The sort takes less time than one sum of masses by bin.
    """
    ids = places_by(keys_of(block.logits))
    is_tail = block.teacher.gather(1, ids).double().cumsum(1) <= head_mass
    gap = (block.teacher - block.student).abs_()
    return _split(gap.gather(1, ids), is_tail)


def _integer(probabilities: Tensor) -> Tensor:
    return probabilities.double().mul_(_ONE).round_().long()


@dataclass(frozen=True)
class _Boundary:
    """Keys below ``key [N]`` are tail, and so are the first ``ties [N]`` keys equal to it here."""

    key: Tensor
    ties: Tensor

    @classmethod
    def find(
        cls,
        blocks: Callable[[], Iterable[TeacherBlock]],
        tokens: int,
        *,
        head_mass: float,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> _Boundary:
        bound = int(head_mass * _ONE)
        below = torch.zeros(tokens, 1, dtype=torch.int64, device=device)
        prefix = torch.zeros(tokens, 1, dtype=torch.int32, device=device)
        tied = below
        for shift in range(32 - _BITS, -1, -_BITS):
            masses = torch.zeros(tokens, _BINS, dtype=torch.int64, device=device)
            for block in blocks():
                keys, mass = keys_of(block.logits), _integer(block.teacher)
                if shift == 32 - _BITS:
                    bins = (keys >> shift) + _BINS // 2
                else:
                    bins = (keys >> shift) & (_BINS - 1)
                    mass.masked_fill_((keys >> (shift + _BITS)) != prefix[block.rows], 0)
                masses[block.rows] = masses[block.rows].scatter_add_(1, bins.long(), mass)
            masses = gather_ranks(masses, group).sum(0)
            reached = below + masses.cumsum(1)
            chosen = (reached <= bound).sum(1, keepdim=True).clamp_(max=_BINS - 1)
            tied = masses.gather(1, chosen)
            below = reached.gather(1, chosen) - tied
            first = shift == 32 - _BITS
            prefix = (chosen - _BINS // 2).int() if first else prefix * _BINS + chosen.int()
        counts = torch.zeros(tokens, dtype=torch.int64, device=device)
        for block in blocks():
            counts[block.rows] = (keys_of(block.logits) == prefix[block.rows]).sum(1)
        every = gather_ranks(counts, group)
        # Equal logits have equal masses.
        each = tied.squeeze(1) // every.sum(0).clamp(min=1)
        room = (bound - below.squeeze(1)).clamp_(min=0) // each.clamp(min=1)
        fitting = torch.minimum(room, every.sum(0))
        rank = 0 if group is None else dist.get_rank(group)
        ties = (fitting - every[:rank].sum(0)).clamp(min=0)
        return cls(prefix, ties)

    def is_tail(self, block: TeacherBlock) -> Tensor:
        keys, boundary = keys_of(block.logits), self.key[block.rows]
        is_tied = keys == boundary
        is_early = is_tied.cumsum(1) <= self.ties[block.rows].unsqueeze(1)
        return (keys < boundary) | (is_tied & is_early)
