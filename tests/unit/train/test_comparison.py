"""Expected tokens of drafted blocks, against a loop over positions, and the counts of all means."""

from __future__ import annotations

from typing import Any

import torch

from megatron_distill.losses.comparison import compare_with_logits
from megatron_distill.signals import DenseLogits
from megatron_distill.train.comparison import (
    LONGEST_DRAFT,
    SUM_NAMES,
    block_sums,
    summary_of,
    token_sums,
)


def test_blocks_stay_within_documents_and_trained_labels() -> None:
    generator = torch.Generator().manual_seed(3)
    least = torch.rand(2, 12, generator=generator, dtype=torch.float64)
    most = least + (1 - least) / 2
    valid = torch.rand(2, 12, generator=generator) > 0.15
    begins = torch.rand(2, 12, generator=generator) > 0.3
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    found = block_sums(valid, begins, documents, least, most)
    for length in range(1, LONGEST_DRAFT + 1):
        count, sums = 0, {"overlap": 0.0, "overlap_most": 0.0}
        for row in range(2):
            for start in range(12 - length + 1):
                block = slice(start, start + length)
                of_one = documents[row, block].unique().numel() == 1
                if not (begins[row, start] and valid[row, block].all() and of_one):
                    continue
                count += 1
                for name, acceptance in {"overlap": least, "overlap_most": most}.items():
                    sums[name] += float(1 + acceptance[row, block].cumprod(0).sum())
        assert int(found[f"blocks@{length}"]) == count
        for name, value in sums.items():
            assert abs(float(found[f"{name}@{length}"]) - value) < 1e-12
    assert found["blocks@5"] > 0, "the case is not empty"


def test_means_come_with_the_tokens_and_blocks_that_they_are_of() -> None:
    """A token of weight zero is none; lengths that no document has are left out."""
    generator = torch.Generator().manual_seed(5)
    student, teacher = torch.randn(2, 6, 9, generator=generator).unbind()
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0, 1.0], dtype=torch.float64)
    labels, rows = torch.arange(6), torch.arange(6)
    found = compare_with_logits(DenseLogits(student), DenseLogits(teacher), labels, rows)
    assert found.overlap is not None
    valid, overlap = (weights > 0)[None], found.overlap[None]
    sums = token_sums(found, weights) | block_sums(
        valid, valid, torch.zeros_like(valid, dtype=torch.int64), overlap, overlap
    )
    figures: dict[str, Any] = summary_of({name: float(sums.get(name, 0)) for name in SUM_NAMES})
    assert figures["tokens"] == 5
    assert figures["blocks"] == {"1": 5, "2": 3, "3": 2, "4": 1}
    assert set(figures["blocks"]) == set(figures["tokens_per_verification"])
