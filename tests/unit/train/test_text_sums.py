"""Standard errors over texts: the ratio estimator's, against loops in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from megatron_distill.evaluation.calibration import BINS
from megatron_distill.losses.comparison import compare_with_ids, compare_with_logits
from megatron_distill.signals import DenseLogits, TopK
from megatron_distill.train.evaluation.speculative import DraftedBlock, Speculated, block_figures
from megatron_distill.train.evaluation.text_sums import (
    block_sums,
    summary_of,
    table_of,
    token_sums,
)
from tests.unit.losses.test_comparison import _shared_ids

_LENGTHS, _SIZE, _LONGEST = (9, 1, 14, 4, 0, 6), 13, 14


def _error(values: list[float], sizes: list[float]) -> float:
    """The formula of docs/comparison.md, in loops."""
    pairs = [(y, w) for y, w in zip(values, sizes, strict=True) if w]
    ratio = math.fsum(y for y, _ in pairs) / math.fsum(w for _, w in pairs)
    squares = math.fsum((y - ratio * w) ** 2 for y, w in pairs)
    count = len(pairs)
    return math.sqrt(count / (count - 1) * squares) / math.fsum(w for _, w in pairs)


def _random() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    count = sum(_LENGTHS)
    student, teacher = 2 * torch.randn(2, count, _SIZE, generator=generator, dtype=torch.float64)
    return {
        "student": student,
        "teacher": teacher + student,
        "labels": torch.randint(_SIZE, (count,), generator=generator),
        "weights": torch.rand(count, generator=generator, dtype=torch.float64) + 0.1,
        "texts": torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS)),
    }


def _figures(case: dict[str, torch.Tensor], found: Any) -> dict[str, Any]:
    """Of every second token on each of two ranks, as of texts that context ranks share."""
    whole = torch.zeros(2, len(_LENGTHS), _LONGEST, dtype=torch.float64)
    inside = torch.arange(_LONGEST) < torch.tensor(_LENGTHS)[:, None]
    for place, values in enumerate((found.overlap, found.overlap_most)):
        whole[place][inside] = values
    tables = []
    for rank in range(2):
        weights = case["weights"] * (torch.arange(len(case["weights"])) % 2 == rank)
        begins = inside & (torch.arange(_LONGEST) % 2 == rank)
        sums = token_sums(found, weights, case["texts"], len(_LENGTHS))
        sums |= block_sums(inside, begins, torch.zeros_like(inside, dtype=torch.int64), *whole)
        tables.append(table_of(sums).numpy())
    return summary_of(tables[0] + tables[1])


def test_errors_are_those_of_the_ratio_of_sums_over_texts() -> None:
    case = _random()
    labels, rows = case["labels"], torch.arange(sum(_LENGTHS))
    student, teacher = DenseLogits(case["student"]), DenseLogits(case["teacher"])
    figures = _figures(case, compare_with_logits(student, teacher, labels, rows))
    p, q = (np.exp(case[name].numpy()) for name in ("teacher", "student"))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    weights, texts = case["weights"].numpy(), case["texts"].numpy()
    own = [np.flatnonzero(texts == number) for number in range(len(_LENGTHS))]
    sizes = [float(weights[one].sum()) for one in own]
    entropies = [-(one * np.log(one)).sum(1) for one in (q, p)]
    hits = q.argmax(1) == labels.numpy()
    gaps = hits - q.max(1)
    bins = (q.max(1) * BINS).astype(int)
    signs = np.sign([(weights * gaps)[bins == number].sum() for number in range(BINS)])
    m = (p + q) / 2
    by_token = {
        "js_divergence": (p * np.log(p / m) + q * np.log(q / m)).sum(1) / 2,
        "top5_overlap": _shared_ids(q, p, 5),
        "top20_overlap": np.ones(len(q)),
        "forward_kl": (p * np.log(p / q)).sum(1),
        "reverse_kl": (q * np.log(q / p)).sum(1),
        "acceptance": np.minimum(p, q).sum(1),
        "top1_agreement": q.argmax(1) == p.argmax(1),
        "entropy_gap": entropies[0] - entropies[1],
        "label_nll": -np.log(q[rows, labels]),
        "calibration_error": signs[bins] * gaps,
    }
    for name, values in by_token.items():
        sums = [float((weights * values)[one].sum()) for one in own]
        assert figures[name] == pytest.approx(sum(sums) / sum(sizes), rel=1e-9), name
        assert figures[f"{name}_stderr"] == pytest.approx(_error(sums, sizes), rel=1e-9), name
    overlap = by_token["acceptance"]
    for length in (1, 3, 8):
        blocks = [
            [
                1 + float(np.cumprod(overlap[one[start : start + length]]).sum())
                for start in range(len(one) - length + 1)
            ]
            for one in own
        ]
        expected = _error([sum(one) for one in blocks], [len(one) for one in blocks])
        error = figures["tokens_per_verification_stderr"][str(length)]
        assert error == pytest.approx(expected, rel=1e-9)
    assert (figures["tokens"], figures["texts"]) == (sum(_LENGTHS), 5)


def test_ends_of_an_interval_have_errors_of_their_own() -> None:
    case = _random()
    labels, rows = case["labels"], torch.arange(sum(_LENGTHS))
    log_probs, ids = case["teacher"].log_softmax(1).topk(3)
    log_tail = torch.log1p(-log_probs.exp().sum(1))
    found = compare_with_ids(
        DenseLogits(case["student"]), TopK(ids, log_probs, log_tail), labels, rows
    )
    figures = _figures(case, found)
    weights, texts = case["weights"].numpy(), case["texts"].numpy()
    own = [np.flatnonzero(texts == number) for number in range(len(_LENGTHS))]
    sizes = [float(weights[one].sum()) for one in own]
    for place, values in enumerate((found.overlap, found.overlap_most)):
        sums = [float((weights * values.numpy())[one].sum()) for one in own]
        error = figures["acceptance_stderr"][place]
        assert error == pytest.approx(_error(sums, sizes), rel=1e-9)
    assert found.js_divergence is not None
    assert found.js_divergence_most is not None
    divergences = (found.js_divergence.numpy(), found.js_divergence_most.numpy())
    means = [float((weights * values).sum() / weights.sum()) for values in divergences]
    assert figures["js_divergence"] == pytest.approx(means, rel=1e-9)
    assert len(figures["js_divergence_stderr"]) == 2
    assert not {"top5_overlap", "top20_overlap"} & figures.keys(), "three ids are stored"
    # Blocks of one draft begin at every label, each of weight one.
    ends = figures["tokens_per_verification_stderr"]["1"]
    assert len(ends) == 2
    assert ends[0] != ends[1]


def test_a_model_beside_itself_has_no_error() -> None:
    case = _random()
    logits, rows = DenseLogits(case["student"]), torch.arange(sum(_LENGTHS))
    figures = _figures(case, compare_with_logits(logits, logits, case["labels"], rows))
    assert figures["js_divergence"] == 0
    assert figures["top5_overlap"] == figures["top20_overlap"] == 1
    for name in (
        *("forward_kl", "reverse_kl", "js_divergence", "top1_agreement", "top5_overlap"),
        *("entropy_gap", "acceptance"),
    ):
        assert figures[f"{name}_stderr"] == pytest.approx(0.0, abs=1e-15), name
    errors = figures["tokens_per_verification_stderr"]
    assert errors == pytest.approx(dict.fromkeys(errors, 0.0), abs=1e-14)


def test_masked_tokens_add_nothing_to_shared_ids_and_divergences() -> None:
    """A token of weight zero may be of another store, with few ids, or no number at all."""
    case = _random()
    rows, kept = torch.arange(sum(_LENGTHS)), torch.arange(sum(_LENGTHS)) % 3 > 0
    case["weights"] = case["weights"] * kept
    teacher, log_probs = case["teacher"], case["teacher"].log_softmax(1)
    given, ids = log_probs.sort(dim=1, descending=True, stable=True)
    given, ids = given[:, :8], ids[:, :8]
    stored = TopK(ids, given.masked_fill(~kept[:, None], -torch.inf), 1 - given.exp().sum(1))
    labels = case["labels"]
    whole = compare_with_logits(DenseLogits(case["student"]), DenseLogits(teacher), labels, rows)
    broken = teacher.masked_fill(~kept[:, None], torch.nan)
    found = compare_with_logits(DenseLogits(case["student"]), DenseLogits(broken), labels, rows)
    few = compare_with_ids(DenseLogits(case["student"]), stored, labels, rows)
    assert few.top5_overlap is not None
    assert few.top5_overlap.isnan().any()
    wanted = _figures(case, whole)
    for name in ("js_divergence", "top5_overlap", "top20_overlap", "js_divergence_stderr"):
        assert _figures(case, found)[name] == pytest.approx(wanted[name], rel=1e-12), name
    assert _figures(case, few)["top5_overlap"] == pytest.approx(wanted["top5_overlap"])


def test_errors_of_real_drafts_are_over_texts() -> None:
    chance = np.random.default_rng(5)
    texts = [
        Speculated((), tuple(DraftedBlock(int(n), float(n) / 2) for n in chance.integers(1, 4, k)))
        for k in (5, 0, 9, 2)
    ]
    sums = [float(sum(block.tokens for block in text.blocks)) for text in texts]
    expected = _error(sums, [float(len(text.blocks)) for text in texts])
    sampled, greedy = block_figures(texts, "sampled"), block_figures(texts, "greedy")
    assert sampled["tokens_per_verification_stderr"] == pytest.approx(expected)
    assert sampled["expected_stderr"] == pytest.approx(expected / 2)
    assert greedy["stderr"] == pytest.approx(expected)
    assert (sampled["blocks"], sampled["texts"]) == (16, 3)
    assert "stderr" not in block_figures(texts[:1], "greedy"), "one text"
