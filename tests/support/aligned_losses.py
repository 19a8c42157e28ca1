"""Divergences per chunk between tokenizers from float64 problems, and shards of their models."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_distill.losses import AlignedSide, cross_tokenizer_divergence
from megatron_distill.ops import VocabShard
from megatron_distill.signals import DenseLogits
from tests.reference.cross_tokenizer import Alignment

DIVERGENCES = [
    ("forward_kl", {}),
    ("reverse_kl", {}),
    ("js_divergence", {}),
    ("total_variation", {}),
    ("squared_hellinger", {}),
    ("skewed_forward_kl", {"skew_lambda": 0.2}),
    ("skewed_reverse_kl", {"skew_lambda": 0.2}),
]
WORLDS = [1, 2, 4]
SIZES = (83, 61)
# Padded sizes of student and teacher: even shards, and last shards of padding alone.
PADDED = [(84, 64), (128, 112)]


class AlignedLossCase(Protocol):
    """A loss with the arguments of `cross_tokenizer_divergence` that select it."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments."""
        ...


def divergence(
    student: Tensor,
    teacher: Tensor,
    at: Alignment,
    loss: AlignedLossCase,
    *,
    tile_tokens: int = 7,
    shards: tuple[VocabShard | None, VocabShard | None] = (None, None),
) -> Tensor:
    """The loss per chunk of whole logits."""
    return cross_tokenizer_divergence(
        student,
        DenseLogits(teacher),
        **loss.arguments,
        student=AlignedSide(at.student_chunks, at.student_labels, shards[0]),
        teacher_side=AlignedSide(at.teacher_chunks, at.teacher_labels, shards[1]),
        chunks=at.count,
        tile_tokens=tile_tokens,
    )


def padded(values: Tensor, size: int) -> Tensor:
    """Append rows of NaN, so that reading them shows in the result."""
    return torch.nn.functional.pad(values, (0, 0, 0, size - len(values)), value=torch.nan)


def shards_for(rank: int, world: int, sizes: tuple[int, int]) -> tuple[VocabShard, VocabShard]:
    """The shards of student and teacher on one rank, of these padded sizes."""
    return (
        VocabShard.for_rank(SIZES[0], sizes[0], rank, world),
        VocabShard.for_rank(SIZES[1], sizes[1], rank, world),
    )
