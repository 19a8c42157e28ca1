"""Figures beside a loss: calibration in bins, and the comparison with the teacher."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_distill.evaluation.calibration import BINS, equal_mass_error
from megatron_distill.losses.comparison import compare_with_logits
from megatron_distill.signals import DenseLogits
from megatron_distill.train.calibration import token_figures
from megatron_distill.train.evaluation.text_sums import (
    LONGEST_DRAFT,
    block_sums,
    summary_of,
    table_of,
    token_sums,
)

_TOKENS, _SIZE = 6 * BINS, 11


def _softmax(logits: torch.Tensor) -> np.ndarray:
    values = np.exp(logits.double().numpy())
    return values / values.sum(1, keepdims=True)


def _error(bins: list[np.ndarray], confidence: np.ndarray, right: np.ndarray) -> float:
    count = sum(map(len, bins))
    gaps = [abs(right[one].mean() - confidence[one].mean()) * len(one) for one in bins if len(one)]
    return sum(gaps) / count


def test_both_kinds_of_bins_equal_those_of_loops() -> None:
    generator = torch.Generator().manual_seed(8)
    student, teacher = (2 * torch.randn(2, _TOKENS, _SIZE, generator=generator)).unbind()
    labels = torch.randint(_SIZE, (_TOKENS,), generator=generator)
    rows, weights = torch.arange(_TOKENS), torch.ones(_TOKENS, dtype=torch.float64)
    found = compare_with_logits(DenseLogits(student), DenseLogits(teacher), labels, rows)
    texts = torch.arange(_TOKENS) % 7
    figures = summary_of(table_of(token_sums(found, weights, texts, 7)).numpy())
    q, p = _softmax(student), _softmax(teacher)
    confidence = q.max(1)
    widths = [np.flatnonzero((confidence * BINS).astype(int) == number) for number in range(BINS)]
    masses = np.array_split(np.argsort(confidence), BINS)
    own_weights, own, label, agrees = token_figures(found, weights)
    for right, name, kept in (
        (q.argmax(1) == labels.numpy(), "calibration_error", label),
        (q.argmax(1) == p.argmax(1), "calibration_error_to_teacher", agrees),
    ):
        assert figures[name] == pytest.approx(_error(widths, confidence, right), abs=1e-6)
        mass = equal_mass_error(own_weights, own, kept)
        assert mass == pytest.approx(_error(masses, confidence, right), abs=1e-6)
        assert mass != pytest.approx(figures[name], abs=1e-3)


def test_tokens_without_weight_do_not_count_and_weights_move_the_bounds() -> None:
    confidence, right = np.linspace(0.1, 0.9, 2 * BINS), np.arange(2 * BINS) % 2.0
    # Each token of the first half has a bin of its own; those of the second weigh next to nothing.
    weights = np.where(np.arange(2 * BINS) < BINS, 1.0, 1e-9)
    light = equal_mass_error(weights, confidence, right)
    alone = equal_mass_error(weights[:BINS], confidence[:BINS], right[:BINS])
    assert light == pytest.approx(alone, abs=1e-6)
    assert alone == pytest.approx(np.abs(right - confidence)[:BINS].mean(), abs=1e-9)
    found = compare_with_logits(
        *(DenseLogits(torch.randn(4, 5)) for _ in range(2)),
        torch.zeros(4, dtype=torch.int64),
        torch.arange(4),
    )
    counted = torch.tensor([1.0, 0.0, 2.0, 0.0], dtype=torch.float64)
    figures = token_figures(found, counted)
    assert figures.shape == (4, 2)
    assert figures[0].tolist() == [1.0, 2.0]


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
        assert int(found[f"blocks@{length}"].sum()) == count
        for name, value in sums.items():
            assert abs(float(found[f"{name}@{length}"].sum()) - value) < 1e-12
    assert found["blocks@5"].sum() > 0, "the case is not empty"


def test_means_come_with_the_tokens_and_blocks_that_they_are_of() -> None:
    """A token of weight zero is none; lengths that no document has are left out."""
    generator = torch.Generator().manual_seed(5)
    student, teacher = torch.randn(2, 6, 9, generator=generator).unbind()
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0, 1.0], dtype=torch.float64)
    labels, rows = torch.arange(6), torch.arange(6)
    found = compare_with_logits(DenseLogits(student), DenseLogits(teacher), labels, rows)
    valid, overlap = (weights > 0)[None], found.overlap[None]
    sums = token_sums(found, weights, torch.zeros_like(rows), 1) | block_sums(
        valid, valid, torch.zeros_like(valid, dtype=torch.int64), overlap, overlap
    )
    figures: dict[str, Any] = summary_of(table_of(sums).numpy())
    assert (figures["tokens"], figures["texts"]) == (5, 1)
    assert not [name for name, value in figures.items() if "_stderr" in name and value], "one text"
    assert figures["blocks"] == {"1": 5, "2": 3, "3": 2, "4": 1}
    assert set(figures["blocks"]) == set(figures["tokens_per_verification"])
