"""Checks that tensors, vocabulary shard and process group describe the same layout."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megatron_distill.errors import counted
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.signals import Signal

__all__ = ["check_columns", "check_per_token", "check_rows", "resolve_shard"]


def resolve_shard(
    width: int, shard: VocabShard | None, group: dist.ProcessGroup | None
) -> tuple[VocabShard, dist.ProcessGroup | None]:
    """The shard (all columns if None) and the group (None if it has one rank).

    Raises:
        ValueError: the width is not the shard's, or a single rank does not hold all columns.
    """
    if shard is None:
        shard = VocabShard(width, 0, width)
    if width != shard.width:
        raise ValueError(
            f"the student has {width} vocabulary columns on this rank, "
            f"its shard [{shard.start}, {shard.stop}) has {shard.width}"
        )
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    if group is None and (shard.start > 0 or shard.stop < shard.size):
        raise ValueError(
            f"shard [{shard.start}, {shard.stop}) is part of a vocabulary of {shard.size}; "
            "pass the tensor-parallel group that holds the rest"
        )
    return shard, group


def check_columns(width: int, shard: VocabShard, group: dist.ProcessGroup | None) -> None:
    """Refuse teacher columns that do not match the student's shard.

    A rank that holds the whole vocabulary may have any padding. Shards of several ranks must be
    equally wide, or else they start at different ids.

    Raises:
        ValueError: they do not fit.
    """
    if group is None and width < shard.size:
        raise ValueError(
            f"the teacher has {width} vocabulary columns; the vocabulary has {shard.size}"
        )
    if group is not None and width != shard.width:
        raise ValueError(
            f"the teacher has {width} vocabulary columns on this rank, the student {shard.width}: "
            "pad both vocabularies to one size when they are split over ranks"
        )


def check_rows(count: int, **held: Tensor | Signal) -> None:
    """Refuse per-token tensors and signals whose number of tokens is not ``count``.

    Raises:
        ValueError: naming the first mismatch.
    """
    for name, one in held.items():
        rows = one.shape[0] if isinstance(one, Tensor) else one.tokens
        if rows != count:
            raise ValueError(f"{name} has {counted(rows, 'row')} for {counted(count, 'token')}")


def check_per_token(count: int, **tensors: Tensor) -> None:
    """Refuse tensors that are not ``[count]``: a second dimension would silently broadcast.

    Raises:
        ValueError: naming the first mismatch.
    """
    for name, tensor in tensors.items():
        if tensor.dim() != 1:
            raise ValueError(
                f"{name} is of shape {tuple(tensor.shape)}; "
                f"it must be one number for each of {count} tokens"
            )
    check_rows(count, **tensors)
