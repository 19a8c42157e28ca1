"""Features of a teacher's layers, and the heads of queries and keys between two layouts.

Pure functions of layouts and shapes: every rank computes all of it without a message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

import torch
from torch import Tensor

from megatron_distill.train.teachers.units import Grid, Message, messages

if TYPE_CHECKING:
    from megatron_distill.models.architecture import Architecture

__all__ = [
    "FeatureKind",
    "attention_messages",
    "attention_parts",
    "feature_kinds",
    "joined_parts",
    "sizes_per_position",
]

# Of a layer: its output, or the queries or keys of its attention. Keys are those of the whole
# sequence, on each context rank.
FeatureKind = Literal["output", "query", "key"]

_OF_STATES: Final[tuple[FeatureKind, ...]] = ("output",)
_OF_MAPS: Final[tuple[FeatureKind, ...]] = ("query", "key")


def feature_kinds(*, of_attention: bool) -> tuple[FeatureKind, ...]:
    """Return the features of the teacher's layer that a pair of layers compares."""
    return _OF_MAPS if of_attention else _OF_STATES


def attention_parts(teacher: int, student: int) -> tuple[int, int]:
    """Return the parts of heads that a student's tensor rank receives, and the copies of each part.

    A part is the heads of one of the teacher's tensor ranks. The numbers of tensor ranks are
    `teacher` and `student`, of which one divides the other.
    """
    return max(1, teacher // student), max(1, student // teacher)


def sizes_per_position(shape: Architecture, tensor: int) -> dict[FeatureKind, tuple[int, ...]]:
    """Return the sizes of each feature at one position, on one of `tensor` tensor ranks."""
    key_heads = max(1, shape.num_kv_heads // tensor)  # at least one, which ranks share
    return {
        "output": (shape.hidden_size,),
        "query": (shape.num_attention_heads // tensor, shape.head_size),
        "key": (key_heads, shape.head_size),
    }


@lru_cache(maxsize=4096)
def attention_messages(
    grids: tuple[Grid, Grid],
    stages: tuple[int, int],
    length: int,
    replicas: tuple[int, int],
    *,
    is_whole: bool,
) -> tuple[tuple[int, Message], ...]:
    """Return the messages of queries or keys, each with the number of its part of the heads.

    grids: of the teacher and the student, as are `stages` and `replicas`. is_whole: of keys, which
    each context rank has of the whole sequence.
    """
    holders, needs = (
        # Heads are divided over tensor ranks, positions are not.
        replace(grid, sequence=False).holdings(
            length, replica=replica, stage=stage, is_whole=is_whole
        )
        for grid, replica, stage in zip(grids, replicas, stages, strict=True)
    )
    teacher, student = (grid.tensor for grid in grids)
    parts, copies = attention_parts(teacher, student)
    return tuple(
        (part, message)
        for own in range(student)
        for part in range(parts)
        for message in messages(
            holders[own * parts // copies + part :: teacher], needs[own::student]
        )
    )


def joined_parts(
    found: Iterable[tuple[tuple[FeatureKind, int], Tensor]],
) -> dict[tuple[str, int], Tensor]:
    """Return one tensor per kind and layer; those of several parts, in order, have all heads."""
    parts: dict[tuple[str, int], list[Tensor]] = {}
    for name, tensor in found:
        parts.setdefault(name, []).append(tensor)
    # Queries and keys are [s, b, n, d], a part of the heads n each.
    return {name: one[0] if len(one) == 1 else torch.cat(one, 2) for name, one in parts.items()}
