"""Sums over all tokens, and over the disjoint parts that a caller splits them into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Partition", "sum_tokens", "weighted_rows"]


@dataclass(frozen=True)
class Partition:
    """A split of the tokens into parts, each of which gets sums of its own.

    Attributes:
        ids: int64 ``[N]``, the part of each token, from 0.
        parts: how many there are, those without a token included.
    """

    ids: Tensor
    parts: int


def weighted_rows(weights: Tensor, values: Tensor) -> Tensor:
    """``weights * values`` of each token in fp64 ``[N]``.

    A token of weight zero counts as zero even if its value is not finite.
    """
    return torch.where(weights == 0, 0.0, weights.double() * values)


def sum_tokens(rows: Sequence[Tensor], partition: Partition | None) -> Tensor:
    """Add up each of K rows ``[N]``: ``[K, 1 + parts]``, of all tokens first, then of each part.

    A part does not see what is not finite in another one. Nothing waits for the device.
    """
    sums = torch.stack([row.sum() for row in rows]).unsqueeze(1)
    if partition is None:
        return sums
    numbers_P = torch.arange(partition.parts, device=partition.ids.device)
    is_mine_PN = partition.ids == numbers_P.unsqueeze(1)
    by_part_KP = torch.where(is_mine_PN, torch.stack(list(rows)).unsqueeze(1), 0.0).sum(2)
    return torch.cat([sums, by_part_KP], 1)
