"""Rotary embeddings of a step's positions.

A head's numbers i and i + w/2 are rotated together, for the first w of d. On a CPU they lie side by
side: the rows of the product that makes the heads are copied in this order. Then a rotation is one
complex product in place of three operations. Scores do not depend on the order.

Shapes: N positions, g key-value heads of this rank, h heads of each group, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["RotaryPlanes", "is_paired", "paired_order", "paired_rows", "rotary_table", "rotate_"]

RotaryPlanes = Sequence[Tensor]
"""Cosines and signed sines of the positions, [N, 1, 1, d] each; or one of both, [N, 1, 1, d/2]."""


def is_paired(rotation: RotaryPlanes) -> bool:
    """Return whether the numbers that a rotation takes together lie side by side."""
    return len(rotation) == 1


def rotary_table(angles_sr: Tensor, *, head_size: int, dtype: torch.dtype, paired: bool) -> Tensor:
    """Return the planes of all positions s from their angles, [s, 1 or 2, 1, 1, d/2 or d].

    Numbers of a head beyond the angles are not rotated.
    """
    width = angles_sr.shape[1]
    cosines = F.pad(angles_sr.cos(), (0, head_size - width), value=1.0)
    sines = F.pad(angles_sr.sin(), (0, head_size - width))
    if paired:
        both = torch.complex(cosines, sines)
        turning, still = both[:, : width // 2], both[:, width::2]
        return torch.cat([turning, still], 1)[:, None, None, None]
    signed = torch.cat([-sines[:, : width // 2], sines[:, width // 2 :]], -1)
    return torch.stack([cosines, signed], 1)[:, :, None, None].to(dtype)


def paired_order(head_size: int, width: int) -> Tensor:
    """Return the numbers of a head, int64 [d], with those that are rotated together in pairs."""
    turning = torch.arange(width).view(2, -1).t().flatten()
    return torch.cat([turning, torch.arange(width, head_size)])


def paired_rows(rows: Tensor, order_d: Tensor, *, groups: int) -> Tensor:
    """Return a copy of the rows of queries, keys and values [g (r + 2) d, ...], the first paired.

    groups: g. Values keep their order.
    """
    size = order_d.shape[0]
    heads = rows.view(groups, -1, size, *rows.shape[1:])
    found = torch.empty_like(heads)
    torch.index_select(heads[:, :-1], 2, order_d.to(rows.device), out=found[:, :-1])
    found[:, -1:] = heads[:, -1:]
    return found.view_as(rows)


def rotate_(heads: Tensor, rotation: RotaryPlanes, width: int, *, out: Tensor) -> None:
    """Rotate the first `width` numbers of each head [N, g, h, d]; overwrites the heads.

    `out`: may be the heads. Source: RoFormer, arXiv 2104.09864, equation 34.
    """
    if is_paired(rotation):
        torch.mul(heads.view(torch.complex64), rotation[0], out=out.view(torch.complex64))
        return
    cosines, sines = rotation
    if width == heads.shape[-1]:
        swapped = heads.roll(width // 2, -1)
    else:
        half = width // 2
        parts = [heads[..., half:width], heads[..., :half], heads[..., width:]]
        swapped = torch.cat(parts, -1)
    torch.addcmul(heads.mul_(cosines), swapped, sines, out=out)
