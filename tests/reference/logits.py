"""Random logits of two models, unrelated or nearly alike."""

from __future__ import annotations

import torch
from torch import Tensor


def logit_pair(
    tokens: int,
    vocab: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    spread: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """Student's and teacher's logits ``[tokens, vocab]`` of standard deviation ``spread``."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, tokens, vocab, generator=generator, dtype=torch.float64)
    return (student * spread).to(dtype), (teacher * spread).to(dtype)


def neighbours(
    tokens: int, vocab: int, noise: float, *, spread: float = 2.0, seed: int = 5
) -> tuple[Tensor, Tensor]:
    """fp32 logits ``[tokens, vocab]`` of a student that is the teacher and noise, and these."""
    generator = torch.Generator().manual_seed(seed)
    teacher, difference = torch.randn(2, tokens, vocab, generator=generator)
    teacher *= spread
    return teacher + noise * difference, teacher
